"""The full device leaves no trace: after it was left, after an exception, after a start that failed."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from fakes import cuda
from fakes.cuda.claims import Tensor, here, real_gpu, row, there
from fakes.cuda.full import legacy

pytestmark = pytest.mark.skipif(real_gpu(), reason="a CUDA device is not simulated beside a real one")

_OWNERS: tuple[Any, ...] = (
    *(
        torch,
        torch.cuda,
        torch.cuda.graphs,
        torch.cuda.nvtx,
        torch.version,
        torch.UntypedStorage,
        torch.Tensor,
    ),
    *(torch.serialization, torch.autograd, torch.autograd.graph),
)

ASKED: dict[str, Callable[[], object]] = {
    "zeros": lambda: torch.zeros(1, device="cuda"),
    "to": lambda: torch.zeros(1).to("cuda"),
    "cuda": lambda: torch.zeros(1).cuda(),
    "by number": lambda: torch.zeros(1, device=0),
    "aten": lambda: torch.ops.aten.empty.memory_format([2], device=torch.device("cuda")),
    "pinned": lambda: torch.zeros(1, pin_memory=True),
    "is_pinned": lambda: torch.zeros(1).is_pinned(),
    "available": lambda: torch.cuda.is_available(),  # noqa: PLW0108
    "count": lambda: torch.cuda.device_count(),  # noqa: PLW0108
    "generator": lambda: torch.Generator(device="cuda"),
    "event": lambda: torch.cuda.Event(),  # noqa: PLW0108
    "stream": lambda: torch.cuda.Stream(),  # noqa: PLW0108
    "graph": lambda: torch.cuda.CUDAGraph(),  # noqa: PLW0108
    "accelerator": lambda: torch.accelerator.is_available(),  # noqa: PLW0108
    "legacy": lambda: vars(torch.cuda)["FloatTensor"](1),
    "storage": lambda: torch.UntypedStorage(4, device="cuda"),
    "properties": lambda: torch.cuda.get_device_properties(0),
    "copy_'s kernels": lambda: torch._C._dispatch_dump("aten::copy_"),
    "sum's table": lambda: torch._C._dispatch_dump_table("aten::sum"),
    "segv": lambda: signal.getsignal(signal.SIGSEGV),
    "modes": lambda: _get_current_function_mode_stack(),  # noqa: PLW0108
}


def trace() -> dict[str, object]:
    """Everything that the device changes: names in torch, what torch answers, in which words it refuses."""
    found: dict[str, object] = {}
    for name, ask in ASKED.items():
        try:
            found[name] = str(ask())
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    for owner in _OWNERS:
        found |= {f"{owner.__name__}.{name}": id(value) for name, value in vars(owner).items()}
    return found


def use_everything() -> tuple[Tensor, torch.cuda.CUDAGraph, Tensor]:
    x, pinned, graph = row(), torch.zeros(3, pin_memory=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    torch.zeros(3, device="cuda").copy_(pinned, non_blocking=True)
    assert y.tolist() == [1, 2, 3, 4, 5, 6]
    return y, graph, pinned


def test_left_normally() -> None:
    _once()
    before = trace()
    with cuda.simulated_cuda("full"):
        assert trace() != before
        use_everything()
    assert trace() == before


def _once() -> None:
    """torch fills in some names when they are first used; skips where the device cannot be had."""
    try:
        with cuda.simulated_cuda("full"):
            use_everything()
    except cuda.DeviceUnavailable as reason:
        pytest.skip(str(reason))
    trace()


def test_left_by_an_exception_in_the_middle_of_everything() -> None:
    _once()
    before = trace()

    def fail() -> None:
        host, graph = torch.arange(4.0, pin_memory=True), torch.cuda.CUDAGraph()
        torch.zeros(4, device="cuda").copy_(host, non_blocking=True)
        held.append(host)
        torch.cuda.stream(torch.cuda.Stream()).__enter__()
        cuda.paused().__enter__()
        cuda.resumed().__enter__()
        graph.capture_begin()
        row().add_(1)
        raise ZeroDivisionError

    held: list[Tensor] = []
    with pytest.raises(ZeroDivisionError), cuda.simulated_cuda("full"):
        fail()
    assert trace() == before
    held[0].add_(1)  # no longer closed
    assert held[0].tolist() == [1, 2, 3, 4]
    with cuda.simulated_cuda("full"):
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        use_everything()
    assert trace() == before


def test_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _once()
    before = trace()

    def fail(*_: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(legacy, "_legacy", fail)
        with pytest.raises(OSError, match="no"), cuda.simulated_cuda("full"):
            pass
    assert cuda.current() is None
    assert trace() == before


def test_what_is_left_behind_is_harmless() -> None:
    _once()
    with cuda.simulated_cuda("full"):
        kept, graph, pinned = use_everything()
        event = torch.cuda.Event()
        event.record()
    assert pinned.tolist() == [0, 0, 0]
    assert here(pinned + 1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        kept + 1
    with pytest.raises((RuntimeError, NotImplementedError)):
        kept.tolist()
    with pytest.raises(RuntimeError, match="left"):
        graph.replay()
    event.synchronize()
    with cuda.simulated_cuda("full"):
        assert there(kept, kept + 1)
        assert kept.tolist() == [1, 2, 3, 4, 5, 6]
    del kept, graph, pinned
    gc.collect()
    assert torch.zeros(3).add_(1).sum() == 3


def test_the_other_device_may_follow() -> None:
    _once()
    for kind in ("light", "full", "light", "full"):
        with cuda.simulated_cuda(kind) as simulation:
            assert simulation.kind == kind
            assert there(row(), row() + 1)
            assert row().sum().item() == 15
    assert not torch.cuda.is_available()


def test_one_at_a_time() -> None:
    _once()
    with cuda.simulated_cuda("full") as simulation:
        for kind in ("full", "light"):
            with pytest.raises(RuntimeError, match="already installed"), cuda.simulated_cuda(kind):
                pass
        assert cuda.current() is simulation
        assert there(row())
