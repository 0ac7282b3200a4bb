"""CUDA graphs: what is recorded, what a replay reads again, what is refused, in whose words.

Claims about CUDA: where there is a real GPU, they are tested on that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes import cuda
from fakes.cuda.claims import Tensor, real_gpu, row, there

_names = itertools.count()

REFUSED = (
    "operation not permitted when stream is capturing|operation failed due to a previous error during capture"
)


@pytest.fixture(autouse=True)
def warm(full_or_gpu: None) -> None:
    """Libraries that CUDA loads at first use must be there before a capture."""
    _ = (row() @ row(), torch.softmax(row(), 0))
    torch.cuda.synchronize()


def captured(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


class Model:
    """A step that uses views, in-place operations, `out=`, assignments by index, several results and an allocation."""

    def __init__(self) -> None:
        self.weight = torch.linspace(-1, 1, 64, device="cuda").view(8, 8)
        self.scale = 3.0

    def __call__(self, x: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.view(2, 4)[0].add_(1)
        y = torch.zeros(8, device="cuda")
        torch.add(x, self.scale, out=y)
        cache[slots] = y
        z = (y * 0.5) @ self.weight
        a, b = z.split(4)
        joined = torch.cat([a, torch.softmax(b, 0)])
        top = torch.topk(joined, 3)
        return joined, top.values, top.indices


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, generator=generator).cuda(),
        torch.randperm(16, generator=generator)[:8].cuda(),
        torch.zeros(16, device="cuda"),
    )


def test_replay_is_eager() -> None:
    model, static = Model(), inputs(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(*static)
    assert there(*out)
    at = [t.data_ptr() for t in out]
    for seed in (1, 2, 3):
        new = inputs(seed)
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        graph.replay()
        wanted = model(*new)
        for got, right in zip((*out, *static), (*wanted, *new), strict=True):
            torch.testing.assert_close(got, right)
        assert [t.data_ptr() for t in out] == at


def test_nothing_runs_during_capture() -> None:
    x, log = row(), torch.zeros(6, device="cuda")

    def work() -> None:
        log.add_(x)
        x.mul_(2)

    graph = captured(work)
    assert x.tolist() == row().tolist()
    assert log.tolist() == [0.0] * 6
    graph.replay()
    graph.replay()
    assert log.tolist() == [0, 3, 6, 9, 12, 15]
    assert x.tolist() == [0, 4, 8, 12, 16, 20]


def test_numbers_and_names_are_frozen() -> None:
    state = {"x": row(), "scale": 2.0}
    result: list[Tensor] = []
    graph = captured(lambda: result.append(state["x"] * state["scale"]))
    first = state["x"]
    state["x"], state["scale"] = torch.full((6,), 100.0, device="cuda"), 77.0
    graph.replay()
    assert result[0].tolist() == [0, 2, 4, 6, 8, 10]
    first.add_(1)
    graph.replay()
    assert result[0].tolist() == [2, 4, 6, 8, 10, 12]


def test_shape_changes_of_the_objects_are_not_seen() -> None:
    x, result = torch.ones(1, 3, device="cuda"), []
    graph = captured(lambda: result.append(x + 1))
    x.squeeze_(0)
    x.fill_(4)
    graph.replay()
    assert result[0].tolist() == [[5, 5, 5]]


def test_results_are_overwritten_by_the_next_replay() -> None:
    x, result = row(), []
    graph = captured(lambda: result.append(x + 1))
    graph.replay()
    kept, copied = result[0], result[0].clone()
    x.add_(10)
    graph.replay()
    assert kept.tolist() == [11, 12, 13, 14, 15, 16]
    assert copied.tolist() == [1, 2, 3, 4, 5, 6]


def test_memory_of_what_was_dropped_is_kept() -> None:
    held, result = [row()], []
    graph = captured(lambda: result.append(held[0] + 1))
    held.clear()
    junk = [torch.full((6,), -1.0, device="cuda") for _ in range(8)]
    graph.replay()
    assert result[0].isfinite().all()
    del junk


def test_graphs_read_each_others_memory() -> None:
    x = row()
    pool = torch.cuda.graph_pool_handle()
    between: list[Tensor] = []
    after: list[Tensor] = []
    first = captured(lambda: between.append(x + 1), pool)
    second = captured(lambda: after.append(between[0] * 2), pool)
    assert first.pool() == second.pool() == pool
    first.replay()
    second.replay()
    assert after[0].tolist() == [2, 4, 6, 8, 10, 12]


def test_pinned_memory_is_read_again() -> None:
    host, on_device = torch.arange(4.0).pin_memory(), torch.zeros(4, device="cuda")
    result: list[Tensor] = []

    def work() -> None:
        on_device.copy_(host, non_blocking=True)
        result.append(on_device * 2)

    graph = captured(work)
    host.add_(10)
    graph.replay()
    torch.cuda.synchronize()
    assert result[0].tolist() == [20, 22, 24, 26]


def test_results_may_be_copied_to_pinned_memory() -> None:
    x, host = row(4), torch.zeros(4).pin_memory()
    graph = captured(lambda: host.copy_(x, non_blocking=True))
    assert host.tolist() == [0, 0, 0, 0]
    graph.replay()
    torch.cuda.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_attention() -> None:
    q, result = torch.randn(1, 2, 3, 8, device="cuda"), []
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(q, q, q)
    graph = captured(lambda: result.append(attend(q, q, q, is_causal=True)))
    q.copy_(torch.linspace(-1, 1, 48).view(1, 2, 3, 8))
    graph.replay()
    torch.testing.assert_close(result[0], attend(q, q, q, is_causal=True))


def test_custom_operators() -> None:
    name = f"simulated_graph_test_{next(_names)}"
    library = torch.library.Library(name, "DEF")
    library.define("scale_(Tensor(a!) x, float s) -> ()")
    library.impl("scale_", lambda x, s: (x.mul_(s), None)[1], "CUDA")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CUDA")
    own = getattr(torch.ops, name)
    x, result = row(), []

    def work() -> None:
        own.scale_(x, 0.5)
        result.append(own.twice(x))

    graph = captured(work)
    x.fill_(6)
    graph.replay()
    assert x.tolist() == [3.0] * 6
    assert result[0].tolist() == [6.0] * 6
    library._destroy()


def test_is_current_stream_capturing() -> None:
    seen: list[bool] = [torch.cuda.is_current_stream_capturing()]
    captured(lambda: (row(), seen.append(torch.cuda.is_current_stream_capturing())))
    seen.append(torch.cuda.is_current_stream_capturing())
    assert seen == [False, True, False]


def test_the_capture_runs_on_a_stream_of_its_own() -> None:
    seen: list[object] = []
    captured(lambda: (row(), seen.append(torch.cuda.current_stream())))
    assert seen[0] != torch.cuda.current_stream()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        row()
        seen.append(torch.cuda.current_stream())
    assert seen[1] == side


def _boolean(x: Tensor) -> None:
    if x.sum() > 0:
        x.add_(1)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": _boolean,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": torch.unique,
    "equal": lambda x: torch.equal(x, x),
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "pageable": lambda x: torch.ones(3).to("cuda"),
    "blocking": lambda x: torch.ones(3).pin_memory().to("cuda"),
    "literal": lambda x: torch.tensor([1, 2], device="cuda"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_would_wait_for_is_refused(name: str) -> None:
    x, graph = row(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=REFUSED), torch.cuda.graph(graph):
        WAITS[name](x)
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert not torch.cuda.is_current_stream_capturing()
    captured(lambda: x.add_(1)).replay()  # the next capture is not concerned
    assert (x + 1).sum().item() == 27


def test_a_swallowed_refusal_still_spoils_the_graph() -> None:
    x, graph = row(), torch.cuda.CUDAGraph()

    def swallow() -> None:
        try:
            x.sum().item()
        except RuntimeError:
            return

    with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(graph):
        swallow()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_further_work_is_refused_after_a_refusal() -> None:
    x, graph, said = row(), torch.cuda.CUDAGraph(), []

    def insist() -> None:
        for _ in range(2):
            try:
                x.sum().item()
            except RuntimeError as error:
                said.append(str(error))

    with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(graph):
        insist()
    assert len(said) == 2
    assert "previous error" in said[1]


def test_an_error_of_the_engine_leaves_no_capture_behind() -> None:
    x, graph = row(), torch.cuda.CUDAGraph()

    def fail() -> None:
        x.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), torch.cuda.graph(graph):
        fail()
    assert not torch.cuda.is_current_stream_capturing()
    assert x.tolist() == row().tolist()


def test_replay_needs_a_capture() -> None:
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.cuda.CUDAGraph().replay()


def test_reset() -> None:
    x = row()
    graph = captured(lambda: x.add_(1))
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_many_graphs_of_several_batch_sizes() -> None:
    """As serving engines capture them: static buffers, the largest size first, one pool."""
    x, out = torch.zeros(4, 3, device="cuda"), torch.zeros(4, 3, device="cuda")
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for size in (4, 2, 1):

        def work(size: int = size) -> None:
            out[:size] = torch.softmax(x[:size] * 2, dim=1)

        work()
        graphs[size] = captured(work, pool)
    for size in (1, 4, 2):
        x.copy_(torch.randn(4, 3))
        out.fill_(-1)
        graphs[size].replay()
        torch.testing.assert_close(out[:size], torch.softmax(x[:size] * 2, dim=1))
        assert (out[size:] == -1).all()


# Libraries' kernels: one node each


@pytest.fixture
def simulation(full_or_gpu: None) -> cuda.Simulation:
    if real_gpu():
        pytest.skip("kernels of fakes run in a simulation only")
    now = cuda.current()
    assert now is not None
    return now


def test_a_kernel_is_one_node_that_reads_its_buffers_again(simulation: cuda.Simulation) -> None:
    calls: list[float] = []

    @cuda.kernel
    def attend(q: Tensor, lens: Tensor, scale: float) -> Tensor:
        calls.append(scale)
        rows, host_q = cuda.host(lens).tolist(), cuda.host(q)
        return torch.stack([host_q[i] * n * scale for i, n in enumerate(rows)])

    q, lens = torch.ones(3, 2, device="cuda"), torch.tensor([1, 2, 3], device="cuda", dtype=torch.int32)
    result: list[Tensor] = []
    graph = captured(lambda: result.append(attend(q, lens, 2.0) + 1))
    assert graph.nodes[0] == "kernel"  # pyright: ignore[reportAttributeAccessIssue]
    assert len(graph.nodes) == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert result[0].isnan().all()
    lens.copy_(torch.tensor([4, 5, 6], dtype=torch.int32))
    graph.replay()
    assert result[0][:, 0].tolist() == [9, 11, 13]
    assert calls == [2.0, 2.0]


def test_what_a_kernel_writes_is_written_at_replay_only(simulation: cuda.Simulation) -> None:
    @cuda.kernel
    def store(cache: Tensor, slots: list[Tensor], new: dict[str, Tensor]) -> None:
        cuda.host(cache)[cuda.host(slots[0]).long()] = cuda.host(new["k"])

    hidden = torch.zeros(2, device="cuda")  # reached by name, not as an argument

    @cuda.kernel
    def count() -> None:
        cuda.host(hidden).add_(1)

    cache, slots, new = (
        torch.zeros(4, device="cuda"),
        torch.tensor([1, 3], device="cuda"),
        torch.ones(2, device="cuda"),
    )

    def work() -> None:
        store(cache, [slots], {"k": new})
        count()

    graph = captured(work)
    assert cache.tolist() == [0, 0, 0, 0]
    assert hidden.tolist() == [0, 0]
    slots.copy_(torch.tensor([0, 2]))
    new.fill_(5)
    graph.replay()
    assert cache.tolist() == [5, 0, 5, 0]
    assert hidden.tolist() == [1, 1]


def test_a_pause_during_capture_is_no_part_of_it(simulation: cuda.Simulation) -> None:
    x, counted = row(), torch.zeros(1)
    seen: list[float] = []

    def work() -> None:
        x.add_(1)
        with cuda.paused():
            counted.add_(1)
            seen.append(float(cuda.host(x).sum()))
            with cuda.resumed():
                assert torch.cuda.is_current_stream_capturing()

    graph = captured(work)
    assert counted.item() == 1
    graph.replay()
    graph.replay()
    assert counted.item() == 1
    assert x.sum().item() == 27
    assert len(graph.nodes) == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_kernel_that_fails_spoils_nothing_else(simulation: cuda.Simulation) -> None:
    @cuda.kernel
    def fail(x: Tensor) -> None:
        raise ValueError("no such page")

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="no such page"), torch.cuda.graph(graph):
        fail(row())
    assert not torch.cuda.is_current_stream_capturing()


def test_a_kernel_in_a_spoilt_capture_is_refused(simulation: cuda.Simulation) -> None:
    ran: list[int] = []

    @cuda.kernel
    def kernel(x: Tensor) -> None:
        ran.append(1)

    x, graph, said = row(), torch.cuda.CUDAGraph(), []

    def insist() -> None:
        for call in (lambda: x.sum().item(), lambda: kernel(x)):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))

    with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(graph):
        insist()
    assert len(said) == 2
    assert not ran


def test_graphed_callables_and_dumps_are_refused(simulation: cuda.Simulation) -> None:
    with pytest.raises(cuda.NotSimulated, match="autograd"):
        torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2).cuda(), (torch.zeros(1, 2, device="cuda"),))
    with pytest.raises(cuda.NotSimulated, match="files"):
        torch.cuda.CUDAGraph().debug_dump("graph.dot")
