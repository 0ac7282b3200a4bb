"""What an engine author writes (`Backend`), what a vendor writes (`KernelAdapter`), and what both are given.

Metadata once per batch, forward once per layer, K and V written before they are read: the protocol of mini-sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from cases.model import Kind, Layout, Phase
from cases.wanted import Variant

LseBase = Literal["e", "2"]


class Refused(Exception):  # noqa: N818 - a clean refusal is an answer, not an error of the harness
    """Raised by a backend for what it does not support. `conformance.Refused` is this class."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend offers. Declared is tested; a case that needs more is `unsupported` and not run.

    The default is what the smallest useful backend does: causal prefill, decode and mixed batches.
    """

    level: Literal["engine", "kernel"] = "engine"
    """"engine" for a `Backend`, "kernel" for a `KernelAdapter`."""
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})
    """Phases that it takes. A kernel adapter without "prefill" takes one query row per request."""
    library: frozenset[str] = frozenset()
    """Kernel libraries that it calls: "flashinfer", "sgl_kernel". Empty: none, it runs on the plain CPU."""
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16", "float32"})
    """Dtypes of q. Real kernels take no float32; the fakes accept it as a stated extension, except in faithful mode."""
    kv_dtypes: frozenset[str] = frozenset()
    """KV dtypes beside q's own: "float8_e4m3fn", "float8_e5m2", with `k_scale` and `v_scale`."""
    page_sizes: frozenset[int] | None = None
    """Page sizes, in slots. None: any."""
    layouts: frozenset[Layout] = frozenset({"NHD"})
    """KV cache layouts."""
    head_dims: frozenset[tuple[int, int]] | None = None
    """Pairs (head_dim_qk, head_dim_vo). None: any."""
    group_sizes: frozenset[int] | None = None
    """Query heads per KV head. None: any."""
    non_causal: bool = False
    """Kernel level: takes `causal=False`."""
    window: bool = False
    """Takes a sliding window."""
    layer_windows: bool = False
    """With `window`: takes it in some layers alone, while the others see all keys (`EngineContext.windows`)."""
    soft_cap: bool = False
    """Takes a logits soft cap."""
    custom_mask: bool = False
    """Kernel level: takes a boolean mask per request."""
    rows_without_keys: bool = False
    """Kernel level: takes rows that see no key (`kv_len` 0, or `qo_len > kv_len` under a causal mask)."""
    batches_without_keys: bool = True
    """Kernel level, with `rows_without_keys`: takes a batch in which no request has a key."""
    empty_requests: bool = False
    """Kernel level: takes requests with `qo_len` 0."""
    merges: bool = False
    """Kernel level: merges `KernelCall.states` instead of reading keys."""
    strided: bool = True
    """Takes q, k and v as slices of a fused tensor."""
    lse: LseBase | None = None
    """Base of the log-sum-exp that `forward_return_lse` (or `Attention.lse`) carries. None: it returns none."""
    empty_lse: Literal["-inf", "sentinel"] = "-inf"
    """LSE of a row that sees no key: -inf, or any value below -1000."""
    bit_equal: bool = False
    """A request's result has the same bits whatever its batch mates, their order and the pages' places.

    Kernels that split keys by the size of the batch break this on a GPU; their fakes do not."""
    variants: tuple[Variant, ...] = ()
    """Combinations of settings that it takes, where not all of what is declared above goes together: on a GPU those
    whose kernels are compiled. Empty: all."""
    reads_unowned_slots: bool = False
    """Reads slots that the request does not own and discards them: they are then poisoned with large finite values."""
    cuda_graph: bool = False
    """Its decode batches can be captured in CUDA graphs: it has the three further methods of `GraphBackend`."""
    host_reads: int | Literal["auto"] | None = "auto"
    """How often one call of `forward` may make the host wait for the device (`item`, `cpu`, `nonzero`, a copy from
    memory that is not pinned; waiting for an event does not count). None: not judged. "auto": never, where
    `cuda_graph` is declared, else not judged."""

    @property
    def host_read_budget(self) -> int | None:
        """`host_reads` as a number; None: not judged."""
        if self.host_reads == "auto":
            return 0 if self.cuda_graph else None
        return self.host_reads


@runtime_checkable
class KVPool(Protocol):
    """The engine's paged KV cache. One slot holds one token; slot = page * page_size + offset."""

    scales: tuple[float, float]
    """(k_scale, v_scale): what stored K and V are multiplied by to dequantise them; 1 beside a 16-bit cache."""

    def k_cache(self, layer_id: int) -> torch.Tensor:
        """K of a layer: NHD `[num_pages, page_size, num_kv_heads, head_dim_qk]` or HND (heads before slots)."""
        ...

    def v_cache(self, layer_id: int) -> torch.Tensor:
        """V of a layer, the same with `head_dim_vo`."""
        ...

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        """Write k, v `[num_tokens, num_kv_heads, dim]` to the slots `out_loc` (int32 `[num_tokens]`)."""
        ...

    def stored(self) -> None:
        """Instead of `store_kv`: say that the backend itself has written this layer's k and v to `out_loc`.

        What attends to them later in this layer then reads stored keys.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What a backend may know about its engine. Fixed for the backend's life; `page_table`'s content is not."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    num_layers: int
    page_size: int
    num_pages: int
    layout: Layout
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    scale: float
    """Factor on q . k."""
    windows: tuple[int | None, ...]
    """Per layer, the number of keys visible, the query's own included; None: all."""
    soft_cap: float | None
    max_seq_len: int
    """Longest sequence, in tokens: the columns of `page_table`."""
    max_batch: int
    """Most requests in one batch, padding not counted: a captured size may be larger."""
    kv_pool: KVPool
    page_table: torch.Tensor
    """int32 `[rows, max_seq_len]` on `device`: *token locations* (slots) whatever the page size. Columns past a
    request's length hold valid slots that it does not own."""


@dataclass(kw_only=True)
class Req:
    """One request of a batch. Its KV is `cached_len + extend_len == device_len` tokens."""

    table_idx: int
    """Its row of `page_table`."""
    cached_len: int
    device_len: int
    uid: int = 0

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len


@dataclass(kw_only=True)
class Batch:
    """One batch. `phase` is "decode" when every request computes one token by decoding, else "prefill"."""

    reqs: list[Req]
    phase: Phase
    kind: Kind
    positions: torch.Tensor
    """int32 `[num_tokens]`: position of each new token in its sequence."""
    out_loc: torch.Tensor
    """int32 `[num_tokens]`: slot of each new token, in request order."""
    padded_reqs: list[Req] = field(default_factory=list[Req])
    """`reqs`, then dummy requests up to a captured batch size; their tokens count in `positions` and `out_loc`.

    A dummy has `cached_len` 0 and `device_len` 1, a row of `page_table` and a page that no other request has.
    """
    attn_metadata: Any = None
    """Left here by `prepare_metadata`."""

    @property
    def is_decode(self) -> bool:
        return self.phase == "decode"

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"


@runtime_checkable
class Backend(Protocol):
    """An engine's attention backend.

    Optional: `capabilities` (a class attribute; the default of `Capabilities()` where absent), `refuses` (True
    promises `conformance.Refused` for whatever is not declared), `forward_return_lse` (where an LSE base is
    declared), which takes what `forward` takes and returns `(out, lse)` with lse float32 `[num_tokens, num_qo_heads]`,
    and the methods of `GraphBackend` (where `cuda_graph` is declared).

    What it is given is the engine's and stays as it is: q, k, v, the page table, a batch but for its `attn_metadata`,
    and torch's own settings (default dtype, grad mode, current stream).
    """

    def __init__(self, engine: EngineContext) -> None: ...

    def prepare_metadata(self, batch: Batch) -> None:
        """Once per batch, before its first layer: leave in `batch.attn_metadata` what `forward` needs."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        """Once per layer: store k and v, then attend.

        q `[num_tokens, num_qo_heads, head_dim_qk]`, k and v `[num_tokens, num_kv_heads, dim]`, in the engine's dtype
        and on its device; returns `[num_tokens, num_qo_heads, head_dim_vo]`, the same dtype and device. The engine
        uses it before the next layer: one buffer may serve all of them.
        """
        ...


@runtime_checkable
class GraphBackend(Backend, Protocol):
    """A backend whose decode batches an engine captures in CUDA graphs, one graph a batch size (`cuda_graph`).

    A graph keeps the addresses that its kernels were given, so whatever differs between batches is read from buffers
    that stay where they are. The engine captures the largest size first, and replays the smallest that holds a batch.
    """

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        """Once, before the first capture: make buffers for each size of `bs_list`, up to `max_seq_len` tokens each.

        The smallest size comes first.
        """
        ...

    def prepare_for_capture(self, batch: Batch) -> None:
        """Instead of `prepare_metadata`, for a batch of dummies whose size is one of `bs_list`.

        Leave in `batch.attn_metadata` what `forward` needs, all of it in the buffers. `forward` (or, where an LSE is
        declared, `forward_return_lse`) then runs twice in every layer, the second time while the graph records it: it
        must neither read a tensor on the host nor synchronise.
        """
        ...

    def prepare_for_replay(self, batch: Batch) -> None:
        """After `prepare_metadata(batch)`, before the graph for `len(batch.padded_reqs)` requests is replayed.

        Write this batch into the buffers, the dummies too; `forward` is not called again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of one entry point: tensors, and metadata that is right by construction (plain host lists)."""

    q: torch.Tensor
    """`[num_rows, num_qo_heads, head_dim_qk]`."""
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    """Paged, in the engine's layout and KV dtype."""
    k: torch.Tensor
    v: torch.Tensor
    """The same keys ragged: `[sum(kv_lens), num_kv_heads, dim]`."""
    states: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """For adapters that declare `merges`: partial attention over disjoint keys, each as v
    `[num_rows, num_qo_heads, head_dim_vo]` and lse float32 `[num_rows, num_qo_heads]` in the declared base. Empty for
    others."""
    qo_lens: list[int]
    kv_lens: list[int]
    pages: list[list[int]]
    """Page ids of each request, in order."""
    causal: bool
    window: int | None
    """Keys visible, the row's own included."""
    soft_cap: float | None
    custom_mask: list[torch.Tensor] | None
    """One bool `[qo_len, kv_len]` per request."""
    scale: float
    k_scale: float
    v_scale: float


@dataclass(frozen=True)
class Attention:
    """out `[num_rows, num_qo_heads, head_dim_vo]`; lse float32 `[num_rows, num_qo_heads]` in the declared base."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


@runtime_checkable
class KernelAdapter(Protocol):
    """One public entry point of a kernel library, for its vendor."""

    capabilities: ClassVar[Capabilities]

    def __init__(self, engine: EngineContext) -> None: ...

    def attend(self, call: KernelCall) -> Attention: ...


def window_left(window: int | None) -> int:
    """FlashInfer's `window_left`: keys visible *before* the query's own; -1 for all."""
    return -1 if window is None else window - 1


def window_size(window: int | None, *, causal: bool) -> tuple[int, int]:
    """FlashAttention's `window_size`: keys visible (left, right) of the query's own; -1 for all."""
    if window is None:
        return (-1, -1)
    return (window - 1, 0 if causal else -1)
