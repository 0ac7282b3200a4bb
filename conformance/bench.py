"""`conformance bench`: what the harness costs and how sharp it sees."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from typing import Literal

from conformance.benches import devices, needles, throughput
from conformance.cli.parser import Parser
from conformance.errors import UsageError
from conformance.limits import at_least
from conformance.machine import GPU
from fakes.cuda import DeviceUnavailable

BACKENDS = ("torch", "fi", "fi-paged", "fa", "kernel:fi-decode", "kernel:fi-prefill", "kernel:fa-kvcache")
GPU_BACKENDS = (*BACKENDS, "kernel:fi-prefill-fa3", "kernel:fi-ragged", "kernel:fi-merge", "kernel:fa-varlen")


def main(argv: Sequence[str]) -> int:
    """Measure the parts named (all of them where none is) and print the numbers.

    Raises:
        choices.WRONG_USAGE: an option that makes no sense, a library that cannot be had.
    """
    parser = Parser(prog="conformance bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; default: all")
    parser.add_argument(
        "--cases", type=at_least(1), default=200, help="cases per backend and round (default %(default)s)"
    )
    parser.add_argument(
        "--trials", type=at_least(1), default=1000, help="needle trials each (default %(default)s)"
    )
    parser.add_argument(
        "--library",
        choices=("fake", "real"),
        default="fake",
        help="real: throughput with real libraries and the oracle, both on a GPU (default %(default)s)",
    )
    options = parser.parse_args(argv)
    unknown = [part for part in options.parts if part not in _PARTS]
    if unknown:
        raise UsageError(f"no bench {unknown[0]!r}; there are {', '.join(_PARTS)}")
    default = _PARTS if options.library == "fake" else ("throughput", "oracle")
    for part in options.parts or default:
        print(f"\n{part}")
        _PARTS[part](options)
    return 0


def _throughput(options: argparse.Namespace) -> None:
    """Default mix: up to 8 requests, up to 64 tokens in all (a stated share is longer), 2 layers, two executions."""
    print(f"  the best of {throughput.ROUNDS} rounds, Python {platform.python_version()}")
    print(f"  this machine, now: {throughput.pace()}", flush=True)
    if options.library == "real":
        for result in throughput.measure(GPU_BACKENDS, options.cases, library="real"):
            print(f"  {result}", flush=True)
        return
    kinds: tuple[Literal["light", "full"], ...] = ("light", "full")  # the full one also replays graphs
    for kind in kinds:
        print(f"  on the {kind} simulated device:")
        try:
            for result in throughput.measure(BACKENDS, options.cases, device_sim=kind):
                print(f"  {result}", flush=True)
        except DeviceUnavailable as error:
            print(f"  {error}")


def _needles(options: argparse.Namespace) -> None:
    for result in needles.measure(options.trials):
        print(f"  {result}", flush=True)


def _oracle(options: argparse.Namespace) -> None:
    if options.library == "real":
        _oracle_on_gpu()
        return
    from reference.bench import measure

    cost = measure()
    print("  one layer, 64 decode requests of 4,000 tokens, 32/8 heads of 128, float16, one thread:")
    print(f"  oracle {cost.layer_s:.2f} s, torch float64 SDPA {cost.sdpa_s:.2f} s: {cost.ratio:.2f} times")
    print(f"  (SDPA in batches of 8 requests {cost.sdpa_batched_s:.2f} s)")
    print(f"  8 requests, 64 tokens, 4/2 heads of 64: {cost.prefill_s * 1e6:.0f} us")


def _oracle_on_gpu() -> None:
    import torch

    from reference.bench_device import MATRIX_SIZE, matrix_rate, measure_on

    gpu = GPU()
    rate = matrix_rate(gpu.device)
    print(
        f"  {gpu.name}, torch {torch.__version__}: float64 matrices of {MATRIX_SIZE}: {rate / 1e12:.1f} Tflop/s"
    )
    for result in measure_on(gpu.device, rate=rate):
        print(f"  {result}", flush=True)


def _device(options: argparse.Namespace) -> None:
    """A case and single calls, beside plain CPU tensors."""
    from fakes.cuda.bench import measure

    for cost in devices.measure(max(options.cases // 3, 1)):
        print(f"  {cost}", flush=True)
    for name, costs in measure().items():
        print(f"  {name:20}", *(f"{kind} {us:6.2f} us" for kind, us in costs.items()), sep="   ")


_PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "throughput": _throughput,
    "needles": _needles,
    "oracle": _oracle,
    "device": _device,
}
