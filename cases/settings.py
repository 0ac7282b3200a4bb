"""The settings of a drawn case: which values each may take, and a byte to pick one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cases.mix import LevelMix, spread
from cases.model import MAX_COUNT
from cases.wanted import Variant, Wanted

_BYTE = 256
_RARE, _OTHERS = 50, 8


class Settings:
    """The settings of a case, one byte each; a setting with one possible value takes no byte.

    Where variants are wanted, the first byte picks one, and each has tables of its own.
    """

    def __init__(self, mix: LevelMix, wanted: Wanted) -> None:
        variants = [_only(wanted, variant) for variant in wanted.variants]
        variants = [one for one in variants if one.phases and one.group_sizes != frozenset()]
        if wanted.variants and not variants:
            raise ValueError("no variant has a phase and a group size that are wanted")
        variants = variants or [wanted]
        tables = [_spread(mix, one) for one in variants]
        names = tables[0].keys()
        self._drawn = [name for name in names if any(not _is_fixed(table[name]) for table in tables)]
        self._fixed = [
            {name: table[name][0] for name in names if name not in self._drawn} for table in tables
        ]
        self._tables = [[table[name] for name in self._drawn] for table in tables]
        self._several = len(tables) > 1

    @property
    def num_bytes(self) -> int:
        return len(self._drawn) + self._several

    def read(self, indices: bytes) -> dict[str, Any]:
        variant = 0
        if self._several:
            variant, indices = indices[0] * len(self._tables) // _BYTE, indices[1:]
        found = dict(self._fixed[variant])
        for name, table, index in zip(self._drawn, self._tables[variant], indices, strict=True):
            found[name] = table[index]
        return found


def _only(wanted: Wanted, variant: Variant) -> Wanted:
    """What is wanted of one variant."""
    groups = wanted.group_sizes
    if variant.group_sizes is not None:
        groups = variant.group_sizes if groups is None else groups & variant.group_sizes
    return replace(
        wanted,
        dtypes=frozenset({variant.dtype}),
        kv_dtypes=frozenset({variant.kv_dtype} - {variant.dtype}),
        head_dims=frozenset({variant.head_dims}),
        group_sizes=groups,
        phases=wanted.phases & variant.phases,
        variants=(variant,),
    )


def _is_fixed(table: Sequence[Any]) -> bool:
    return table[0] == table[-1]


def _spread(mix: LevelMix, wanted: Wanted) -> dict[str, Sequence[Any]]:
    """For each setting 256 values, the simplest first."""
    found: dict[str, Sequence[Any]] = {
        name: spread(table, _BYTE) for name, table in _allowed(mix, wanted).items()
    }
    found["extra"] = found["seed"] = range(_BYTE)
    return found


def _allowed(mix: LevelMix, wanted: Wanted) -> dict[str, list[tuple[Any, int]]]:
    """The mix's tables without what is not wanted; where nothing is left, what is wanted stands in."""
    kernel = wanted.level == "kernel"
    tables: dict[str, list[tuple[Any, int]]] = {
        "later": [(ops, weight) for ops, weight in mix.later if _phases(ops) <= wanted.phases],
        "batch": [
            (kind, weight)
            for kind, weight in mix.batch
            if ("decode" if kind == "decode" else "prefill") in wanted.phases
        ],
        "page_size": _declared(mix.page_size, wanted.page_sizes),
        "heads": _heads(mix, wanted),
        "head_dims": _declared(mix.head_dims, wanted.head_dims),
        "dtype": _among(mix.dtype, wanted.dtypes),
        "kv_dtype": [(d, weight) for d, weight in mix.kv_dtype if d is None or d in wanted.kv_dtypes],
        "kv_scales": list(mix.kv_scales),
        "prefix": list(mix.prefix),
        "placement": list(mix.placement),
        "layout": _among(mix.layout, wanted.layouts),
        "table": list(mix.table),
        "values": list(mix.values),
        "strided": [(flag, weight) for flag, weight in mix.strided if wanted.strided or not flag],
        "sm_scale": list(mix.sm_scale),
        "mask": [
            (kind, weight)
            for kind, weight in mix.mask
            if kind == "causal" or (kernel and (wanted.non_causal if kind == "full" else wanted.custom_mask))
        ],
        "window": [(w, weight) for w, weight in mix.window if wanted.window or w is None],
        "window_layers": list(mix.window_layers)
        if wanted.layer_windows and not wanted.variants
        else [("all", 1)],
        "soft_cap": [(c, weight) for c, weight in mix.soft_cap if wanted.soft_cap or c is None],
    }
    for variant in wanted.variants:  # at most one
        if variant.kv_dtype != variant.dtype:
            tables["kv_dtype"] = [(variant.kv_dtype, 1)]
        for name, chosen in (("window", variant.window), ("soft_cap", variant.soft_cap)):
            tables[name] = [(x, weight) for x, weight in tables[name] if (x is not None) == chosen]
        if variant.window:
            tables["mask"] = [(kind, weight) for kind, weight in tables["mask"] if kind != "custom"]
    if tables["kv_dtype"] == [(None, tables["kv_dtype"][0][1])]:
        tables["kv_scales"] = [((1.0, 1.0), 1)]
    empty = [name for name, table in tables.items() if not table]
    if empty:
        raise ValueError(f"no {empty[0]} of the mix is wanted")
    return tables


def _among(table: Sequence[tuple[Any, int]], wanted: frozenset[Any] | None) -> list[tuple[Any, int]]:
    if wanted is None:
        return list(table)
    kept = [(value, weight) for value, weight in table if value in wanted]
    return kept or [(value, 1) for value in sorted(wanted)]


def _declared(table: Sequence[tuple[Any, int]], wanted: frozenset[Any] | None) -> list[tuple[Any, int]]:
    """The same, and up to eight values that are wanted beyond the table, each a fiftieth as often as all of it."""
    kept = _among(table, wanted)
    known = {value for value, _ in kept}
    others = sorted(one for one in wanted or () if one not in known and _largest(one) <= MAX_COUNT)
    if not others:
        return kept
    total = sum(weight for _, weight in kept)
    rare = [(one, total) for one in others[:: -(-len(others) // _OTHERS)]]
    return [*((value, weight * _RARE) for value, weight in kept), *rare]


def _largest(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else max(value)


def _heads(mix: LevelMix, wanted: Wanted) -> list[tuple[Any, int]]:
    if wanted.group_sizes is None:
        return list(mix.heads)
    kept = [(h, weight) for h, weight in mix.heads if h[0] // h[1] in wanted.group_sizes]
    return kept or [((group, 1), 1) for group in sorted(wanted.group_sizes)]


def _phases(later: Sequence[str]) -> set[str]:
    return {"decode" if op == "decode" else "prefill" for op in later if op != "again"}
