"""What is right: the float64 oracle, masks by definition, merging, and how far a result may be from it."""

from reference.attention import paged_attention
from reference.budget import (
    Budget,
    Excess,
    error_budget,
    exact_tolerance,
    exceeds,
    fast_tanh_error,
    lse_budget,
    surely_within,
    widest,
)
from reference.masks import visible
from reference.state import AttentionState
from reference.twin import low_precision

__all__ = [
    "AttentionState",
    "Budget",
    "Excess",
    "error_budget",
    "exact_tolerance",
    "exceeds",
    "fast_tanh_error",
    "low_precision",
    "lse_budget",
    "paged_attention",
    "surely_within",
    "visible",
    "widest",
]
