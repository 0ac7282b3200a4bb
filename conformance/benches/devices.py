"""What a case costs on each device: plain CPU tensors, the light simulated device, the full one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from backends.libraries import use
from backends.registry import BackendSpec, resolve
from cases.model import Case
from conformance.machine import Machine
from conformance.selection import cases_for
from conformance.session import DISTRIBUTIONS
from conformance.sweep import Sweep, draw
from conformance.trial import Asker
from fakes import cuda
from fakes.cuda.devices import DeviceProperties

BACKENDS = ("torch", "kernel:fi-decode", "kernel:fi-prefill", "kernel:fa-kvcache")
"""Backends that name no device: they run on plain CPU tensors too."""
ROUNDS = 5


@dataclass(frozen=True)
class DeviceCost:
    """Milliseconds of CPU time that one case takes, all checks and both executions included."""

    backend: str
    plain: float
    light: float
    full: float | None

    def __str__(self) -> str:
        parts = [f"{self.backend:18} plain {self.plain:5.2f} ms"]
        for kind, cost in (("light", self.light), ("full", self.full)):
            parts.append(
                f"{kind} not here" if cost is None else f"{kind} {cost:5.2f} ms, {cost / self.plain:.2f}x"
            )
        return "   ".join(parts)


def measure(count: int, names: Sequence[str] = BACKENDS, seed: int = 0) -> Iterator[DeviceCost]:
    """`count` cases on each backend and device, the quickest of ROUNDS rounds, one thread."""
    use("fake", DISTRIBUTIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            spec = _without_graphs(resolve(name))
            cases = [case for drawn in draw(cases_for([spec.capabilities]), count, seed) for case in drawn]
            best: dict[str, float] = {}
            for _ in range(ROUNDS):
                for kind in ("plain", "light", "full"):
                    spent = _spent(spec, kind, cases)
                    if spent is not None:
                        best[kind] = min(best.get(kind, spent), spent)
            each = {kind: spent / len(cases) * 1e3 for kind, spent in best.items()}
            yield DeviceCost(name, each["plain"], each["light"], each.get("full"))
    finally:
        torch.set_num_threads(threads)


def _without_graphs(spec: BackendSpec) -> BackendSpec:
    """The same work on each device: only the full one would capture graphs."""
    return replace(spec, capabilities=replace(spec.capabilities, cuda_graph=False))


def _spent(spec: BackendSpec, kind: str, cases: Sequence[Case]) -> float | None:
    """Seconds of CPU time; None where the device cannot be had."""
    with ExitStack() as stack:
        machine = Machine(None)
        if kind == "plain":  # a workspace is sized by the device
            properties: Callable[[object], DeviceProperties] = lambda _: DeviceProperties()  # noqa: E731
            stack.enter_context(patch.object(torch.cuda, "get_device_properties", properties))
        else:
            try:
                simulation = stack.enter_context(cuda.simulated_cuda("light" if kind == "light" else "full"))
            except cuda.DeviceUnavailable:
                return None
            stack.enter_context(cuda.paused())
            machine = Machine(simulation)
        sweep = Sweep([Asker(spec, machine, "strict")])
        for case in cases[:2]:
            for verdict in sweep.ask(case):
                assert not verdict.failed, (
                    f"{spec.name} fails on {kind} tensors: {verdict.findings[0].message}"
                )
        started = time.process_time()
        sweep.ask_all(cases)
        return time.process_time() - started
