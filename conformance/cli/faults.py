"""`conformance faults`: crash, hang and poison worker processes on purpose; each must get its own outcome."""

from __future__ import annotations

import argparse

from conformance.limits import seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--library",
        choices=("fake", "real"),
        default="fake",
        help="real: also those that only a GPU has (default: fake)",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="after which a hang is killed (default: 10)",
    )


def main(args: argparse.Namespace) -> int:
    from conformance.isolation.inject import inject

    bad = 0
    for seen in inject(library=args.library, deadline=args.deadline):
        print(f"{seen.fault.name:20} {seen.fault.outcome:10} {seen.message}")
        for wrong in seen.wrong:
            print(f"{'':20} WRONG: {wrong}")
        bad += bool(seen.wrong)
    print("every fault got its own outcome, its neighbours theirs" if not bad else f"{bad} are wrong")
    return 1 if bad else 0
