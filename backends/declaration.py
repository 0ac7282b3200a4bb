"""Whether what a backend class declares means something: a misspelt dtype would be a promise that nobody tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from backends.contract import Capabilities
from backends.libraries import DISTRIBUTIONS
from cases.model import MAX_COUNT, DType, KVDType, Layout, Phase
from cases.wanted import Variant


@dataclass(frozen=True)
class _Rule:
    """What one field may be. `many`: a frozenset of such values, and `least` of them; `optional`: or None."""

    holds: Callable[[Any], bool]
    expected: str
    many: bool = False
    least: int = 0
    optional: bool = False

    def broken(self, value: Any) -> str | None:
        """What follows the name of the field, where its value is none that it may have."""
        if value is None and self.optional:
            return None
        if not self.many:
            return None if self.holds(value) else f"is {_shown(value)}, expected {self.expected}"
        instead = " or None" if self.optional else ""
        if not isinstance(value, frozenset):
            return f"is {_shown(value)}, expected a frozenset of {self.expected}{instead}"
        if len(value) < self.least:
            return f"is empty, expected a frozenset of at least one of {self.expected}{instead}"
        wrong = sorted((item for item in value if not self.holds(item)), key=repr)
        return (
            f"holds {_shown(wrong[0])}, expected a frozenset of {self.expected}{instead}" if wrong else None
        )


def undeclarable(capabilities: Capabilities) -> str | None:
    """The first field that has a value which it may not have, and what it may be; None: there is none."""
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        broken = _RULES.get(field.name, _BOOL).broken(value)
        if broken is not None:
            return f"{field.name} {broken}"
    for variant in capabilities.variants:
        for name, rule in _VARIANT_RULES.items():
            broken = rule.broken(getattr(variant, name))
            if broken is not None:
                return f"variants: {name} {broken}"
    return None


def without_any(capabilities: Capabilities) -> str | None:
    """The first field of a hybrid's declaration in which its parts have nothing in common."""
    return next((name for name, rule in _RULES.items() if rule.least and _is_empty(capabilities, name)), None)


def _is_empty(capabilities: Capabilities, name: str) -> bool:
    value = getattr(capabilities, name)
    return value is not None and not value


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_count(value: Any) -> bool:
    return _is_int(value, 1) and value <= MAX_COUNT


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_count, value))


def _one_of(*allowed: str | None, **options: Any) -> _Rule:
    *most, last = map(repr, allowed)
    expected = f"{', '.join(most)} or {last}"
    return _Rule(lambda value: isinstance(value, str | None) and value in allowed, expected, **options)


def _shown(value: object) -> str:
    """In one line that is not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


_LIMITS = f"from 1 to {MAX_COUNT}"
_BOOL = _Rule(lambda value: isinstance(value, bool), "True or False")
_COUNTS = _Rule(_is_count, f"ints {_LIMITS}", many=True, least=1, optional=True)
_RULES = {
    "level": _one_of("engine", "kernel"),
    "phases": _one_of(*get_args(Phase), many=True, least=1),
    "library": _one_of(*DISTRIBUTIONS, many=True),
    "dtypes": _one_of(*get_args(DType), many=True, least=1),
    "kv_dtypes": _one_of(*(name for name in get_args(KVDType) if name not in get_args(DType)), many=True),
    "page_sizes": _COUNTS,
    "layouts": _one_of(*get_args(Layout), many=True, least=1),
    "head_dims": _Rule(_is_pair, f"pairs (qk, vo) of ints {_LIMITS}", many=True, least=1, optional=True),
    "group_sizes": _COUNTS,
    "lse": _one_of(None, "e", "2"),
    "empty_lse": _one_of("-inf", "sentinel"),
    "variants": _Rule(
        lambda value: isinstance(value, tuple) and all(isinstance(item, Variant) for item in value),
        "a tuple of cases.wanted.Variant",
    ),
    "host_reads": _Rule(
        lambda value: value is None or value == "auto" or _is_int(value, 0),
        "an int from 0 on, None or 'auto'",
    ),
}
"""By field; the other fields are bools."""
_VARIANT_RULES = {
    "dtype": _one_of(*get_args(DType)),
    "kv_dtype": _one_of(*get_args(KVDType)),
    "head_dims": _Rule(_is_pair, f"a pair (qk, vo) of ints {_LIMITS}"),
    "window": _BOOL,
    "soft_cap": _BOOL,
    "group_sizes": _COUNTS,
    "phases": _RULES["phases"],
}
