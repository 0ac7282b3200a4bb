"""The command line: one file a subcommand, each with `add_arguments(parser)` and `main(args)`."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from conformance.cli.parser import Parser
from conformance.version import own_version

COMMANDS = {
    "run": "ask backends many cases; print the matrix backend x check and every failure",
    "replay": "ask backends one case again",
    "backends": "list the backends and what each declares",
    "mutants": "plant known faults and see that each is caught",
    "fidelity": "ask fakes and real libraries the same calls, sound and malformed, and compare",
    "faults": "crash and hang worker processes on purpose and see that each gets its own outcome",
    "jit": "compile the kernels of FlashInfer that a run on a GPU needs, on a machine with one or without",
    "bench": "measure speed and what each kind of values detects",
}


def run_command(argv: Sequence[str]) -> int:
    """Parse and run; every mistake of the user's ends in one sentence on stderr and exit code 2."""
    try:
        args = _parse(argv)
        return int(importlib.import_module(f"conformance.cli.{args.command}").main(args))
    except KeyboardInterrupt:
        print("conformance: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        _leave_stdout()
        return 141
    except Exception as error:  # noqa: BLE001 - the last resort
        return _failed(error)


def _failed(error: Exception) -> int:
    from conformance.choices import WRONG_USAGE  # torch comes with it, which `--help` does not wait for

    if isinstance(error, WRONG_USAGE):
        print(f"conformance: error: {error}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print(f"conformance: error: {error.strerror}: the run could not be told to its end", file=sys.stderr)
        _leave_stdout()
        return 2
    traceback.print_exception(error)
    print(f"conformance: the harness itself failed: {type(error).__name__}: {error}", file=sys.stderr)
    return 3


def _leave_stdout() -> None:
    """Python would complain once more at exit about what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the chosen command only: other commands' files are not imported."""
    if argv[:1] == ["bench"]:  # it reads its own options
        return argparse.Namespace(command="bench", rest=list(argv[1:]))
    parser = Parser(
        prog="conformance", description="Conformance of attention backends of LLM serving engines."
    )
    parser.add_argument("--version", action="version", version=f"attention-conformance {own_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if name == chosen:
            importlib.import_module(f"conformance.cli.{name}").add_arguments(command)
    return parser.parse_args(argv)
