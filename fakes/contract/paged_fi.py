"""What FlashInfer's probes share: sound arguments, and one call of any of its four paged kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from fakes.contract.check import Requests
from fakes.contract.rule import Lab, Observation, Rule, Verdict, judge

Kernel = Literal["cuda_core", "tensor_core", "fa2", "fa3"]

DECODE: tuple[Kernel, ...] = ("cuda_core", "tensor_core")
PREFILL: tuple[Kernel, ...] = ("fa2", "fa3")
KERNELS: tuple[Kernel, ...] = DECODE + PREFILL

OLD, NEW = "0.6.6", "0.7.4"
MEASURED = "one NVIDIA H200, flashinfer-python 0.6.6 and 0.7.4, torch 2.11.0+cu130, float64 oracle"
LN2 = 0.6931471805599453
WORKSPACE = 16 * 1024 * 1024

Pair = tuple[torch.Tensor, torch.Tensor]


def rule(
    name: str,
    cause: str,
    probe: Any,
    old: Verdict,
    new: Verdict | None = None,
    *,
    device: Literal["light", "full", "gpu"] = "light",
    finding: str | None = None,
    evidence: str = MEASURED,
) -> Rule:
    """A rule about both releases; without `new` they do the same."""
    verdicts = {OLD: old, NEW: new or old}
    return Rule(f"flashinfer.{name}", "flashinfer", cause, verdicts, evidence, probe, device, finding)


def ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def running_sum(lens: Iterable[int]) -> list[int]:
    total = [0]
    for n in lens:
        total.append(total[-1] + n)
    return total


def arrays(r: Requests) -> dict[str, torch.Tensor]:
    """Sound index arrays for a batch, on the CPU."""
    pages = [len(p) for p in r.pages]
    return {
        "qo_indptr": ints(running_sum(r.qo_lens)),
        "indptr": ints(running_sum(pages)),
        "indices": ints(page for p in r.pages for page in p),
        "last_page_len": ints(
            n - (count - 1) * r.page_size if count else 0 for n, count in zip(r.kv_lens, pages, strict=True)
        ),
    }


def workspace(lab: Lab, size: int = WORKSPACE) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=lab.device)


def make(lab: Lab, kernel: Kernel, layout: str = "NHD", **options: Any) -> Any:
    """A wrapper that runs this kernel."""
    space = options.pop("workspace", None)
    space = workspace(lab) if space is None else space
    if kernel in PREFILL:
        return lab.library.BatchPrefillWithPagedKVCacheWrapper(space, layout, backend=kernel, **options)
    tensor_cores = kernel == "tensor_core"
    return lab.library.BatchDecodeWithPagedKVCacheWrapper(
        space, layout, use_tensor_cores=tensor_cores, **options
    )


def plan(
    lab: Lab,
    wrapper: Any,
    kernel: Kernel,
    r: Requests,
    *,
    host: bool = False,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Plan a batch. `given` replaces index arrays; `host` leaves them on the CPU; options go to `plan`."""
    index = arrays(r) | (given or {})
    if not host:
        index = {name: t.to(lab.device) if isinstance(t, torch.Tensor) else t for name, t in index.items()}
    heads = options.pop("heads", (r.q.shape[1], r.k_cache.shape[2]))
    page_size = options.pop("page_size", r.page_size)
    if not options.pop("no_dtypes", False):
        options = {"q_data_type": r.q.dtype, "kv_data_type": r.k_cache.dtype} | options
    extra = {k: v for k, v in index.items() if k not in ("qo_indptr", "indptr", "indices", "last_page_len")}
    if kernel in PREFILL:
        options.setdefault("causal", True)
        wrapper.plan(
            index["qo_indptr"],
            index["indptr"],
            index["indices"],
            index["last_page_len"],
            *heads,
            r.q.shape[2],
            page_size,
            **extra,
            **options,
        )
    else:
        options.pop("causal", None)
        wrapper.plan(
            index["indptr"],
            index["indices"],
            index["last_page_len"],
            *heads,
            r.q.shape[2],
            page_size,
            **extra,
            **options,
        )


def caches(lab: Lab, r: Requests, layout: str = "NHD") -> Pair:
    k, v = r.k_cache, r.v_cache
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return k.to(lab.device), v.to(lab.device)


def attend(
    lab: Lab,
    kernel: Kernel,
    r: Requests,
    *,
    layout: str = "NHD",
    run: dict[str, Any] | None = None,
    **planning: Any,
) -> Pair:
    """A whole call, on the CPU afterwards: out, and LSE in nats (taken as base 2)."""
    wrapper = make(lab, kernel, layout)
    plan(lab, wrapper, kernel, r, **planning)
    out, lse = wrapper.run(r.q.to(lab.device), caches(lab, r, layout), return_lse=True, **(run or {}))
    return out.cpu(), lse.cpu().double() * LN2


def both(got: Pair, expected: Pair, limit: float = 5e-3) -> Observation:
    """Output and LSE; the worse of the two."""
    return worst(judge(got[0], expected[0], limit), judge(got[1], expected[1], limit))


def worst(*seen: Observation) -> Observation:
    return next((one for one in seen if one.kind != "right"), seen[0])


def causal(kernel: Kernel) -> bool:
    return kernel in PREFILL


def shapes(kernel: Kernel, kv_lens: list[int], qo_lens: list[int]) -> dict[str, Any]:
    """Lengths as this kernel takes them: one row per request in decode."""
    return {"kv_lens": kv_lens, "qo_lens": qo_lens if kernel in PREFILL else [1] * len(kv_lens)}


def bind(probe: Any, *args: Any, **kwargs: Any) -> Any:
    """A probe with everything but the lab given."""
    return lambda lab: probe(lab, *args, **kwargs)
