"""What FlashAttention 3 of sgl_kernel computes right, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fakes.contract.check import dense, requests
from fakes.contract.paged_fa import RELEASE, attend, both, module, page_table, place, running_sum, worst
from fakes.contract.rule import RIGHT, Lab, Observation, Rule, Verdict, judge, value

MEASURED = "one NVIDIA H200, sglang-kernel 0.4.6, torch 2.11.0+cu130, against a float64 oracle"


def _rule(name: str, cause: str, probe: Callable[[Lab], Observation], verdict: Verdict = RIGHT) -> Rule:
    return Rule(f"sgl_kernel.fa.{name}", "sgl_kernel", cause, {RELEASE: verdict}, MEASURED, probe)


def _page_sizes(lab: Lab) -> Observation:
    cases = (requests([70, 33, 16], [5, 1, 2], page_size=p) for p in (1, 3, 4, 16, 64, 128, 256))
    return worst(*(both(attend(lab, r), r.expected(causal=True)) for r in cases))


def _head_dims(lab: Lab) -> Observation:
    cases = [requests([40, 17], [3, 1], dim=dim) for dim in (64, 72, 80, 96, 128, 192, 256)]
    wide = cases[5]
    narrow = replace(wide, v_cache=wide.v_cache[..., :128].contiguous(), v=[v[..., :128] for v in wide.v])
    cases[5] = narrow
    return worst(*(both(attend(lab, r), r.expected(causal=True)) for r in cases))


def _groups(lab: Lab) -> Observation:
    counts = ((28, 4), (5, 1), (7, 1), (14, 2), (8, 8))
    cases = (requests([40, 17], [3, 1], heads=heads, dim=64) for heads in counts)
    return worst(*(both(attend(lab, r), r.expected(causal=True)) for r in cases))


def _dtypes(lab: Lab) -> Observation:
    half = requests([40, 17], [3, 1], dtype=torch.float16)
    brain = requests([40, 17], [3, 1])
    return worst(
        both(attend(lab, half), half.expected(causal=True), 1e-3),
        both(attend(lab, brain), brain.expected(causal=True)),
    )


def _splits(lab: Lab) -> Observation:
    r = requests([3000, 16, 0])
    expected = r.expected(causal=True)
    return worst(*(both(attend(lab, r, num_splits=n), expected) for n in (0, 1, 2, 4, 8, 32)))


def _soft_cap(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    return both(attend(lab, r, softcap=1.0), r.expected(causal=True, soft_cap=1.0))


def _windows(lab: Lab) -> Observation:
    r = requests([70, 33, 5], [5, 1, 3])
    seen = [
        both(attend(lab, r, window_size=(w, 0)), r.expected(causal=True, window_left=w))
        for w in (0, 4, 16, 40)
    ]
    open_right = attend(lab, r, window_size=(7, -1), causal=False)
    return worst(*seen, both(open_right, r.expected(window_left=7)))


def _lse(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    _, lse = attend(lab, r)
    if lse.dtype != torch.float32:
        return Observation("wrong", f"LSE is {lse.dtype}")
    return judge(lse, r.expected(causal=True)[1], 1e-5)  # transposed by `attend`: heads come first


def _empty_rows(lab: Lab) -> Observation:
    r = requests([0, 2, 17], [1, 5, 1])
    return both(attend(lab, r), r.expected(causal=True))


def _poison(lab: Lab) -> Observation:
    seen: list[Observation] = []
    for page_size in (1, 3, 4, 16, 64, 128, 256):
        for poison in (torch.nan, torch.inf):
            r = requests([70, 33, 16], [5, 1, 2], page_size=page_size, poison=poison)
            seen.append(both(attend(lab, r), r.expected(causal=True)))
    return worst(*seen)


def _padding(lab: Lab) -> Observation:
    r = requests([40, 3, 17], [3, 1, 1])
    expected = r.expected(causal=True)
    tables = (page_table(r, padding=padding) for padding in (-1, 10**6))
    return worst(*(both(attend(lab, r, page_table=table), expected) for table in tables))


def _strides(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    fused = torch.cat([r.q, torch.full_like(r.q, torch.nan)], dim=1)
    q = place(lab, fused)[:, : r.q.shape[1]]
    stacked = place(lab, torch.stack([r.k_cache, r.v_cache], dim=1))
    return both(attend(lab, r, q=q, k_cache=stacked[:, 0], v_cache=stacked[:, 1]), r.expected(causal=True))


def _max_seqlen_q(lab: Lab) -> Observation:
    r = requests([40, 17], [5, 1])
    expected = r.expected(causal=True)
    return worst(*(both(attend(lab, r, max_seqlen_q=told), expected) for told in (1, 64)))


def _int_length(lab: Lab) -> Observation:
    r = requests([20, 20])
    return both(attend(lab, r, cache_seqlens=20), r.expected(causal=True))


def _surplus_rows(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    surplus = torch.cat([r.q, r.q])
    out, _ = attend(lab, r, q=surplus)
    if len(out) != len(surplus):
        return Observation("wrong", f"{len(out)} rows for {len(surplus)}")
    return judge(out[: len(r.q)], r.expected(causal=True)[0])


def _sinks(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    out, _ = attend(lab, r, sinks=torch.ones(r.q.shape[1], dtype=torch.bfloat16))
    plain = judge(out, r.expected(causal=True)[0], 1e-2)
    return Observation("value", "changed" if plain.kind == "wrong" else "unchanged")


def _fp8(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1])
    small = torch.float8_e4m3fn
    batch_heads = (len(r.kv_lens), r.k_cache.shape[2])
    out, _ = attend(
        lab,
        r,
        q=r.q.to(small),
        k_cache=r.k_cache.to(small),
        v_cache=r.v_cache.to(small),
        k_descale=torch.full(batch_heads, 0.5),
        v_descale=torch.full(batch_heads, 2.0),
    )
    if out.dtype != torch.bfloat16:
        return Observation("wrong", f"out is {out.dtype}")
    stored = replace(
        r,
        q=r.q.to(small).to(torch.float64),
        k=[k.to(small).to(torch.float64) * 0.5 for k in r.k],
        v=[v.to(small).to(torch.float64) * 2.0 for v in r.v],
    )
    return judge(out, stored.expected(causal=True)[0], 0.1)  # the kernel rounds its weights to fp8 as well


def _append(lab: Lab) -> Observation:
    r = requests([40, 18], [2, 2])
    k_cache, v_cache = place(lab, r.k_cache.clone()), place(lab, r.v_cache.clone())
    for pages, length in zip(r.pages, r.kv_lens, strict=True):
        for position in (length - 2, length - 1):
            at = pages[position // r.page_size], position % r.page_size
            k_cache[at] = 0.0
            v_cache[at] = 0.0
    out, _ = attend(
        lab,
        r,
        q=r.q.unflatten(0, (2, 2)),
        k_cache=k_cache,
        v_cache=v_cache,
        k=torch.stack([k[-2:] for k in r.k]),
        v=torch.stack([v[-2:] for v in r.v]),
        cache_seqlens=torch.tensor([38, 16], dtype=torch.int32),
        cu_seqlens_q=None,
        max_seqlen_q=None,
    )
    if not torch.equal(k_cache.cpu(), r.k_cache) or not torch.equal(v_cache.cpu(), r.v_cache):
        return Observation("wrong", "the pool is not what it was with the new keys in it")
    return judge(out.flatten(0, 1), r.expected(causal=True)[0])


def _varlen(lab: Lab) -> Observation:
    r = requests([40, 17, 0], [3, 1, 1])
    given = {
        "q": r.q,
        "k": torch.cat(r.k),
        "v": torch.cat(r.v),
        "cu_seqlens_q": running_sum(r.qo_lens),
        "cu_seqlens_k": running_sum(r.kv_lens),
        "max_seqlen_q": 3,
        "max_seqlen_k": 40,
        "causal": True,
        "return_softmax_lse": True,
    }
    function = module(lab, "flash_attn").flash_attn_varlen_func
    out, lse, *_ = function(**{name: place(lab, argument) for name, argument in given.items()})
    return both((out.cpu(), lse.cpu().T), r.expected(causal=True))


def _merge(lab: Lab) -> Observation:
    r = requests([40], [3])
    parts = [dense(r.q, r.k[0][part], r.v[0][part]) for part in (slice(0, 25), slice(25, 40))]
    states = [
        place(lab, t)
        for out, lse in parts
        for t in (out.to(torch.bfloat16).contiguous(), lse.to(torch.float32))
    ]
    out, lse = module(lab, "attention").merge_state_v2(*states)
    return both((out.cpu(), lse.cpu()), r.expected())


def _merge_empty(lab: Lab) -> Observation:
    nothing = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.full((1, 2), -torch.inf)
    out, lse = module(lab, "attention").merge_state_v2(*(place(lab, t) for t in (*nothing, *nothing)))
    answers = {bool(out.isnan().all()), bool(lse.isnan().all())}
    return Observation("value", "NaN" if answers == {True} else "not NaN")


RULES = (
    _rule("page_sizes", "Pages of any size are gathered through the table.", _page_sizes),
    _rule("head_dims", "Head dims are padded to the next built size; 192 takes values of 128.", _head_dims),
    _rule("groups", "Query head h reads KV head h // group size, for any group size.", _groups),
    _rule("dtypes", "fp16 and bf16 accumulate in float32 and round once.", _dtypes),
    _rule("splits", "Splits over keys are merged; one without keys weighs nothing.", _splits),
    _rule("soft_cap", "Scores are capped after scaling.", _soft_cap),
    _rule("windows", "A window counts keys beside the row's own, which is always visible.", _windows),
    _rule("lse", "LSE is a natural logarithm in float32, heads before rows.", _lse),
    _rule("empty_rows", "A row that sees no key keeps a sum of 0: output 0, LSE -inf.", _empty_rows),
    _rule("poison", "Slots behind a request's length are masked before their values are used.", _poison),
    _rule("table_padding", "Only as many table columns are read as the length takes pages.", _padding),
    _rule("strides", "Strides of q, pages and heads are honoured.", _strides),
    _rule(
        "max_seqlen_q", "Tiles come from cu_seqlens_q; the maximum only simplifies the mask.", _max_seqlen_q
    ),
    _rule("int_length", "An int length stands for a tensor of as many entries as q has rows.", _int_length),
    _rule("surplus_rows", "Rows behind cu_seqlens_q[-1] belong to no request.", _surplus_rows),
    _rule("sinks", "A sink takes weight from every key.", _sinks, value("changed")),
    _rule("fp8", "Fp8 is descaled per request and KV head; the output is bf16.", _fp8),
    _rule("append", "New keys are written behind the cached ones before attention reads them.", _append),
    _rule("varlen", "Ragged keys need no pages; the rest is the same.", _varlen),
    _rule("merge", "States are weighed by exp(LSE): base e.", _merge),
    _rule("merge_empty", "The weights of two empty states are 0 / 0.", _merge_empty, value("NaN")),
)
