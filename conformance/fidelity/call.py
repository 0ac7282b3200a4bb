"""`LibraryCall`: one call of a kernel library as data, from which all of its tensors follow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

Variant = Literal["plain", "window", "cap"]
"""What FlashInfer compiles a kernel for: bf16 of head dim 128; fp16 of head dim 64 with a window; bf16 of head
dim 128 with a soft cap."""

Layout = Literal["NHD", "HND"]

FLASHINFER_PAGED = (
    "fi.decode.cuda_core",
    "fi.decode.tensor_core",
    "fi.graph_decode.cuda_core",
    "fi.graph_decode.tensor_core",
    "fi.prefill.fa2",
    "fi.prefill.fa3",
)
FLASHINFER_RAGGED = ("fi.ragged.fa2", "fi.ragged.fa3")
FLASHINFER_APPEND = ("fi.append",)
FLASHINFER_MERGE = ("fi.merge_state", "fi.merge_state_in_place", "fi.merge_states")
SGL_KERNEL = ("sgl.kvcache", "sgl.varlen", "sgl.merge_state_v2")
ENTRIES = FLASHINFER_PAGED + FLASHINFER_RAGGED + FLASHINFER_APPEND + FLASHINFER_MERGE + SGL_KERNEL
"""Entry points of the libraries, with the kernel that answers where the caller chooses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCall:
    """A call of one entry point, and what it was meant to compute.

    Request i means to attend `qo_lens[i]` query rows (the last of the request) to `kv_lens[i]` keys, or to store the
    last `qo_lens[i]` of them. Each
    malformation spoils an argument and leaves the meaning as it is; it is "name:argument" of
    `catalogue.MALFORMATIONS`. `num_states` is the number of states of `fi.merge_states`; in merges `qo_lens`
    alone count. `soft_cap` 0: none; `window_left` -1: none.
    """

    entry: str
    variant: Variant = "plain"
    qo_lens: tuple[int, ...] = (1,)
    kv_lens: tuple[int, ...] = (1,)
    num_qo_heads: int = 1
    num_kv_heads: int = 1
    page_size: int = 1
    layout: Layout = "NHD"
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    custom_mask: bool = False
    seq_lens: bool = False
    host_metadata: bool = False
    strided_q: bool = False
    stacked_cache: bool = False
    poisoned: bool = False
    """Slots that no request owns hold NaN instead of numbers."""
    num_splits: int = 0
    num_states: int = 2
    empty_states: bool = False
    seed: int = 0
    malformations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.entry not in ENTRIES:
            raise ValueError(f"entry is {self.entry!r}, must be one of {', '.join(ENTRIES)}")
        if len(self.qo_lens) != len(self.kv_lens) or not self.qo_lens:
            raise ValueError(
                f"qo_lens has {len(self.qo_lens)} entries and kv_lens {len(self.kv_lens)}: "
                "they must be as many, and at least one"
            )
        if self.entry in FLASHINFER_APPEND:
            if any(new > length for new, length in zip(self.qo_lens, self.kv_lens, strict=True)):
                raise ValueError(f"{self.qo_lens} tokens are stored of {self.kv_lens}")
            if not sum(self.qo_lens):
                raise ValueError("no token is stored: the library refuses that")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_qo_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )

    @property
    def library(self) -> str:
        return "flashinfer" if self.entry.startswith("fi.") else "sgl_kernel"

    @property
    def kernel(self) -> str:
        """The last part of the entry's name: cuda_core, tensor_core, fa2, fa3, or the function's name."""
        return self.entry.rpartition(".")[2]

    @property
    def head_dim(self) -> int:
        return 64 if self.variant == "window" else 128

    @property
    def dtype(self) -> str:
        """Of q, K and V, as torch names it."""
        return "float16" if self.variant == "window" else "bfloat16"

    @property
    def valid(self) -> bool:
        return not self.malformations

    def digest(self) -> str:
        """sha256 of the canonical JSON, 16 hex digits."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]


DEFAULTS = {field.name: field.default for field in fields(LibraryCall)}


def to_json(call: LibraryCall) -> str:
    """Canonical JSON: what differs from the defaults, keys sorted."""
    given = {name: getattr(call, name) for name in DEFAULTS}
    return json.dumps(
        {name: value for name, value in given.items() if value != DEFAULTS[name]},
        sort_keys=True,
        separators=(",", ":"),
    )


def from_json(text: str | Mapping[str, Any]) -> LibraryCall:
    """The call that `to_json` wrote.

    Raises:
        ValueError: an unknown key, or a call that breaks a rule of the record.
    """
    given: dict[str, Any] = json.loads(text) if isinstance(text, str) else dict(text)
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"a library call has no {unknown[0]!r}")
    if given.get("variant", "plain") not in get_args(Variant):
        raise ValueError(f"variant is {given['variant']!r}, must be plain, window or cap")
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(cast("list[Any]", value))
    return LibraryCall(**given)


def in_words(call: LibraryCall) -> str:
    """One line for people."""
    parts = [call.entry, " + ".join(call.malformations) or "sound"]
    lens = ", ".join(f"{n}/{m}" for n, m in zip(call.qo_lens, call.kv_lens, strict=True))
    parts.append(f"rows/keys {lens}")
    parts.append(f"heads {call.num_qo_heads}/{call.num_kv_heads}, page size {call.page_size} {call.layout}")
    flags = ("causal", "custom_mask", "seq_lens", "host_metadata", "strided_q", "stacked_cache", "poisoned")
    extra = [name for name in (*flags, "empty_states") if getattr(call, name)]
    if call.window_left >= 0:
        extra.append(f"window_left {call.window_left}")
    if call.soft_cap:
        extra.append(f"soft cap {call.soft_cap:g}")
    return "; ".join(parts + ([", ".join(extra)] if extra else []))
