"""Options that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_backend_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Which backends, on which libraries and which device."""
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        dest="backends",
        help=f"a name that `conformance backends` lists, a pair 'prefill,decode' of them, or pkg.mod:Class; "
        f"may be repeated (default: {default})",
    )
    parser.add_argument(
        "--library",
        choices=("fake", "real"),
        default="fake",
        help="which kernel libraries answer (default: fake)",
    )
    parser.add_argument(
        "--mode",
        choices=("strict", "faithful"),
        default="strict",
        help="strict fakes record what the real library silently gets wrong; faithful ones do as it does "
        "(default: strict)",
    )
    parser.add_argument(
        "--device-sim",
        choices=("auto", "light", "full"),
        default="auto",
        help="which simulated CUDA device the backends see that need a library (default: auto)",
    )


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least` on."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    """What a `Session` is given besides the names."""
    return {"library": args.library, "mode": args.mode, "device_sim": args.device_sim}
