"""What the full device does not simulate, each refused or failing clearly. `docs/simulated-cuda.md` lists them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing.reductions
from torch.utils.dlpack import from_dlpack

from fakes import cuda
from fakes.cuda.claims import row

pytestmark = pytest.mark.usefixtures("full")


Attempt = Callable[[], Any]

OTHER_KINDS: dict[str, Attempt] = {
    "made sparse": lambda: row().to_sparse(),
    "sparse from parts": lambda: torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (3,), device="cuda"
    ),
    "sparse moved": lambda: torch.eye(3).to_sparse().cuda(),
    "CSR moved": lambda: torch.eye(3).to_sparse_csr().cuda() @ torch.eye(3, device="cuda"),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_tensors_that_are_not_strided_memory(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these kinds are in beta
        with pytest.raises(cuda.NotSimulated, match="plain strided tensors only"):
            OTHER_KINDS[name]()


def test_quantized_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in (
            lambda: torch.quantize_per_tensor(row(), 0.1, 0, torch.qint8),
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).cuda(),
        ):
            with pytest.raises(cuda.NotSimulated, match="plain strided tensors only"):
                attempt()


def test_nested_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda")
        with pytest.raises(NotImplementedError, match="NestedTensorCUDA"):
            nested.unbind()


OTHER_DEVICES: dict[str, Attempt] = {
    "factory": lambda: torch.zeros(1, device="cuda:1"),
    "move": lambda: torch.zeros(1).to("cuda:1"),
    "set_device": lambda: torch.cuda.set_device(1),
    "device": lambda: torch.cuda.device(1).__enter__(),
    "operator": lambda: torch.tril_indices(2, 2, device="cuda:1"),
}


@pytest.mark.parametrize("name", OTHER_DEVICES)
def test_a_second_device(name: str) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        OTHER_DEVICES[name]()


def test_several_processes() -> None:
    assert not torch.distributed.is_nccl_available()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="NCCL"):
            torch.distributed.init_process_group(
                "nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1
            )
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        torch.multiprocessing.reductions.reduce_tensor(row())


NAMES: dict[str, Attempt] = {
    "MemPool": lambda: torch.cuda.MemPool(),  # noqa: PLW0108
    "ExternalStream": lambda: torch.cuda.ExternalStream(1),
    "cudart": lambda: torch.cuda.cudart(),  # noqa: PLW0108
    "memory_snapshot": lambda: torch.cuda.memory_snapshot(),  # noqa: PLW0108
    "set_sync_debug_mode": lambda: torch.cuda.set_sync_debug_mode(1),
    "get_sync_debug_mode": lambda: torch.cuda.get_sync_debug_mode(),  # noqa: PLW0108
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_torch_cuda(name: str) -> None:
    with pytest.raises(cuda.NotSimulated, match=f"torch.cuda.{name}"):
        NAMES[name]()


def test_kernels_that_are_compiled_for_a_gpu() -> None:
    with pytest.raises(Exception, match="cuda_jiterator"):
        torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(row())
    assert not torch.backends.cudnn.is_available()


def test_operators_without_a_cpu_kernel() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("_simulated_device_test(Tensor x) -> Tensor")
    with pytest.raises(cuda.NotSimulated, match="has no CPU kernel"):
        torch.ops.aten._simulated_device_test(row())
    library._destroy()


def test_errors_are_those_of_cpu_kernels_and_come_at_once() -> None:
    with pytest.raises(IndexError, match="out of bounds"):  # a GPU asserts, later
        row()[torch.tensor([7], device="cuda")]


def test_memory_beyond_the_host() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")


# Doors that values leave by unwatched, or that answer otherwise than a GPU without saying so


def test_addresses_are_host_addresses() -> None:
    x = row(4)
    assert x.data_ptr() == cuda.host(x).data_ptr()
    interface: Any = x.__cuda_array_interface__
    assert interface["data"][0] == x.data_ptr()
    assert from_dlpack(torch.to_dlpack(x)).data_ptr() == x.data_ptr()


def test_one_generator_serves_host_and_device() -> None:
    torch.manual_seed(1)
    on_device = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(on_device.cpu(), torch.rand(4))


def test_memory_is_never_used_up() -> None:
    before = torch.cuda.mem_get_info()
    kept = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.mem_get_info() == before
    assert torch.cuda.memory_allocated() == 0
    del kept


def test_streams_of_torchs_own_classes_are_one() -> None:
    assert torch.Stream("cuda") == torch.Stream("cuda")
    torch.Event("cuda").record()


def test_graphs_of_one_pool_share_no_memory() -> None:
    x, pool, kept = row(), torch.cuda.graph_pool_handle(), []
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            kept.append(x + 1)
        assert kept[0].data_ptr() != kept[-1].data_ptr() or len(kept) == 1
    graphs[0].replay()
    x.add_(10)
    graphs[1].replay()
    assert kept[0].tolist() == [1, 2, 3, 4, 5, 6]  # on a GPU the second may have overwritten it
