"""The low-precision twin: attention computed as a 16-bit kernel computes it, to learn how much such a kernel may err.

What FlashAttention and FlashInfer have in common: products of 16-bit numbers summed in float32, softmax in float32,
P rounded to the input dtype *before* it is normalised, P @ V summed in float32, the output rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cases.model import Mask
from reference.attention import attend, chunk_bytes_on
from reference.library import Library, library_of
from reference.ragged import Ragged
from reference.state import AttentionState


def low_precision(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor | np.ndarray,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    mask: Mask,
    scale: float,
    dtype: torch.dtype,
    custom: Sequence[torch.Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk_bytes: int | None = None,
) -> AttentionState:
    """`paged_attention` at the precision of `dtype`: the same arguments and meaning.

    Kernels differ in whether they divide by the sum of the exact weights or of the rounded ones. The twin takes what
    errs more: out is divided by the sum of the exact weights, lse is the logarithm of the sum of the rounded ones.

    Returns:
        out in `dtype`, lse in float32.
    """
    batch = Ragged.of(
        q, k_cache, v_cache, slots=slots, qo_lens=qo_lens, kv_lens=kv_lens, mask=mask, custom=custom
    )
    lib = library_of(q.device)

    def round_weights(weights: Any) -> Any:
        return rounded(weights, dtype, lib)

    state = attend(
        q,
        k_cache,
        v_cache,
        batch,
        scales=(scale, k_scale, v_scale),
        compute=torch.float32,
        chunk_bytes=chunk_bytes or chunk_bytes_on(q.device),
        round_weights=None if dtype == torch.float32 else round_weights,
    )
    return state._replace(out=state.out.to(dtype))


def rounded(x: Any, dtype: torch.dtype, lib: Library) -> Any:
    """float32 numbers, each the nearest one that `dtype` holds."""
    return lib.array(lib.tensor(x).to(dtype).to(torch.float32))
