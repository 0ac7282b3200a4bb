"""`conformance replay`: one case again, with everything that is to be said about it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cases.codec import from_json, load, short
from cases.errors import read_text
from cases.model import Case
from conformance.choices import chosen_backends
from conformance.cli.usage import add_backend_options, session_options
from conformance.errors import UsageError
from conformance.examine import examine
from conformance.isolation.session import open_session
from conformance.outcome import Verdict
from conformance.question import Question
from conformance.render import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_backend_options(parser, "all built-in ones")
    parser.add_argument(
        "case", metavar="CASE", help="a case file, a case as JSON, or - to read one from stdin"
    )


def main(args: argparse.Namespace) -> int:
    case = read_case(args.case)
    question = Question(case)
    failed = asked = False
    reasons: list[str] = []
    with open_session(chosen_backends(args.backends), **session_options(args)) as session:
        for asker in session.askers:
            verdict = examine(question, asker)
            if verdict.unsupported is not None:
                reasons.append(f"{verdict.backend}: unsupported: {verdict.unsupported}")
                continue
            asked = True
            failed |= bool(verdict.failed)
            print(f"\n{render(asker, case, verdict)}\n" if verdict.failed else _passed(verdict))
    print("\n".join(reasons), end="\n" if reasons else "")
    if not asked:
        raise UsageError(f"no backend that was named declares what case {short(question.digest)} needs")
    return int(failed)


def read_case(text: str) -> Case:
    """A case from a file (with or without its `why`), from JSON, or from stdin ("-").

    Raises:
        CaseError: what is wrong with it, in one sentence.
    """
    if text == "-":
        return from_json(sys.stdin.read(), name="stdin")
    if text.lstrip().startswith("{"):
        return from_json(text)
    content = read_text(text)
    return load(text).case if '"case"' in content else from_json(content, name=str(Path(text)))


def _passed(verdict: Verdict) -> str:
    checks = ", ".join(verdict.outcomes)
    return f"{verdict.backend}: passed {checks} on case {short(verdict.digest)}"
