"""`Module`: one compiled kernel library of FlashInfer, and which of them a backend's case runs.

The key holds the dtypes of q and KV, the head dims, and whether there is a window and a soft cap; page size, layout,
heads, masks and lengths are not in it (FlashInfer's `jit/attention/modules.py`; the output has q's dtype here).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from backends.contract import Capabilities
from backends.fi_base import TENSOR_CORE_GROUP
from cases.model import Phase
from cases.wanted import Variant

Kind = Literal["decode", "fa2", "fa3", "merge"]
"""Decode on CUDA cores; prefill and decode on tensor cores; the same for Hopper; the merges, one module for all."""
KINDS: tuple[Kind, ...] = ("decode", "fa2", "fa3", "merge")

LIBRARY = "flashinfer"
SMALL_GROUPS = frozenset(range(1, TENSOR_CORE_GROUP))
LARGE_GROUPS = frozenset(range(TENSOR_CORE_GROUP, 65))
_USUAL_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})


@dataclass(frozen=True, order=True)
class Module:
    """A compiled kernel. The default is the simplest one; of a merge, all settings are."""

    kind: Kind = "fa2"
    dtype: str = "float16"
    kv_dtype: str = "float16"
    head_dim_qk: int = 64
    head_dim_vo: int = 64
    window: bool = False
    soft_cap: bool = False

    def __str__(self) -> str:
        if self.kind == "merge":
            return "merge"
        dtypes = self.dtype if self.kv_dtype == self.dtype else f"{self.dtype} KV {self.kv_dtype}"
        flags = [name for name, on in (("window", self.window), ("soft cap", self.soft_cap)) if on]
        return ", ".join([f"{self.kind} {dtypes}", f"{self.head_dim_qk}/{self.head_dim_vo}", *flags])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


MERGE = Module(kind="merge")


@dataclass(frozen=True)
class Use:
    """Which kernel a backend runs. None: none of FlashInfer's."""

    prefill: Kind | None
    decode_small: Kind | None
    """Decode steps with a GQA group below `TENSOR_CORE_GROUP`."""
    decode_large: Kind | None

    @property
    def kinds(self) -> frozenset[Kind]:
        found = (self.prefill, self.decode_small, self.decode_large)
        return frozenset(kind for kind in found if kind is not None)

    def at(self, phase: Phase, *, small: bool) -> Kind | None:
        if phase == "prefill":
            return self.prefill
        return self.decode_small if small else self.decode_large


_LIKE_MINI_SGLANG = Use("fa2", "decode", "fa2")
_USES: dict[str, Use] = {
    "kernel:fi-decode": _LIKE_MINI_SGLANG,
    "kernel:fi-decode-tc": Use("fa2", "fa2", "fa2"),
    "kernel:fi-prefill": Use("fa2", "fa2", "fa2"),
    "kernel:fi-prefill-fa3": Use("fa3", "fa3", "fa3"),
    "kernel:fi-ragged": Use("fa2", "fa2", "fa2"),
    "kernel:fi-ragged-fa3": Use("fa3", "fa3", "fa3"),
    "kernel:fi-merge": Use("merge", "merge", "merge"),
}

_WITHOUT = ("fa", "torch")
"""Parts of hybrids that run nothing of FlashInfer."""


def use_of(name: str, capabilities: Capabilities) -> Use | None:
    """What a backend runs of FlashInfer, None if nothing.

    An engine's backend that is not known is taken to decode on CUDA cores below a group of 4 and to prefill with fa2,
    as mini-sglang does; whatever else it runs is compiled when it comes up.
    """
    if LIBRARY not in capabilities.library:
        return None
    parts = [part.strip() for part in name.split(",")]
    if len(parts) < 2:
        return _USES.get(name, _LIKE_MINI_SGLANG)
    use, (prefill, decode) = _LIKE_MINI_SGLANG, (part not in _WITHOUT for part in parts)
    return Use(
        use.prefill if prefill else None,
        use.decode_small if decode else None,
        use.decode_large if decode else None,
    )


def modules_of(use: Use, capabilities: Capabilities) -> list[Module]:
    """Every module that a backend could be asked to run."""
    c = capabilities
    found: list[Module] = [MERGE] if "merge" in use.kinds else []
    dtypes = sorted(c.dtypes - {"float32"}, reverse=True)
    caches = [None, *sorted(c.kv_dtypes & {"float8_e4m3fn"})]
    windows = [False, True] if c.window else [False]
    soft_caps = [False, True] if c.soft_cap else [False]
    for kind in KINDS:
        if kind not in use.kinds or kind == "merge":
            continue
        for qk, vo in sorted(_USUAL_DIMS if c.head_dims is None else c.head_dims):
            for dtype, cache in product(dtypes, caches):
                found += [
                    Module(kind, dtype, cache or dtype, qk, vo, window, soft_cap)
                    for window, soft_cap in product(windows, soft_caps)
                ]
    return found


def variants_of(use: Use, capabilities: Capabilities, modules: Iterable[Module]) -> tuple[Variant, ...]:
    """The combinations of declared settings for which every kernel that a backend may run is among `modules`.

    The simplest first. A merge runs with any settings: no combination is left out, which is no variant at all.
    """
    if use.kinds <= {"merge"}:
        return ()
    kinds: dict[_Settings, set[Kind]] = {}
    for module in set(modules) & set(modules_of(use, capabilities)):
        kinds.setdefault(_settings(module), set()).add(module.kind)
    found: list[Variant] = []
    for settings in sorted(kinds, key=_simplest):
        small, large = (_phases(use, kinds[settings], small=small) for small in (True, False))
        if small == large:
            found += _variants(settings, None, small)
        else:
            found += _variants(settings, SMALL_GROUPS, small) + _variants(settings, LARGE_GROUPS, large)
    return tuple(found)


def _phases(use: Use, ready: set[Kind], *, small: bool) -> frozenset[Phase]:
    """The phases whose kernel is ready."""
    both: tuple[Phase, ...] = ("prefill", "decode")
    return frozenset(phase for phase in both if use.at(phase, small=small) in (None, *ready))


def _variants(
    settings: _Settings, group_sizes: frozenset[int] | None, phases: frozenset[Phase]
) -> list[Variant]:
    if not phases:
        return []
    dtype, kv_dtype, head_dims, window, soft_cap = settings
    return [
        Variant(
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dims=head_dims,
            window=window,
            soft_cap=soft_cap,
            group_sizes=group_sizes,
            phases=phases,
        )
    ]


_Settings = tuple[str, str, tuple[int, int], bool, bool]


def _settings(module: Module) -> _Settings:
    m = module
    return m.dtype, m.kv_dtype, (m.head_dim_qk, m.head_dim_vo), m.window, m.soft_cap


def _simplest(settings: _Settings) -> tuple[object, ...]:
    dtype, kv_dtype, dims, window, soft_cap = settings
    return dtype != "float16", kv_dtype != dtype, dims, window, soft_cap
