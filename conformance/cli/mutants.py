"""`conformance mutants`: plant known faults, and see that each is caught by the check that claims it."""

from __future__ import annotations

import argparse
import sys

from conformance.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    parser.add_argument(
        "--mode",
        action="append",
        choices=("strict", "faithful"),
        default=[],
        dest="modes",
        help="how the fakes behave; may be repeated (default: both)",
    )


def main(args: argparse.Namespace) -> int:
    from conformance.mutants.run import MUTANTS, run_mutants

    for name in args.names:
        if name not in MUTANTS:
            raise UsageError(f"unknown mutant {name!r} (known: {', '.join(sorted(MUTANTS))})")
    return run_mutants(args.names, args.modes or ["strict", "faithful"], sys.stdout)
