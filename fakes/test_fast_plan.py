"""Private planning calls of engines: `fast_decode_plan` and `_cached_module.plan`, as releases take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakes import cuda, flashinfer, recorder, releases
from fakes.contract.check import Requests, requests


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with cuda.simulated_cuda("light"):
        yield


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arrays(r: Requests) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indptr = [0]
    for pages in r.pages:
        indptr.append(indptr[-1] + len(pages))
    last = [(n - 1) % r.page_size + 1 for n in r.kv_lens]
    return ints(indptr), ints([p for pages in r.pages for p in pages]), ints(last)


def decode_wrapper(r: Requests, *, tensor_cores: bool, graph: bool = False, room: int = 64) -> Any:
    buffers: dict[str, Any] = {}
    if graph:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros(len(r.kv_lens) + 1, dtype=torch.int32, device="cuda"),
            "paged_kv_indices_buffer": torch.zeros(room, dtype=torch.int32, device="cuda"),
            "paged_kv_last_page_len_buffer": torch.ones(len(r.kv_lens), dtype=torch.int32, device="cuda"),
        }
    workspace = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_tensor_cores=tensor_cores, backend="fa2", **buffers
    )


def plan(wrapper: Any, r: Requests) -> None:
    indptr, indices, last = arrays(r)
    wrapper.plan(
        indptr.cuda(), indices.cuda(), last.cuda(), 8, 2, 128, r.page_size, q_data_type=torch.bfloat16
    )


def fast(wrapper: Any, r: Requests, **options: Any) -> None:
    indptr, indices, last = arrays(r)
    flashinfer.fast_decode_plan(
        wrapper,
        indptr.cuda(),
        indices.cuda(),
        last.cuda(),
        8,
        2,
        128,
        r.page_size,
        q_data_type=torch.bfloat16,
        **options,
    )


def run(wrapper: Any, r: Requests) -> torch.Tensor:
    return wrapper.run(r.q.cuda(), (r.k_cache.cuda(), r.v_cache.cuda())).cpu().double()


BEFORE, AFTER = requests([5, 40]), requests([33, 17], seed=1)


@pytest.mark.parametrize("release", ["0.6.6", "0.7.2", "0.7.4"])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_fast_plan_replaces_the_plan(tensor_cores: bool, release: str) -> None:
    with releases.select(flashinfer=release), recorder.recording("strict") as record:
        wrapper = decode_wrapper(AFTER, tensor_cores=tensor_cores)
        plan(wrapper, BEFORE)
        fast(wrapper, AFTER)
        assert torch.allclose(run(wrapper, AFTER), AFTER.expected()[0], atol=0.02)
    assert not record.findings
    assert record.calls[-1].plan == record.calls[-2].index


def test_in_graph_mode_it_writes_no_buffer() -> None:
    """The caller fills the buffers: where it has not, the kernel reads the batch before."""
    with releases.select(flashinfer="0.7.2"), recorder.recording("strict") as record:
        wrapper = decode_wrapper(AFTER, tensor_cores=True, graph=True)
        plan(wrapper, BEFORE)
        before = wrapper._paged_kv_indptr_buf.cpu()
        fast(wrapper, AFTER)
        assert torch.equal(wrapper._paged_kv_indptr_buf.cpu(), before)
    assert {f.rule for f in record.findings} == {"fi.host-indptr"}


def test_without_a_plan_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Error in standard plan: 'NoneType'"):
        fast(decode_wrapper(AFTER, tensor_cores=True), AFTER)


def test_buffers_bound_the_batch() -> None:
    wrapper = decode_wrapper(AFTER, tensor_cores=False, graph=True, room=4)
    plan(wrapper, requests([5, 5]))
    with pytest.raises(ValueError, match="size of indices"):
        fast(wrapper, requests([40, 40]))
    with pytest.raises(ValueError, match="batch size should be fixed"):
        fast(wrapper, requests([1, 1, 1]))


@pytest.mark.parametrize(("release", "count"), [("0.6.6", 19), ("0.7.2", 20), ("0.7.4", 21)])
def test_the_module_takes_the_arguments_of_its_release(release: str, count: int) -> None:
    indptr, _, _ = arrays(AFTER)
    with releases.select(flashinfer=release), recorder.recording("faithful"):
        wrapper = decode_wrapper(AFTER, tensor_cores=True)
        plan(wrapper, AFTER)
        workspaces = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        args = [*workspaces, ints([0, 1, 2]), indptr, ints(AFTER.kv_lens), 2, 2, 8, 2, 16, False, 128, 128]
        args += [False, -1, -1, False, 0, 0, False][: count - 14]
        wrapper._plan_info = wrapper._cached_module.plan(*args)
        assert torch.allclose(run(wrapper, AFTER), AFTER.expected()[0], atol=0.02)
        with pytest.raises(TypeError, match=f"expected {count} .* got {count - 1}"):
            wrapper._cached_module.plan(*args[:-1])
