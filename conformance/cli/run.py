"""`conformance run`: many cases, the matrix, what was reached, and every failure made small."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from conformance import report
from conformance.campaign import Campaign
from conformance.checks import CHECKS
from conformance.choices import (
    DEFAULT_BATCHES,
    TraceBatches,
    chosen_backends,
    require_checks,
    require_level,
    trace_batches,
)
from conformance.cli.progress import Progress
from conformance.cli.replay import read_case
from conformance.cli.usage import add_backend_options, session_options
from conformance.errors import UsageError
from conformance.isolation.journal import left_behind
from conformance.isolation.session import open_session
from conformance.limits import at_least
from conformance.matrix import matrix
from conformance.render import FOLDER, render
from conformance.resume import resume

DEFAULT_CASES = 300
DEFAULT_SESSIONS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_backend_options(parser, "all built-in ones and the hybrids fa,fi and fi,fa")
    parser.add_argument(
        "--cases",
        type=at_least(0),
        metavar="N",
        help=f"random cases per backend (default: {DEFAULT_CASES}; none beside --trace or --case)",
    )
    parser.add_argument(
        "--sessions",
        type=at_least(0),
        metavar="N",
        help="random sessions per engine-level backend: many batches over one pool (default: "
        f"{DEFAULT_SESSIONS}; none beside --trace or --case)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="of the random cases (default: 0)"
    )
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME",
        dest="checks",
        help=f"of {', '.join(CHECKS)} (default: all)",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="ask the batches of a request trace (Azure CSV, Mooncake JSON lines)"
    )
    parser.add_argument(
        "--page-size", type=at_least(1), metavar="N", help="of the trace's batches (default: 16)"
    )
    parser.add_argument(
        "--batches", type=at_least(1), metavar="N", help=f"of the trace, at most (default: {DEFAULT_BATCHES})"
    )
    parser.add_argument(
        "--token-limit",
        type=at_least(1),
        metavar="N",
        help="tokens that the trace's longest request is scaled to",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="FILE", dest="case_files", help="ask this case too"
    )
    parser.add_argument("--report", metavar="FILE", help="write a report, as JSON lines")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the report of a run that was cut: what it has is not asked again",
    )


def main(args: argparse.Namespace) -> int:
    given = [read_case(path) for path in args.case_files]
    trace = _trace(args)
    only = bool(args.trace or args.case_files)
    count = args.cases if args.cases is not None else 0 if only else DEFAULT_CASES
    sessions = args.sessions if args.sessions is not None else 0 if only else DEFAULT_SESSIONS
    names = chosen_backends(args.backends)
    require_checks(args.checks)
    if args.resume and args.report is None:
        raise UsageError("--resume is about a report: it needs --report FILE")
    with ExitStack() as stack:
        session = stack.enter_context(open_session(names, **session_options(args)))
        require_level([*given, *trace.cases], session.specs)
        head = report.header(
            command=sys.argv,
            backends=names,
            libraries=session.libraries,
            device=session.device,
            mode=args.mode,
            seed=args.seed,
            checks=[name for name in CHECKS if name in (args.checks or CHECKS)],
        )
        resumed = resume(args.report, head) if args.resume else None
        writer = stack.enter_context(report.Writer(args.report, head, resumed)) if args.report else None
        print(_head_text(head, session.left_out, count, sessions, trace), flush=True)
        _tell_earlier(resumed)
        campaign = Campaign(
            session.askers,
            count=count,
            sessions=sessions,
            seed=args.seed,
            smoke=True,
            named=not only,
            given=[*given, *trace.cases],
            checks=args.checks or None,
            told=Progress(None if writer is None else writer.verdict),
            known=None if resumed is None else resumed.known,
        )
        interrupted = _run(campaign)
        if writer is not None:
            writer.interrupted = interrupted
        _tell(campaign, args.checks, writer)
        _tell_failures(campaign, writer, shrunk=not interrupted)
    if writer is not None and writer.lost is not None:
        raise report.ReportError(
            f"{args.report}: cannot be written ({writer.lost}): what was asked is above, but not all of it is in the "
            "report"
        )
    if interrupted:
        print("conformance: interrupted; what was asked until then is above", file=sys.stderr)
        return 130
    return 0 if campaign.clean else 1


def _trace(args: argparse.Namespace) -> TraceBatches:
    if args.trace is not None:
        return trace_batches(
            args.trace, page_size=args.page_size, count=args.batches, limit=args.token_limit, seed=args.seed
        )
    for name in ("page_size", "batches", "token_limit"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is about a trace: it needs --trace FILE")
    return TraceBatches()


def _head_text(head: report.Header, left_out: str, count: int, sessions: int, trace: TraceBatches) -> str:
    libraries = ", ".join(f"{name} {a.version} ({a.kind})" for name, a in head.libraries.items()) or "none"
    lines = [
        f"attention-conformance {head.version}, Python {head.python}, torch {head.torch}",
        f"backends     {' '.join(head.backends)}",
        f"libraries    {libraries}, {head.mode} mode",
        f"device       {head.device}",
        f"left out     {left_out}",
        f"cases        {count} random ones per backend, seed {head.seed}",
        f"sessions     {sessions} random ones per engine-level backend",
    ]
    for label, line in zip(("trace", *[""] * len(trace.lines)), trace.lines, strict=False):
        lines.append(f"{label:12} {line}")
    return "\n".join(lines)


def _tell_earlier(resumed: report.Resumed | None) -> None:
    """What is left of earlier runs."""
    if resumed is not None:
        print(f"resumed      {resumed.lines.total()} verdicts are in the report and not asked again")
    for left in left_behind(Path(FOLDER)):
        print(f"left behind  a case that {left.why}: conformance replay {left.file}")


def _run(campaign: Campaign) -> bool:
    """Whether the user interrupted it."""
    try:
        campaign.run()
    except KeyboardInterrupt:
        return True
    return False


def _tell(campaign: Campaign, checks: list[str], writer: report.Writer | None) -> None:
    print(f"\n{matrix(campaign.tallies.values(), checks or None)}")
    for level, sweep in campaign.sweeps.items():
        print(f"\nreached, level {level}\n{sweep.reached.table()}", flush=True)
        if writer is not None:
            writer.reached(level, sweep.reached)


def _tell_failures(campaign: Campaign, writer: report.Writer | None, *, shrunk: bool) -> None:
    for name, tally in campaign.tallies.items():
        for failure in [] if tally.clean else campaign.failures(name, shrunk=shrunk):
            print(f"\n{render(failure.asker, failure.case, failure.verdict)}", flush=True)
            if writer is not None:
                writer.verdict(failure.case, failure.verdict, shrunk=True)
