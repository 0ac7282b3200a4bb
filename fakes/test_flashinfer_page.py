"""Storing on pages and packing masks, where the contract's probes do not go: graphs, host waits, findings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from fakes import cuda, flashinfer, recorder, releases
from fakes.cuda import DeviceUnavailable

PAGES, PAGE_SIZE, HEADS, DIM = 8, 4, 2, 64
ROWS = torch.arange(3 * HEADS * DIM).reshape(3, HEADS, DIM).half()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    try:
        with cuda.simulated_cuda(request.param):
            yield
    except DeviceUnavailable as error:
        pytest.skip(str(error))


light = pytest.mark.parametrize("device", ["light"], indirect=True)
full = pytest.mark.parametrize("device", ["full"], indirect=True)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def table() -> dict[str, Any]:
    """Request 0 on pages 5 and 2, request 1 on page 7."""
    return {"kv_indices": ints(5, 2, 7), "kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(4, 1)}


def cache() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.zeros(PAGES, PAGE_SIZE, HEADS, DIM, dtype=torch.half, device="cuda") for _ in range(2))
    return k, v


def held(k: torch.Tensor) -> list[tuple[int, int]]:
    """(page, place) of every slot that holds something."""
    return [(int(page), int(place)) for page, place in k.cpu().flatten(2).any(-1).nonzero()]


@full
@pytest.mark.usefixtures("device")
def test_a_captured_append_reads_its_arrays_again() -> None:
    k, v = cache()
    rows = ROWS.cuda()
    requests, positions = ints(0, 0, 1), ints(0, 4, 0)
    arrays = table()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.append_paged_kv_cache(rows, rows, requests, positions, (k, v), **arrays)
    k.zero_()
    positions.copy_(ints(1, 5, 3))
    arrays["kv_indices"].copy_(ints(0, 1, 4))
    graph.replay()
    assert held(k) == [(0, 1), (1, 1), (4, 3)]
    assert torch.equal(k[4, 3].cpu(), ROWS[2])


@full
@pytest.mark.usefixtures("device")
def test_places_are_computed_again_at_a_replay() -> None:
    indptr, lens = ints(0, 2, 3), ints(6, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        requests, positions = flashinfer.get_batch_indices_positions(indptr, lens, 3)
    lens.copy_(ints(8, 4))
    graph.replay()
    assert requests.tolist() == [0, 0, 1]
    assert positions.tolist() == [6, 7, 3]


@full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("own", [False, True])
def test_a_replay_clears_requests_from_0_7_2_on(own: bool) -> None:
    indptr, lens = ints(0, 2, 3), ints(6, 1)
    buffers = (ints(9, 9, 9), ints(9, 9, 9)) if own else ()
    with releases.select(flashinfer="0.7.4"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            requests, positions = flashinfer.get_batch_indices_positions(indptr, lens, 3, *buffers)
        indptr.copy_(ints(0, 1, 2))
        graph.replay()
    assert requests.tolist() == [0, 1, -1]
    assert positions.tolist()[:2] == [5, 0]


@full
@pytest.mark.usefixtures("device")
def test_packing_segments_waits_for_their_sizes() -> None:
    mask = torch.tensor([True, False, True], device="cuda")
    with recorder.recording() as record:
        flashinfer.segment_packbits(mask, ints(0, 1, 3))
    assert [wait.what for wait in record.waits] == ["item"]


@light
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        (
            {"batch_indices": (0, 0, 2)},
            "fi.append-request",
            "batch_indices[2] is 2, there are 2 requests",
        ),
        (
            {"positions": (0, 4, 4)},
            "fi.append-position",
            "positions[2] is 4, request 1 has 1 page of 4: it goes to a page that is not the request's",
        ),
        (
            {"positions": (0, 4, -1)},
            "fi.append-position",
            "positions[2] is -1, request 1 has 1 page of 4: it goes to a page that is not the request's",
        ),
        (
            {"kv_indices": (5, 2)},
            "fi.indices-short",
            "kv_indices has 2 entries, kv_indices[2] is read",
        ),
        (
            {"kv_indices": (5, 8, 7)},
            "fi.page-range",
            "kv_indices[1] is 8, the pool has 8 pages",
        ),
        (
            {"positions": (3, 3, 0)},
            "fi.append-twice",
            "positions[1] is 3, of request 0: another token of this call goes there, either may stay",
        ),
    ],
)
def test_strict_mode_names_what_goes_elsewhere(
    changes: dict[str, tuple[int, ...]], rule: str, message: str
) -> None:
    given: dict[str, Any] = {"batch_indices": ints(0, 0, 1), "positions": ints(0, 4, 0), **table()}
    given |= {name: ints(*values) for name, values in changes.items()}
    rows = ROWS.cuda()
    with recorder.recording() as record, suppress(RuntimeError):  # some of them end the call
        flashinfer.append_paged_kv_cache(rows, rows, paged_kv_cache=cache(), **given)
    (found,) = record.findings
    assert (found.rule, found.message) == (rule, message)
    (call,) = record.calls
    assert (call.name, call.op) == ("append_paged_kv_cache", "append")


@light
@pytest.mark.usefixtures("device")
def test_dummies_may_share_a_slot_and_equal_tokens_a_place() -> None:
    given: dict[str, Any] = {"batch_indices": ints(0, 1), "positions": ints(0, 0), "kv_indices": ints(6, 6)}
    given |= {"kv_indptr": ints(0, 1, 2), "kv_last_page_len": ints(1, 1)}
    rows = ROWS[:2].cuda()
    with recorder.recording() as record:
        flashinfer.append_paged_kv_cache(rows, rows, paged_kv_cache=cache(), **given)
        same = rows[:1].expand(2, -1, -1)
        given |= {"batch_indices": ints(0, 0)}
        flashinfer.append_paged_kv_cache(same, same, paged_kv_cache=cache(), **given)
    assert not record.findings


@light
@pytest.mark.usefixtures("device")
def test_packed_masks_are_what_attention_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, HEADS, DIM, generator=generator).half().cuda() for _ in range(3))
    mask = (torch.rand(25, generator=generator) < 0.6).cuda()
    bits, starts = flashinfer.segment_packbits(mask, ints(0, 25), "little")
    assert starts.tolist() == [0, 4]
    by_bits = flashinfer.single_prefill_with_kv_cache(q, k, v, packed_custom_mask=bits)
    by_mask = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask.view(5, 5))
    assert torch.equal(by_bits, by_mask)
    assert torch.equal(flashinfer.packbits(mask, "little"), bits)
