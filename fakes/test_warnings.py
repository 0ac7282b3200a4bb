"""Numbers that are none come back as such: no fake warns of them, whatever a user makes of warnings (here: errors)."""

from __future__ import annotations

import math

import pytest
import torch

from fakes import flashinfer
from fakes.contract import paged_fa
from fakes.contract.check import requests
from fakes.contract.paged_fi import caches, make, plan
from fakes.contract.rule import Lab
from fakes.sgl_kernel import attention, flash_attn

INFINITE = [math.inf, -math.inf, math.nan, 6.0e4]


@pytest.mark.parametrize("number", INFINITE)
@pytest.mark.parametrize("kernel", ["cuda_core", "tensor_core", "fa2", "fa3"])
def test_attention_of_flashinfer(kernel: str, number: float) -> None:
    lab, r = Lab(flashinfer), requests([20, 5], [1, 1])
    wrapper = make(lab, kernel)  # type: ignore[arg-type]
    plan(lab, wrapper, kernel, r)  # type: ignore[arg-type]
    k, v = caches(lab, r)
    for cache in (k, v):
        cache[r.pages[0][0], 3] = number
    out, _ = wrapper.run(r.q, (k, v), return_lse=True)
    assert not out[0].isfinite().all() or number == 6.0e4
    assert out[1].isfinite().all()


@pytest.mark.parametrize("number", INFINITE)
def test_attention_of_sgl_kernel(number: float) -> None:
    r = requests([20, 5], [3, 2])
    k, v = torch.cat(r.k), torch.cat(r.v)
    k[3], v[3] = number, number
    out = flash_attn.flash_attn_varlen_func(
        r.q,
        k,
        v,
        cu_seqlens_q=paged_fa.running_sum(r.qo_lens),
        cu_seqlens_k=paged_fa.running_sum(r.kv_lens),
        max_seqlen_q=3,
        max_seqlen_k=20,
        causal=True,
    )
    assert isinstance(out, torch.Tensor)
    assert out[3:].isfinite().all()


@pytest.mark.parametrize("number", INFINITE)
@pytest.mark.parametrize("other", [math.inf, -math.inf, 0.0])
def test_merges(number: float, other: float) -> None:
    v, s = torch.ones(2, 1, 64, dtype=torch.float16), torch.full((2, 1), number)
    w, t = v.clone(), torch.full((2, 1), other)
    for merged, lse in (
        flashinfer.merge_state(v, s, w, t),
        attention.merge_state_v2(v, s, w, t),
        flashinfer.merge_states(torch.stack((v, w), dim=1), torch.stack((s, t), dim=1)),
    ):
        assert merged.shape == v.shape
        assert lse.shape == s.shape
