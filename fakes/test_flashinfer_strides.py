"""Index arrays that are not contiguous: a finding where one is read in place, and there alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from fakes import cuda, flashinfer, recorder, releases
from fakes.contract.check import Requests, requests
from fakes.contract.paged_fi import (
    KERNELS,
    LN2,
    PREFILL,
    Kernel,
    arrays,
    both,
    caches,
    ints,
    make,
    plan,
    workspace,
)
from fakes.contract.rule import Lab

HOST, DEVICE = "cpu", "cuda"


@pytest.fixture(autouse=True)
def lab() -> Iterator[Lab]:
    with cuda.simulated_cuda("light"):
        yield Lab(flashinfer, "cuda")


def strided(array: torch.Tensor, place: str) -> torch.Tensor:
    return torch.stack((array, torch.zeros_like(array)), dim=1).to(place)[:, 0]


def batch(kernel: Kernel) -> Requests:
    return requests([20, 5, 16], [3, 2, 4] if kernel in PREFILL else [1, 1, 1])


def found(record: recorder.Recorder) -> list[str]:
    return [f"{f.argument} {f.message.split()[-5]}" for f in record.findings if f.rule == "fi.contiguous"]


def is_right(lab: Lab, wrapper: Any, r: Requests, causal: bool) -> bool:
    out, lse = wrapper.run(r.q.to("cuda"), caches(lab, r), return_lse=True)
    return both((out.cpu(), lse.cpu().double() * LN2), r.expected(causal=causal)).kind == "right"


def asked(lab: Lab, kernel: Kernel, name: str, place: str, **options: Any) -> tuple[bool, list[str]]:
    """Whether the answer is right, and what is found, where one array is strided and in this place."""
    r = batch(kernel)
    index = {key: t.to("cuda") for key, t in arrays(r).items()} | {name: strided(arrays(r)[name], place)}
    with recorder.recording("strict") as record:
        try:
            wrapper = make(lab, kernel, **options)
            plan(lab, wrapper, kernel, r, host=True, given=index)
            right = is_right(lab, wrapper, r, kernel in PREFILL)
        except (RuntimeError, NotImplementedError):
            right = False
    return right, found(record)


def in_place(kernel: Kernel, name: str, place: str) -> bool:
    planned = name in ("indptr", "qo_indptr")
    return planned if place == HOST else kernel != "fa3" or name == "indices"


@pytest.mark.parametrize("place", [HOST, DEVICE])
@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_count_wherever_torch_makes_a_copy(lab: Lab, kernel: Kernel, place: str) -> None:
    for name in arrays(batch(kernel)):
        if name == "qo_indptr" and kernel not in PREFILL:
            continue
        right, rules = asked(lab, kernel, name, place)
        reader = "planner" if place == HOST else "kernel"
        argument = f"paged_kv_{name}" if kernel in PREFILL and name != "qo_indptr" else name
        assert rules == ([f"{argument} {reader}"] if in_place(kernel, name, place) else []), name
        by_luck = kernel == "cuda_core" and place == HOST  # its planner cuts work by it, and nothing else
        assert right == (not rules) or by_luck, name


@pytest.mark.parametrize("name", ["indptr", "indices", "last_page_len"])
@pytest.mark.parametrize("place", [HOST, DEVICE])
def test_buffers_of_a_graph_are_copied_to(lab: Lab, name: str, place: str) -> None:
    buffers = {
        f"paged_kv_{key}_buffer": torch.zeros(size, dtype=torch.int32, device="cuda")
        for key, size in (("indptr", 4), ("indices", 64), ("last_page_len", 3))
    }
    right, rules = asked(lab, "cuda_core", name, place, use_cuda_graph=True, **buffers)
    assert right
    assert rules == (["indptr planner"] if (name, place) == ("indptr", HOST) else [])


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("place", [HOST, DEVICE])
@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_ragged_arrays_are_read_in_place_by_the_same_readers(kernel: str, place: str, name: str) -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(Lab(flashinfer, "cuda")), backend=kernel
    )
    index = {key: torch.tensor([0, 3, 5], dtype=torch.int32) for key in ("qo_indptr", "kv_indptr")}
    index = {key: t.to("cuda") for key, t in index.items()} | {name: strided(index[name], place)}
    with recorder.recording("strict") as record, suppress(RuntimeError):
        wrapper.plan(index["qo_indptr"], index["kv_indptr"], 2, 1, 64, q_data_type=torch.float16)
    reads = {HOST: [f"{name} planner"], DEVICE: [f"{name} kernel"] if kernel == "fa2" else []}
    assert found(record) == reads[place]


@pytest.mark.parametrize("place", [HOST, DEVICE])
@pytest.mark.parametrize("name", ["indptr", "indices", "last_page_len"])
def test_a_fast_plan_copies_nothing(name: str, place: str) -> None:
    r = batch("cuda_core")
    index = {key: t.to("cuda") for key, t in arrays(r).items() if key != "qo_indptr"}
    wrapper = make(Lab(flashinfer, "cuda"), "cuda_core")
    plan(Lab(flashinfer, "cuda"), wrapper, "cuda_core", r)
    index |= {name: strided(arrays(r)[name], place)}
    with recorder.recording("strict") as record:
        fast: Any = flashinfer.fast_decode_plan
        fast(wrapper, *index.values(), 8, 2, 128, 16)
    reads = {HOST: ["indptr planner"] if name == "indptr" else [], DEVICE: [f"{name} kernel"]}
    assert found(record) == reads[place]


@pytest.mark.parametrize("place", [HOST, DEVICE])
@pytest.mark.parametrize("name", ["qo_indptr", "indptr", "indices", "kv_lens"])
def test_latent_attention_has_all_but_page_ids_in_its_plan(name: str, place: str) -> None:
    r = batch("fa2")
    sound = {key: arrays(r)[key] for key in ("qo_indptr", "indptr", "indices")} | {"kv_lens": ints(r.kv_lens)}
    index = {key: t.to("cuda") for key, t in sound.items()} | {name: strided(sound[name], place)}
    wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(Lab(flashinfer, "cuda")))
    with recorder.recording("strict") as record, suppress(RuntimeError):
        wrapper.plan(*index.values(), 16, 512, 64, 16, False, 0.05, torch.float16, torch.float16)
    argument = {"indptr": "kv_indptr", "indices": "kv_indices", "kv_lens": "kv_len_arr"}.get(name, name)
    in_place = (name == "indices") == (place == DEVICE)
    assert found(record) == ([f"{argument} {'planner' if place == HOST else 'kernel'}"] if in_place else [])


def test_the_later_release_makes_all_of_them_contiguous(lab: Lab) -> None:
    with releases.select(flashinfer="0.7.4"):
        for place in (HOST, DEVICE):
            assert asked(lab, "fa2", "indptr", place) == (True, [])
