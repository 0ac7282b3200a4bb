"""`Wanted`: which cases somebody can use. Its fields mean what those of a backend's capabilities mean."""

from __future__ import annotations

from dataclasses import dataclass

from cases.model import Layout, Level, Phase


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A strategy draws no case that needs more than this. The default is the smallest useful engine backend.

    None in `page_sizes`, `head_dims` or `group_sizes` means any; an empty `kv_dtypes` means q's dtype alone.
    """

    level: Level = "engine"
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16", "float32"})
    kv_dtypes: frozenset[str] = frozenset()
    page_sizes: frozenset[int] | None = None
    layouts: frozenset[Layout] = frozenset({"NHD"})
    head_dims: frozenset[tuple[int, int]] | None = None
    group_sizes: frozenset[int] | None = None
    non_causal: bool = False
    window: bool = False
    soft_cap: bool = False
    custom_mask: bool = False
    rows_without_keys: bool = False
    empty_requests: bool = False
    strided: bool = True


ENGINE = Wanted()
KERNEL = Wanted(
    level="kernel",
    kv_dtypes=frozenset({"float8_e4m3fn", "float8_e5m2"}),
    layouts=frozenset({"NHD", "HND"}),
    non_causal=True,
    window=True,
    soft_cap=True,
    custom_mask=True,
    rows_without_keys=True,
    empty_requests=True,
)
"""Everything that a case of this level can ask for."""
