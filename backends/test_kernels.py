"""Kernel adapters on the fakes: what each declares equals dense attention, LSE too, and no rule is broken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from backends import libraries
from backends.contract import Attention, EngineContext, KernelCall
from backends.registry import BUILT_IN, resolve
from backends.test_support import small_engine
from cases.model import Layout
from fakes import cuda, releases
from fakes.cuda.claims import real_gpu
from fakes.recorder import recording

pytestmark = pytest.mark.skipif(real_gpu(), reason="the simulated device stands aside for a real GPU")

ADAPTERS = [name for name in BUILT_IN if name.startswith("kernel:")]
MERGES = [name for name in ADAPTERS if name.endswith("-merge")]
ATTENDS = [name for name in ADAPTERS if name not in MERGES]
PAGE_SIZE = 4


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    """The simulated device, and a record in which no rule of a library may be broken."""
    libraries.use("fake", ["flashinfer", "sgl_kernel"])
    with cuda.simulated_cuda(), recording("strict") as recorder:
        yield
    assert not recorder.findings


def declares(name: str, **needed: object) -> bool:
    caps = resolve(name).capabilities
    return all(
        value in getattr(caps, field)
        if isinstance(getattr(caps, field), frozenset)
        else getattr(caps, field) == value
        for field, value in needed.items()
    )


def offering(**needed: object) -> list[str]:
    """Adapters that attend and declare all of this."""
    return [name for name in ATTENDS if declares(name, **needed)]


def engine_of(layout: Layout = "NHD", heads: tuple[int, int] = (4, 2), head_dim: int = 64) -> EngineContext:
    table = torch.zeros(1, 32, dtype=torch.int32).to("cuda")
    return small_engine(
        table,
        page_size=PAGE_SIZE,
        layout=layout,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )


def paged(rows: torch.Tensor, slots: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rows `[tokens, heads, dim]` put at `slots` of an NHD or HND cache; every other slot is NaN."""
    cache = torch.full((64 * PAGE_SIZE, *rows.shape[1:]), float("nan"))
    cache[slots] = rows
    cache = cache.unflatten(0, (64, PAGE_SIZE))
    return cache if layout == "NHD" else cache.transpose(1, 2).contiguous()


def call_of(
    engine: EngineContext,
    qo_lens: list[int],
    kv_lens: list[int],
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    custom: bool = False,
) -> KernelCall:
    generator = torch.Generator().manual_seed(7)
    dim = engine.head_dim_qk
    q = torch.randn(sum(qo_lens), engine.num_qo_heads, dim, generator=generator)
    k, v = (torch.randn(sum(kv_lens), engine.num_kv_heads, dim, generator=generator) for _ in range(2))
    free = iter(torch.randperm(64, generator=generator).tolist())
    pages = [[next(free) for _ in range(-(-n // PAGE_SIZE))] for n in kv_lens]
    slots = [
        [p * PAGE_SIZE + o for p in of for o in range(PAGE_SIZE)][:n]
        for of, n in zip(pages, kv_lens, strict=True)
    ]
    flat = torch.tensor([slot for of in slots for slot in of], dtype=torch.int64)
    shapes = zip(qo_lens, kv_lens, strict=True)
    masks = [torch.rand(shape, generator=generator) < 0.7 for shape in shapes] if custom else None
    return KernelCall(
        q=q.to("cuda"),
        k_cache=paged(k, flat, engine.layout).to("cuda"),
        v_cache=paged(v, flat, engine.layout).to("cuda"),
        k=k.to("cuda"),
        v=v.to("cuda"),
        states=[],
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        pages=pages,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        custom_mask=None if masks is None else [mask.to("cuda") for mask in masks],
        scale=dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
    )


def dense(call: KernelCall, keys: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention, LSE in natural log; `keys` (bool over all keys) keeps some of them only."""
    q, k, v = (
        call.q.cpu().double(),
        call.k.cpu().double() * call.k_scale,
        call.v.cpu().double() * call.v_scale,
    )
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    parts, q_at, k_at = [], 0, 0
    for i, (m, n) in enumerate(zip(call.qo_lens, call.kv_lens, strict=True)):
        back = (torch.arange(m)[:, None] + n - m) - torch.arange(n)  # how far the key lies behind the query
        seen = torch.ones(m, n, dtype=torch.bool)
        if call.custom_mask is not None:
            seen = call.custom_mask[i].cpu()
        elif call.causal:
            seen &= back >= 0
        if call.window is not None:
            seen &= back < call.window
        if keys is not None:
            seen = seen & keys[k_at : k_at + n]
        scores = torch.einsum("qhd,khd->qhk", q[q_at : q_at + m], k[k_at : k_at + n]) * call.scale
        if call.soft_cap:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        parts.append((torch.einsum("qhk,khd->qhd", weights, v[k_at : k_at + n]), scores.logsumexp(-1)))
        q_at, k_at = q_at + m, k_at + n
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def check(name: str, answer: Attention, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    caps = resolve(name).capabilities
    assert answer.lse is not None
    out, lse = answer.out.cpu().double(), answer.lse.cpu().double()
    assert out.shape == expected[0].shape
    assert lse.shape == expected[1].shape
    assert answer.lse.dtype == torch.float32
    assert ((out - expected[0]).abs() < 2e-6).all()
    empty = expected[1].isneginf()
    assert (lse[empty] == -math.inf if caps.empty_lse == "-inf" else lse[empty] < -1000).all()
    natural = lse * (math.log(2) if caps.lse == "2" else 1.0)
    assert ((natural - expected[1])[~empty].abs() < 1e-5).all()


def ask(name: str, engine: EngineContext, call: KernelCall) -> Attention:
    answer = resolve(name).factory(engine).attend(call)
    assert isinstance(answer, Attention)
    return answer


def lens_for(name: str) -> tuple[list[int], list[int]]:
    """Lengths around a page; one row per request where an adapter only decodes."""
    kv_lens = [1, 4, 5, 8, 11]
    return ([1, 2, 5, 4, 3] if declares(name, phases="prefill") else [1] * 5), kv_lens


@pytest.mark.parametrize("name", ATTENDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (8, 2), (5, 1)])
def test_causal_attention(name: str, heads: tuple[int, int]) -> None:
    engine = engine_of(heads=heads)
    call = call_of(engine, *lens_for(name))
    check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", ATTENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims(name: str, head_dim: int) -> None:
    engine = engine_of(head_dim=head_dim)
    call = call_of(engine, *lens_for(name))
    check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", offering(window=True, soft_cap=True, non_causal=True))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (4, None), (None, 1.0), (3, 20.0)])
def test_masks(name: str, causal: bool, window: int | None, soft_cap: float | None) -> None:
    engine = engine_of()
    call = call_of(engine, *lens_for(name), causal=causal, window=window, soft_cap=soft_cap)
    check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", offering(custom_mask=True))
def test_custom_mask(name: str) -> None:
    engine = engine_of()
    adapter = resolve(name).factory(engine)
    for qo_lens, kv_lens in ([2, 3], [5, 7]), ([2, 0, 3, 2], [5, 6, 0, 3]):
        call = call_of(engine, qo_lens, kv_lens, causal=False, custom=True)
        check(name, adapter.attend(call), dense(call))
        plain = call_of(engine, qo_lens, kv_lens, causal=False)
        check(name, adapter.attend(plain), dense(plain))


@pytest.mark.parametrize("name", offering(rows_without_keys=True))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_keys(name: str, causal: bool) -> None:
    engine = engine_of()
    qo_lens = [5, 2, 3] if declares(name, phases="prefill") else [1, 1, 1]
    call = call_of(engine, qo_lens, [2, 0, 5], causal=causal)
    # 0.6.6 gives such rows no zeros in fa3: backends/waivers
    with releases.select(flashinfer="0.7.4") if name.endswith("fa3") else nullcontext():
        check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", offering(empty_requests=True))
def test_empty_requests(name: str) -> None:
    engine = engine_of()
    call = call_of(engine, [0, 2, 0, 1, 0], [3, 4, 0, 5, 1])
    check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", offering(layouts="HND"))
def test_heads_first_layout(name: str) -> None:
    engine = engine_of("HND")
    call = call_of(engine, *lens_for(name))
    check(name, ask(name, engine, call), dense(call))


@pytest.mark.parametrize("name", offering(strided=True))
def test_strided_inputs(name: str) -> None:
    engine = engine_of()
    call = call_of(engine, *lens_for(name))
    q = torch.cat([call.q, call.q], dim=1)[:, : engine.num_qo_heads]
    k, v = torch.cat([call.k, call.v], dim=1).split(engine.num_kv_heads, dim=1)
    assert not k.is_contiguous()
    strided = replace(call, q=q, k=k, v=v)
    check(name, ask(name, engine, strided), dense(call))


@pytest.mark.parametrize("name", offering(kv_dtypes="float8_e4m3fn"))
@pytest.mark.parametrize("heads", [(4, 2), (8, 2)])
def test_fp8_cache_is_dequantised(name: str, heads: tuple[int, int]) -> None:
    engine = engine_of(heads=heads)
    call = call_of(engine, *lens_for(name))
    small = {
        field: getattr(call, field).to(torch.float8_e4m3fn) for field in ("k", "v", "k_cache", "v_cache")
    }
    call = replace(call, **small, k_scale=0.5, v_scale=2.0)
    as_read = replace(call, k=call.k.float(), v=call.v.float())
    check(name, ask(name, engine, call), dense(as_read))


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_merge_of_disjoint_keys(name: str, parts: int) -> None:
    engine = engine_of()
    call = call_of(engine, [1, 2, 5, 0, 3], [1, 4, 5, 8, 11])
    owner = torch.arange(sum(call.kv_lens)).flip(0) % parts  # the first part of a row is often empty
    base = math.log(2) if declares(name, lse="2") else 1.0
    states = [dense(call, owner == part) for part in range(parts)]
    given = [(out.float().to("cuda"), (lse / base).float().to("cuda")) for out, lse in states]
    check(name, ask(name, engine, replace(call, states=given)), dense(call))
