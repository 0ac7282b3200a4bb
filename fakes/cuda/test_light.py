"""The light device itself: kernels, aliases, pauses, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import gc
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fakes import cuda
from fakes.cuda import bench, patches
from fakes.cuda.claims import Tensor, here, real_gpu, row, there

pytestmark = pytest.mark.skipif(real_gpu(), reason="a CUDA device is not simulated beside a real one")


@pytest.fixture
def light() -> Iterator[cuda.Simulation]:
    with cuda.simulated_cuda("light") as simulation:
        yield simulation


def test_current() -> None:
    assert cuda.current() is None
    with cuda.simulated_cuda("light") as simulation:
        assert cuda.current() is simulation
        assert simulation.kind == "light"
    assert cuda.current() is None


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match='must be "auto", "light" or "full"'), cuda.simulated_cuda("gpu"):  # type: ignore[arg-type]
        pass


def test_one_at_a_time(light: cuda.Simulation) -> None:
    with pytest.raises(RuntimeError, match="already installed"), cuda.simulated_cuda("light"):
        pass
    assert cuda.current() is light
    assert there(row())


def test_refused_beside_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = _torchs_state()
    with pytest.raises(cuda.DeviceUnavailable, match="finds a real one"), cuda.simulated_cuda("light"):
        pass
    assert cuda.current() is None
    assert _torchs_state() == before


def _torchs_state() -> dict[str, Any]:
    owners = (torch, torch.cuda, torch.cuda.nvtx, torch.version, torch.UntypedStorage, torch.Tensor)
    owners += (torch.serialization, torch.utils.dlpack, torch._C.ScriptFunction, torch._C.ScriptMethod)
    state = {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}
    return state | {"modes": _get_current_function_mode_stack()}


def test_no_trace_is_left() -> None:
    _jit_once()
    before = _torchs_state()
    with cuda.simulated_cuda("light"):
        assert _torchs_state() != before
        kept = row()
    assert _torchs_state() == before
    with pytest.raises(ZeroDivisionError), cuda.simulated_cuda("light"):
        1 / 0  # noqa: B018
    assert _torchs_state() == before
    assert here(kept, kept + torch.zeros(6))
    assert not torch.cuda.is_available()


def _jit_once() -> None:
    """torch fills in some names when they are first used."""
    with cuda.simulated_cuda("light"):
        row().cpu()


def test_no_trace_of_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _torchs_state()

    def fail(seen: Callable[[], bool]) -> Any:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(patches, "_storage_device", fail)
        with pytest.raises(OSError, match="no"), cuda.simulated_cuda("light"):
            pass
    assert cuda.current() is None
    assert _torchs_state() == before


def test_modes_left_behind_are_taken_down() -> None:
    class Left(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with cuda.simulated_cuda("light"):
        Left().__enter__()
        assert there(row())
    assert _get_current_function_mode_stack() == []


def test_device_tensors_stay_so_in_the_next_simulation() -> None:
    with cuda.simulated_cuda("light"):
        kept = row()
    assert here(kept)
    with cuda.simulated_cuda("light"):
        assert there(kept)


# Kernels, aliases, pauses


@cuda.kernel
def doubled(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None, dict[str, list[Tensor]]]:
    """Doubles."""
    seen = cuda.host(x).numpy()
    return torch.from_numpy(seen * 2), out, {"more": [torch.zeros(len(seen))]}


def test_kernel(light: cuda.Simulation) -> None:
    x, out = row(3), torch.empty(3)
    first, second, more = doubled(x, out=out)
    assert there(first, *more["more"])
    assert second is out
    assert here(out)
    assert first.tolist() == [0, 2, 4]
    assert doubled(x)[1] is None


def test_kernel_results_that_live_in_an_argument(light: cuda.Simulation) -> None:
    @cuda.kernel
    def views(d: Tensor, h: Tensor) -> list[Tensor]:
        return [cuda.host(d)[1:], cuda.host(h)[1:]]

    on_device, on_host = views(row(), torch.zeros(6))
    assert there(on_device)
    assert here(on_host)


def test_kernels_nest_and_restore_after_an_error(light: cuda.Simulation) -> None:
    @cuda.kernel
    def outer(x: Tensor) -> Tensor:
        return cuda.host(doubled(x)[0]) + torch.ones(3)

    @cuda.kernel
    def failing(x: Tensor) -> Tensor:
        raise KeyError("inside")

    assert outer(row(3)).tolist() == [1, 3, 5]
    with pytest.raises(KeyError):
        failing(row())
    assert there(row(), row() + 1)


def test_kernel_keeps_the_signature() -> None:
    assert list(inspect.signature(doubled).parameters) == ["x", "out"]
    assert doubled.__doc__ == "Doubles."


def test_without_a_simulation() -> None:
    x = torch.arange(3.0)
    assert cuda.host(x) is x
    assert cuda.adopt(x) is x
    assert cuda.on_device(x)
    assert doubled(x)[0].tolist() == [0, 2, 4]
    with cuda.paused():
        assert x.numpy()[1] == 1


def test_host_shares_memory(light: cuda.Simulation) -> None:
    x = row()
    with cuda.paused():
        cuda.host(x).numpy()[0] = 7
    assert x[0].item() == 7
    assert cuda.host(x).data_ptr() == x.data_ptr()


def test_adopt_and_on_device(light: cuda.Simulation) -> None:
    with cuda.paused():
        made = torch.arange(4.0)
        view = made[1:]
        moved = cuda.adopt(made)
        assert cuda.on_device(moved)
        assert not cuda.on_device(torch.zeros(1))
        assert moved.numpy()[1] == 1
    assert there(moved, view)
    assert moved.data_ptr() == made.data_ptr()
    assert cuda.on_device(row())
    assert not cuda.on_device(torch.zeros(2))


def test_resumed_inside_paused_sees_the_device_again(light: cuda.Simulation) -> None:
    with cuda.paused():
        t = cuda.adopt(torch.ones(2))
        assert not t.is_cuda
        with cuda.resumed():
            assert t.is_cuda
            assert (t + 1).is_cuda
        assert not t.is_cuda


def test_paused_nests(light: cuda.Simulation) -> None:
    x = row()
    with cuda.paused():
        with cuda.paused():
            assert here(x)
        assert here(x, x + torch.zeros(6))
        assert torch.cuda.is_available()
    assert there(x)


# What it refuses

REFUSED: dict[str, Callable[[], Any]] = {
    "graph": lambda: torch.cuda.CUDAGraph(),  # noqa: PLW0108 - looked up when called
    "capture": lambda: torch.cuda.graph(None),  # type: ignore[arg-type]
    "graph pool": lambda: torch.cuda.graph_pool_handle(),  # noqa: PLW0108
    "default device": lambda: torch.set_default_device("cuda"),
    "pickle": lambda: pickle.dumps(row()),
    "save": lambda: torch.save({"a": row()}, io.BytesIO()),
    "dlpack": lambda: torch.from_dlpack(row()),
    "to_dlpack": lambda: torch.to_dlpack(row()),
    "legacy type": lambda: row().type("torch.cuda.HalfTensor"),
    "sparse": lambda: row().to_sparse(),
    "vmap": lambda: torch.func.vmap(lambda t: t * 2)(row()),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_not_simulated_is_refused(call: Callable[[], Any], light: cuda.Simulation) -> None:
    with pytest.raises(cuda.NotSimulated, match="light simulated CUDA device"):
        call()


def test_graphs_name_the_full_device(light: cuda.Simulation) -> None:
    with pytest.raises(cuda.NotSimulated, match='full device \\(kind="full"\\)'):
        torch.cuda.CUDAGraph()


def test_cpu_tensors_are_saved_and_loaded(light: cuda.Simulation) -> None:
    buffer = io.BytesIO()
    torch.save({"a": row().cpu()}, buffer)
    buffer.seek(0)
    assert here(torch.load(buffer)["a"])
    buffer.seek(0)
    with pytest.raises(cuda.NotSimulated, match="cannot load onto cuda"):
        torch.load(buffer, map_location="cuda")
    assert here(torch.func.vmap(lambda t: t * 2)(torch.zeros(2)), torch.zeros(2).to_sparse())


def test_a_default_device_set_before_is_refused() -> None:
    torch.set_default_device("cuda")
    try:
        with pytest.raises(cuda.DeviceUnavailable, match="set_default_device"), cuda.simulated_cuda("light"):
            pass
    finally:
        torch.set_default_device(None)


def _in_thread(call: Callable[[], Any]) -> BaseException | None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_other_threads_are_refused(light: cuda.Simulation) -> None:
    x = row(3)
    for call in (lambda: torch.zeros(2, device="cuda"), lambda: doubled(x), torch.cuda._lazy_init):
        error = _in_thread(call)
        assert isinstance(error, cuda.NotSimulated)
        assert "thread" in str(error)
    torch.cuda._lazy_init()
    assert _in_thread(lambda: torch.zeros(2) + 1) is None


def _copied(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


def test_custom_operators(light: cuda.Simulation) -> None:
    library = torch.library.Library("light_device_custom", "DEF")
    library.define("plain(Tensor x) -> Tensor")
    library.define("inside(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x + 1, "CompositeExplicitAutograd")
    library.impl("inside", lambda x: x + torch.ones(6, device="cuda"), "CompositeExplicitAutograd")
    assert there(torch.ops.light_device_custom.plain(row()))
    assert here(torch.ops.light_device_custom.plain(torch.zeros(2)))
    library.define("copied(Tensor x, Tensor(a!) out) -> ()")
    library.impl("copied", _copied, "CompositeExplicitAutograd")
    on_host = torch.zeros(6)
    torch.ops.light_device_custom.copied(row(), on_host)
    assert here(on_host)
    assert on_host[5].item() == 5
    with pytest.raises(cuda.NotSimulated, match="custom operator"):
        torch.ops.light_device_custom.inside(row())


def test_operators_for_cuda_only() -> None:
    library = torch.library.Library("light_device_cuda_only", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x * 2, "CUDA")
    with cuda.simulated_cuda("light"), pytest.raises(cuda.NotSimulated, match="no CPU kernel"):
        torch.ops.light_device_cuda_only.f(row())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_functions_follow(light: cuda.Simulation) -> None:
    with cuda.paused():
        scripted = torch.jit.script(_affine)
    assert there(scripted(row()))
    assert here(scripted(torch.zeros(2)))


def _affine(x: Tensor) -> Tensor:
    return x * 2 + 1


# Tags


def test_a_tag_lives_as_long_as_the_memory(light: cuda.Simulation) -> None:
    x = row()
    view = x.view(2, 3)[1]
    storage_was = x.untyped_storage().data_ptr()
    del x
    gc.collect()
    assert there(view)
    assert there(view._base)  # type: ignore[arg-type]
    assert view.untyped_storage().data_ptr() == storage_was
    module = torch.nn.Linear(2, 2, device="cuda")
    gc.collect()
    assert there(module.weight.detach(), module.weight.data)
    loss = (module.weight * 2).sum()
    gc.collect()
    loss.backward()
    assert module.weight.grad is not None
    assert there(module.weight.grad)


def test_memory_that_is_reused_has_no_tag(light: cuda.Simulation) -> None:
    addresses: set[int] = set()
    reused = 0
    for _ in range(200):
        on_device = torch.zeros(64, device="cuda")
        addresses.add(on_device.data_ptr())
        del on_device
        on_host = torch.zeros(64)
        reused += on_host.data_ptr() in addresses
        assert here(on_host)
        del on_host
    assert reused > 0


def test_tags_of_memory_that_numpy_lends(light: cuda.Simulation) -> None:
    lent = np.arange(3.0)
    assert here(torch.from_numpy(lent))
    moved = torch.as_tensor(lent, device="cuda")
    lent[0] = 5
    assert there(moved)
    assert moved[0].item() == 0
    assert here(torch.from_numpy(lent))


def test_bench_measures_what_it_names() -> None:
    costs = bench.measure(number=2, repeat=1)
    assert {"torch.add", "view", "is_cuda"} <= costs.keys()
    assert all({"plain", "light"} <= each.keys() for each in costs.values())
    assert all(0 < spent < 1e5 for each in costs.values() for spent in each.values())
