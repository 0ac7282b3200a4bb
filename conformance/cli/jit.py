"""`conformance jit`: compile the kernels of FlashInfer that a run needs, before it, or on a machine without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.choices import chosen_backends
from conformance.errors import UsageError
from conformance.jit.build import Listing, needed, prepare
from conformance.jit.choose import DEFAULT_VARIANTS
from conformance.jit.prebuild import HOPPER, prebuild
from conformance.limits import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        dest="backends",
        help="compile for this backend; may be repeated (default: all built-in ones)",
    )
    parser.add_argument(
        "--variants",
        type=at_least(1),
        default=DEFAULT_VARIANTS,
        metavar="N",
        help="kernels at most (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="say what is needed, compile nothing")
    parser.add_argument(
        "--prebuild",
        metavar="DIR",
        help="compile without a GPU, into a folder to put on PYTHONPATH on the machine that has one",
    )
    parser.add_argument(
        "--arch",
        default=None,
        metavar="X.Y",
        help=f"with --prebuild: compute capability of that GPU (default: {HOPPER}, an H100 or H200)",
    )
    parser.add_argument(
        "--jobs", type=at_least(1), metavar="N", help="compilers at a time (default: 1.5 a core)"
    )


def main(args: argparse.Namespace) -> int:
    names = chosen_backends(args.backends)
    if args.arch is not None and args.prebuild is None:
        raise UsageError("--arch needs --prebuild: with a GPU here, its own is taken")
    if args.prebuild is not None:
        listing = prebuild(
            names,
            Path(args.prebuild),
            limit=args.variants,
            arch=args.arch or HOPPER,
            jobs=args.jobs,
        )
    elif args.list:
        listing = needed(names, args.variants)
    else:
        listing = prepare(names, args.variants, jobs=args.jobs)
    _tell(listing, done=not args.list)
    if args.prebuild is not None and listing.modules:
        print(f"\non the machine with the GPU: export PYTHONPATH={Path(args.prebuild).resolve()}")
    return 0


def _tell(listing: Listing, *, done: bool) -> None:
    if not listing.modules:
        print("these backends need no kernel of flashinfer")
        return
    print(f"flashinfer {listing.release}, architecture {listing.arch}, in {listing.folder}")
    for compiled in listing.modules:
        print(f"  {'compiled' if compiled.ready or done else 'missing ':8} {compiled.module}")
