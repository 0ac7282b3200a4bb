"""`Wanted`: which cases somebody can use. Its fields mean what those of a backend's capabilities mean."""

from __future__ import annotations

from dataclasses import dataclass

from cases.model import Case, Layout, Level, Phase


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings that hold together in one case: those of one compiled kernel, or of several that it takes.

    Args:
        kv_dtype: of the KV cache; q's own or an fp8 type.
        window, soft_cap: whether there is one.
        group_sizes: query heads per KV head; None: any.
        phases: of all its steps.
    """

    dtype: str = "float16"
    kv_dtype: str = "float16"
    head_dims: tuple[int, int] = (64, 64)
    window: bool = False
    soft_cap: bool = False
    group_sizes: frozenset[int] | None = None
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})

    def holds(self, case: Case) -> bool:
        """Whether a case has these settings."""
        heads, mask = case.heads, case.mask
        return (
            (case.dtype, case.cache_dtype) == (self.dtype, self.kv_dtype)
            and (heads.head_dim_qk, heads.head_dim_vo) == self.head_dims
            and (mask.window is not None, mask.soft_cap is not None) == (self.window, self.soft_cap)
            and (self.group_sizes is None or heads.group_size in self.group_sizes)
            and all(step.phase in self.phases for step in case.steps)
        )


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
    layer_windows: bool = False
    soft_cap: bool = False
    custom_mask: bool = False
    rows_without_keys: bool = False
    empty_requests: bool = False
    strided: bool = True
    variants: tuple[Variant, ...] = ()
    """Where there are any, every case has the settings of one of them."""


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
