"""Which kernel modules a run compiles: few, but every pair of settings if it can be had.

A greedy covering array: first the simplest module of each kind, which most named cases need, then whatever covers most
pairs that are not covered yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from backends.registry import BackendSpec
from conformance.jit.modules import KINDS, Module, modules_of, use_of, variants_of

DEFAULT_VARIANTS = 12
"""Modules a release: fa3 takes two minutes on 16 cores, and they compete."""

_Pair = tuple[tuple[str, object], tuple[str, object]]


def modules_for(specs: Iterable[BackendSpec], limit: int = DEFAULT_VARIANTS) -> list[Module]:
    """At most `limit` modules for some backends, the simplest first; no fewer than one of each kind that one runs."""
    candidates: set[Module] = set()
    first: set[Module] = set()
    for spec in specs:
        use = use_of(spec.name, spec.capabilities)
        own = [] if use is None else sorted(modules_of(use, spec.capabilities), key=_simplest)
        candidates.update(own)
        first.update({module.kind: module for module in reversed(own)}.values())
    return choose(candidates, first, limit)


def narrowed(spec: BackendSpec, modules: Iterable[Module]) -> BackendSpec:
    """A backend that is asked nothing for which another module would have to be compiled."""
    use = use_of(spec.name, spec.capabilities)
    if use is None:
        return spec
    variants = variants_of(use, spec.capabilities, modules)
    return replace(spec, capabilities=replace(spec.capabilities, variants=variants))


def choose(candidates: Iterable[Module], first: Iterable[Module], limit: int) -> list[Module]:
    """`first`, then others up to `limit` in all, so that most pairs of settings of the candidates are among them."""
    ordered = sorted(candidates, key=_simplest)
    chosen = sorted(first, key=_simplest)
    open_ = {pair for module in ordered for pair in pairs(module)}
    for module in chosen:
        open_ -= pairs(module)
    while len(chosen) < min(limit, len(ordered)):
        rest = [module for module in ordered if module not in chosen]
        best = max(rest, key=lambda module: len(pairs(module) & open_))  # the simplest of equals
        chosen.append(best)
        open_ -= pairs(best)
    return sorted(chosen, key=_simplest)


def pairs(module: Module) -> set[_Pair]:
    """Every pair of settings that a module has, its kind being one. The dtype of KV goes with that of q."""
    if module.kind == "merge":
        return set()
    settings: list[tuple[str, object]] = [
        ("kind", module.kind),
        ("dtype", module.dtype),
        ("cache", module.kv_dtype if module.kv_dtype != module.dtype else "as q"),
        ("dims", (module.head_dim_qk, module.head_dim_vo)),
        ("window", module.window),
        ("soft_cap", module.soft_cap),
    ]
    return set(combinations(settings, 2))


def _simplest(module: Module) -> tuple[object, ...]:
    m = module
    return (
        KINDS.index(m.kind),
        m.dtype != "float16",
        m.kv_dtype != m.dtype,
        m.head_dim_qk,
        m.head_dim_vo,
        m.window,
        m.soft_cap,
    )
