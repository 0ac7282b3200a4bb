"""`GraphRunner`: decode batches through captured CUDA graphs, the way a serving engine runs them.

One graph a batch size, the largest captured first, all in one memory pool. A batch is padded with dummy requests to
the next captured size; its inputs are copied into fixed buffers; the backend writes its metadata into buffers of its
own; the graph is replayed. This is engine code: call it where backend code runs, on a real or simulated CUDA device.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from backends.contract import Batch, EngineContext, GraphBackend, Req


@contextmanager
def _garbage_kept() -> Generator[None]:
    """Collect no garbage meanwhile: a graph or pinned memory that is freed while a capture runs breaks it off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class InputBuffers:
    """What the captured kernels of all sizes read: q `[layers, max_bs, num_qo_heads, head_dim_qk]`, k and v
    `[layers, max_bs, num_kv_heads, dim]`, `positions` and `out_loc` int32 `[max_bs]`.

    Rows that a replay does not fill keep what an earlier one left. `fused`: q, k and v are slices of one tensor.
    """

    def __init__(self, engine: EngineContext, max_bs: int, *, fused: bool) -> None:
        qo, kv = engine.num_qo_heads, engine.num_kv_heads
        shapes = ((qo, engine.head_dim_qk), (kv, engine.head_dim_qk), (kv, engine.head_dim_vo))
        lead, widths = (engine.num_layers, max_bs), [heads * dim for heads, dim in shapes]
        like: dict[str, Any] = {"dtype": engine.dtype, "device": engine.device}
        parts: Sequence[torch.Tensor] = (
            torch.zeros(*lead, sum(widths), **like).split_with_sizes(widths, dim=2)
            if fused
            else [torch.zeros(*lead, width, **like) for width in widths]
        )
        self.q, self.k, self.v = (x.view(*lead, *shape) for x, shape in zip(parts, shapes, strict=True))
        self.positions = torch.zeros(max_bs, dtype=torch.int32, device=engine.device)
        self.out_loc = torch.zeros(max_bs, dtype=torch.int32, device=engine.device)


def _share_memory(answers: list[Any]) -> bool:
    """Whether two layers' answers lie in one piece of memory."""
    storages = [{t.untyped_storage().data_ptr() for t in _tensors(answer)} for answer in answers]
    return len(set[int]().union(*storages)) < sum(map(len, storages))


def _copied(answer: Any) -> Any:
    if isinstance(answer, tuple):
        return tuple(_copied(part) for part in cast("tuple[Any, ...]", answer))
    return answer.clone() if isinstance(answer, torch.Tensor) else answer


def _tensors(answer: Any) -> list[torch.Tensor]:
    parts = cast("tuple[Any, ...]", answer if isinstance(answer, tuple) else (answer,))
    return [part for part in parts if isinstance(part, torch.Tensor)]


class GraphRunner:
    """Captures and replays the decode batches of one backend object.

    Args:
        sizes: batch sizes to capture (`bs_list`).
        dummy: the request that pads batches: `cached_len` 0, `device_len` 1, a row and a page of its own.
        dummy_slot: the slot of its token.
        fused: whether q, k and v are slices of one tensor.
        with_lse: capture `forward_return_lse` instead of `forward`.
        at: told what is about to be called, the captured size, and the layer (-1: not in a layer): a hook by its name,
            "warm_up", "capture" or "replay".
    """

    def __init__(
        self,
        backend: GraphBackend,
        engine: EngineContext,
        sizes: Sequence[int],
        dummy: Req,
        dummy_slot: int,
        *,
        fused: bool = False,
        with_lse: bool = False,
        at: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.backend = backend
        self.engine = engine
        self.sizes = sorted(sizes)
        self.dummy, self.dummy_slot = dummy, dummy_slot
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, list[Any]] = {}
        """By size: what the captured `forward` returned in each layer; a replay writes there."""
        self.batches: dict[int, Batch] = {}
        """By size: the batch that was captured, with the metadata that the graph reads."""
        self._fused, self._with_lse = fused, with_lse
        self._at = at or _nowhere
        self.altered: list[str] = []
        """What the backend was handed for its buffers and has changed."""
        self._pool: Any = None
        self._has_buffers = False

    def make_buffers(self) -> None:
        """Make the input buffers, and have the backend make its own. `capture` does this where it has not been done."""
        largest = self.sizes[-1]
        self.inputs = InputBuffers(self.engine, largest, fused=self._fused)
        self.inputs.out_loc.fill_(self.dummy_slot)
        self._at("init_capture_graph", largest, -1)
        handed = list(self.sizes)
        self.backend.init_capture_graph(self.engine.max_seq_len, handed)
        self.altered = [] if handed == self.sizes else ["bs_list"]
        self._has_buffers = True

    def capture(self) -> None:
        """Capture a graph for every size."""
        if not self._has_buffers:
            self.make_buffers()
        for size in reversed(self.sizes):
            self._capture(size)

    def _capture(self, size: int) -> None:
        batch = Batch(
            reqs=[self.dummy] * size,
            padded_reqs=[self.dummy] * size,
            phase="decode",
            kind="decode",
            positions=self.inputs.positions[:size],
            out_loc=self.inputs.out_loc[:size],
        )
        self._at("prepare_for_capture", size, -1)
        self.backend.prepare_for_capture(batch)
        warm = self._forward(
            batch, "warm_up"
        )  # outside of the graph: whatever a kernel sets up when it first runs
        graph = torch.cuda.CUDAGraph()
        with _garbage_kept(), torch.cuda.graph(graph, pool=self._pool):
            self.outputs[size] = self._forward(batch, "capture", used_at_once=_share_memory(warm))
        self._pool = self._pool or graph.pool()
        self.graphs[size], self.batches[size] = graph, batch

    def _forward(self, batch: Batch, what: str, *, used_at_once: bool = False) -> list[Any]:
        """`used_at_once`: copy each layer's answer before the next, which is given in the same memory."""
        backend: Any = self.backend
        size = len(batch.padded_reqs)
        forward = backend.forward_return_lse if self._with_lse else backend.forward
        answers: list[Any] = []
        for layer in range(self.engine.num_layers):
            q, k, v = (x[layer, :size] for x in (self.inputs.q, self.inputs.k, self.inputs.v))
            self._at(what, size, layer)
            answer = forward(q, k, v, layer, batch)
            answers.append(_copied(answer) if used_at_once else answer)
        return answers

    def size_for(self, num_reqs: int) -> int | None:
        """The captured size that a batch is padded to; None: it is too large."""
        index = bisect_left(self.sizes, num_reqs)
        return self.sizes[index] if index < len(self.sizes) else None

    def pad(self, batch: Batch) -> None:
        """Add dummies up to the next captured size; do this before the backend prepares the batch.

        Raises:
            ValueError: no captured size holds the batch.
        """
        size = self.size_for(len(batch.reqs))
        if size is None:
            raise ValueError(f"a batch of {len(batch.reqs)} requests exceeds the captured sizes {self.sizes}")
        missing = size - len(batch.reqs)
        batch.padded_reqs = [*batch.reqs, *[self.dummy] * missing]
        if missing:
            pad = torch.nn.functional.pad
            batch.positions = pad(batch.positions, (0, missing), value=0)
            batch.out_loc = pad(batch.out_loc, (0, missing), value=self.dummy_slot)

    def replay(self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Any]:
        """Run a padded batch that the backend has prepared.

        q, k, v `[layers, len(batch.reqs), heads, dim]`. Returns each layer's answer for all padded rows, in the tensors
        that the captured calls returned: the next replay of any size may overwrite them.
        """
        size, real = len(batch.padded_reqs), len(batch.reqs)
        for buffer, given in ((self.inputs.q, q), (self.inputs.k, k), (self.inputs.v, v)):
            buffer[:, :real].copy_(given)
        self.inputs.positions[:size].copy_(batch.positions)
        self.inputs.out_loc[:size].copy_(batch.out_loc)
        self._at("prepare_for_replay", size, -1)
        self.backend.prepare_for_replay(batch)
        self._at("replay", size, -1)
        self.graphs[size].replay()
        return self.outputs[size]


def _nowhere(what: str, size: int, layer: int) -> None:
    del what, size, layer
