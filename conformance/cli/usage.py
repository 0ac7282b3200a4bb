"""Options that several commands take."""

from __future__ import annotations

import argparse
from typing import Any

from conformance.errors import UsageError
from conformance.isolation.deadlines import DEFAULT_CASE
from conformance.jit.choose import DEFAULT_VARIANTS
from conformance.limits import at_least, seconds


def engine_path(folder: str) -> str:
    """An argparse type: a folder that engines are then found in."""
    from backends.engines.path import look_in
    from backends.registry import BackendError

    try:
        look_in(folder)
    except BackendError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--engine-path ")) from None
    return folder


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
    parser.add_argument(
        "--engine-path",
        action="append",
        type=engine_path,
        metavar="DIR",
        help="where the package of an engine lies that a backend adapts: a folder that it was installed into, or a "
        "checkout; may be repeated",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda"),
        default="auto",
        help="cuda: a real GPU, which is what --library real runs on (default: auto)",
    )
    parser.add_argument(
        "--variants",
        type=at_least(1),
        default=DEFAULT_VARIANTS,
        metavar="N",
        help="with --library real: kernels that FlashInfer compiles, at most; cases are drawn for these "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="ask in worker processes, so that a crash or a hang costs one case (default: for real libraries, and "
        "where --workers or --deadline is given)",
    )
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="worker processes (default: one a GPU, else one)",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help=f"what one case on one backend may take before its worker is killed (default: {DEFAULT_CASE:g})",
    )


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `conformance.isolation.session.open_session` is given besides the names.

    Raises:
        UsageError: a real device for fakes.
    """
    if args.device == "cuda" and args.library == "fake":
        raise UsageError("--device cuda needs --library real: on the fakes backends see a simulated device")
    names = ("library", "mode", "device_sim", "isolate", "workers", "deadline", "variants")
    return {name: getattr(args, name) for name in names}
