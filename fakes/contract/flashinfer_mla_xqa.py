"""Latent attention, and decode by XQA through `trtllm_batch_decode_with_kv_cache`."""

from __future__ import annotations

import torch

from fakes.contract.check import Requests, dense, requests
from fakes.contract.paged_fi import LN2, arrays, bind, both, caches, ints, rule, workspace, worst
from fakes.contract.rule import RIGHT, WRONG, Lab, Observation, judge, refused

HEADS, LATENT, ROPE = 16, 512, 64


def _mla(lab: Lab, backend: str, kv_lens: list[int], qo_lens: list[int], causal: bool) -> Observation:
    r = requests(kv_lens, qo_lens, heads=(HEADS, 1), dim=LATENT + ROPE)
    wrapper = lab.library.mla.BatchMLAPagedAttentionWrapper(
        workspace(lab, 128 * 1024 * 1024), backend=backend
    )
    index = {name: t.to(lab.device) for name, t in arrays(r).items()}
    wrapper.plan(
        index["qo_indptr"],
        index["indptr"],
        index["indices"],
        ints(kv_lens).to(lab.device),
        HEADS,
        LATENT,
        ROPE,
        r.page_size,
        causal,
        0.05,
        r.q.dtype,
        r.q.dtype,
    )
    cache = r.k_cache[:, :, 0]
    parts = (r.q[..., :LATENT], r.q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:])
    out, lse = wrapper.run(*(t.contiguous().to(lab.device) for t in parts), return_lse=True)
    expected = [
        dense(r.q[r.rows(i)], r.k[i], r.k[i][..., :LATENT], causal=causal, scale=0.05)
        for i in range(len(kv_lens))
    ]
    whole = torch.cat([o for o, _ in expected]), torch.cat([s for _, s in expected])
    return both((out, lse.cpu().double() * LN2), whole)


def _mla_batches(lab: Lab, backend: str) -> Observation:
    return worst(
        _mla(lab, backend, [40, 17, 5], [1, 1, 1], causal=False),
        _mla(lab, backend, [40, 17], [3, 2], causal=True),
    )


def _xqa(lab: Lab, r: Requests, fill: int = 0) -> Observation:
    width = max(len(p) for p in r.pages)
    table = torch.stack([ints([*p, *[0] * (width - len(p))]) for p in r.pages])
    space = torch.full((32 * 1024 * 1024,), fill, dtype=torch.uint8, device=lab.device)
    out = lab.library.decode.trtllm_batch_decode_with_kv_cache(
        r.q.to(lab.device),
        caches(lab, r),
        space,
        table.to(lab.device),
        ints(r.kv_lens).to(lab.device),
        max(r.kv_lens),
        r.q.shape[-1] ** -0.5,
        1.0,
        kv_layout="NHD",
    )
    return judge(out, r.expected()[0])


def _xqa_page(lab: Lab, page_size: int) -> Observation:
    return _xqa(lab, requests([70, 33, 16], page_size=page_size))


def _xqa_workspace(lab: Lab, fill: int) -> Observation:
    return _xqa(lab, requests([8192]), fill)


RULES = (
    *(
        rule(
            f"mla.{backend}",
            "Latent attention over paged ckv and kpe caches; LSE base 2.",
            bind(_mla_batches, backend),
            RIGHT,
        )
        for backend in ("fa2", "fa3")
    ),
    *(
        rule(f"xqa-page-{size}", "XQA is compiled for these page sizes.", bind(_xqa_page, size), RIGHT)
        for size in (16, 32, 64)
    ),
    *(
        rule(
            f"xqa-page-{size}",
            "XQA is compiled for other page sizes only.",
            bind(_xqa_page, size),
            refused("ValueError", "only 16, 32, 64, 128 are supported"),
        )
        for size in (1, 8)
    ),
    rule(
        "xqa-workspace",
        "A long request is shared by blocks that meet through semaphores.",
        bind(_xqa_workspace, 0),
        RIGHT,
    ),
    rule(
        "xqa-workspace-dirty",
        "Semaphores that do not start at 0 hide the last block from itself.",
        bind(_xqa_workspace, 0xFF),
        WRONG,
        finding="fi.semaphores",
    ),
)
