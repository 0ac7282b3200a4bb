"""`conformance bench`: measure speed and what each kind of values detects. Its options are its own."""

from __future__ import annotations

import argparse


def main(args: argparse.Namespace) -> int:
    from conformance import bench

    return bench.main(args.rest)
