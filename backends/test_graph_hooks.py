"""The graph hooks: what is captured reads buffers that stay, and each replay's batch is written into them.

A replayed graph calls no Python, so here `forward` is called with the *captured* batch's metadata in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends import libraries
from backends.contract import Batch, EngineContext, GraphBackend, Req
from backends.registry import resolve
from backends.test_support import Sequences, make_batch, small_engine
from fakes import cuda
from fakes.cuda.claims import real_gpu
from fakes.recorder import recording

pytestmark = pytest.mark.skipif(real_gpu(), reason="the simulated device stands aside for a real GPU")

SIZES = [1, 2, 4]
DUMMY_ROW = 4
WIDTH = 24


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    libraries.use("fake", ["flashinfer", "sgl_kernel"])
    with cuda.simulated_cuda("light"), recording("strict") as recorder:
        yield
        assert not recorder.findings


def engine_for(name: str, page_size: int) -> EngineContext:
    """Four rows of scattered pages and the dummies' row, whose page is the last one."""
    row_pages = -(-WIDTH // page_size)
    pages = torch.randperm(DUMMY_ROW * row_pages, generator=torch.Generator().manual_seed(page_size))
    pages = torch.cat([pages.view(DUMMY_ROW, row_pages), torch.full((1, row_pages), DUMMY_ROW * row_pages)])
    table = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[:, :WIDTH].int().contiguous()
    if resolve(name).capabilities.library:
        table = table.to("cuda")
    return small_engine(table, page_size=page_size, num_pages=DUMMY_ROW * row_pages + 1, num_qo_heads=8)


def dummy() -> Req:
    return Req(table_idx=DUMMY_ROW, cached_len=0, device_len=1, uid=-1)


def captured(backend: GraphBackend, engine: EngineContext, size: int) -> Batch:
    dummies = [dummy() for _ in range(size)]
    slots = torch.full((size,), int(engine.page_table[DUMMY_ROW, 0]), dtype=torch.int32).to(engine.device)
    positions = torch.zeros(size, dtype=torch.int32).to(engine.device)
    batch = Batch(
        reqs=dummies, padded_reqs=dummies, phase="decode", kind="decode", positions=positions, out_loc=slots
    )
    backend.prepare_for_capture(batch)
    return batch


def padded(batch: Batch, engine: EngineContext, size: int) -> Batch:
    missing = size - len(batch.reqs)
    batch.padded_reqs = [*batch.reqs, *[dummy() for _ in range(missing)]]
    slot = int(engine.page_table[DUMMY_ROW, 0])
    batch.out_loc = torch.nn.functional.pad(batch.out_loc, (0, missing), value=slot)
    batch.positions = torch.nn.functional.pad(batch.positions, (0, missing))
    return batch


def with_padding(rows: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_ones(size - rows.shape[0], *rows.shape[1:])])


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("name", ["torch", "fi", "fi-paged", "fa", "fa,fi", "fi,torch"])
def test_each_batch_is_written_where_its_graph_reads(name: str, page_size: int) -> None:
    engine = engine_for(name, page_size)
    backend = resolve(name).factory(engine)
    backend.init_capture_graph(WIDTH, SIZES)
    graphs = {size: captured(backend, engine, size) for size in reversed(SIZES)}
    for lengths in ([9, 24, 1], [3, 7], [24, 24, 24, 24], [2, 1, 5], [12]):
        size = min(size for size in SIZES if size >= len(lengths))
        sequences = Sequences(engine, [(n - 1, n) for n in lengths], seed=len(lengths))
        sequences.store_cached()
        batch = padded(make_batch(engine, sequences.lengths, "decode"), engine, size)
        backend.prepare_metadata(batch)
        backend.prepare_for_replay(batch)
        graph = graphs[size]
        graph.out_loc.copy_(batch.out_loc)
        q, k, v = (with_padding(x, size) for x in sequences.new())
        for layer in range(engine.num_layers):
            out = backend.forward(q, k, v, layer, graph).cpu()
            assert torch.isfinite(out).all(), "padded rows too"
            assert (out[: len(lengths)] - sequences.expected()[0]).abs().max() < 1e-5, (lengths, layer)


@pytest.mark.parametrize("name", ["torch", "fa"])
def test_buffers_hold_every_page_of_the_longest_sequence(name: str) -> None:
    engine = engine_for(name, 5)
    backend = resolve(name).factory(engine)
    backend.init_capture_graph(WIDTH, [2])
    table = captured(backend, engine, 2).attn_metadata.page_table
    assert table.shape[1] * (5 if name == "fa" else 1) >= WIDTH
