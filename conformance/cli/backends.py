"""`conformance backends`: names, and what each declares."""

from __future__ import annotations

import argparse

from backends.libraries import DISTRIBUTIONS, use
from backends.registry import describe, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="backends to describe (default: all)")


def main(args: argparse.Namespace) -> int:
    use("fake", DISTRIBUTIONS)  # modules of backends import their libraries
    listed: list[str] = args.names or names()
    wide = max(map(len, listed))
    for name in listed:
        print(f"{name:{wide}}  {describe(name)}")
    return 0
