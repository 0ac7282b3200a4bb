"""Index arrays that FlashInfer refuses, and those that it takes without a word."""

from __future__ import annotations

from typing import Any

import torch

from fakes.contract.check import Requests, requests
from fakes.contract.paged_fi import (
    DECODE,
    KERNELS,
    PREFILL,
    Kernel,
    arrays,
    attend,
    bind,
    both,
    causal,
    ints,
    rule,
)
from fakes.contract.rule import RIGHT, UNDEFINED, WRONG, Lab, Observation, crashes, refused

FALLS = refused("RuntimeError", "should be non-negative")
BEHIND = "What lies behind the array in memory decides."
KV_LENS = (48, 20, 9, 45)
QO_LENS = (5, 3, 2, 4)


def _batch(kernel: Kernel, size: int, kv_lens: Any = None) -> Requests:
    lens = list(kv_lens or KV_LENS[:size])
    return requests(lens, list(QO_LENS[: len(lens)]) if kernel in PREFILL else None)


def _given(lab: Lab, kernel: Kernel, size: int, change: Any, **options: Any) -> Observation:
    """A batch of `size` requests planned with arrays that `change` has spoilt."""
    r = _batch(kernel, size)
    sound = arrays(r)
    got = attend(lab, kernel, r, given=change(sound, r), **options)
    return both(got, r.expected(causal=causal(kernel)))


def _tail_zero(a: dict[str, torch.Tensor], r: Requests) -> Any:
    tails = a["last_page_len"].clone()
    tails[0] = 0  # request 0 has 48 tokens: three full pages of 16
    return {"last_page_len": tails}


def _tail_long(a: dict[str, torch.Tensor], r: Requests) -> Any:
    return {"last_page_len": a["last_page_len"] + r.page_size}


def _wide(name: str) -> Any:
    return lambda a, r: {name: a[name].long()}


def _headless(name: str, with_lens: bool = False) -> Any:
    def change(a: dict[str, torch.Tensor], r: Requests) -> Any:
        lens = {"seq_lens": ints(r.kv_lens)} if with_lens else {}
        return {name: a[name][1:].clone()} | lens

    return change


def _shifted(a: dict[str, torch.Tensor], r: Requests) -> Any:
    return {"qo_indptr": a["qo_indptr"] + 1}


def _falling(a: dict[str, torch.Tensor], r: Requests) -> Any:
    indptr = a["indptr"].clone()
    indptr[1], indptr[2] = indptr[2].item(), indptr[1].item()
    return {"indptr": indptr}


def _short(a: dict[str, torch.Tensor], r: Requests) -> Any:
    return {"indices": a["indices"][:-1].clone()}


def _foreign(page: int) -> Any:
    def change(a: dict[str, torch.Tensor], r: Requests) -> Any:
        ids = a["indices"].clone()
        ids[1] = page
        return {"indices": ids}

    return change


def _wrong_lens(a: dict[str, torch.Tensor], r: Requests) -> Any:
    return {"seq_lens": ints(n + 3 for n in r.kv_lens)}


def _per(
    name: str,
    cause: str,
    size: int,
    change: Any,
    kernels: tuple[Kernel, ...],
    old: Any,
    new: Any = None,
    finding: str | None = None,
) -> Any:
    return tuple(
        rule(f"{name}.{kernel}", cause, bind(_given, kernel, size, change), old, new, finding=finding)
        for kernel in kernels
    )


TENSOR: tuple[Kernel, ...] = ("tensor_core", "fa2", "fa3")

RULES = (
    *_per(
        "last-page-0",
        "kv_len is (pages - 1) * page_size + last, whatever last is.",
        3,
        _tail_zero,
        KERNELS,
        WRONG,
        finding="fi.last-page-range",
    ),
    *_per(
        "last-page-above",
        "kv_len is (pages - 1) * page_size + last: keys of the pages that follow are read.",
        3,
        _tail_long,
        (*DECODE, "fa2"),
        WRONG,
        finding="fi.last-page-range",
    ),
    *_per(
        "indptr-int64",
        "CUDA-core decode has no 64-bit variant that compiles.",
        3,
        _wide("indptr"),
        ("cuda_core",),
        refused("RuntimeError"),
    ),
    *_per(
        "indptr-int64",
        "Row offsets and page offsets are read in one width: one of them is reinterpreted.",
        4,
        _wide("indptr"),
        ("tensor_core", "fa2"),
        FALLS,
    ),
    *_per(
        "indices-int64",
        "CUDA-core decode checks the dtype at run.",
        3,
        _wide("indices"),
        ("cuda_core",),
        refused("RuntimeError", "Inconsistency of Tensor type: paged_kv_indices"),
    ),
    *_per(
        "indices-int64",
        "Page ids are read as 32-bit words: every second one is the high half of an id.",
        1,
        _wide("indices"),
        ("tensor_core", "fa2"),
        WRONG,
        finding="fi.int32",
    ),
    *_per(
        "indices-int64-batch",
        "The same for any batch size.",
        4,
        _wide("indices"),
        ("tensor_core", "fa2"),
        WRONG,
        finding="fi.int32",
    ),
    *_per(
        "last-page-int64",
        "CUDA-core decode checks the dtype at run.",
        3,
        _wide("last_page_len"),
        ("cuda_core",),
        refused("RuntimeError", "Inconsistency of Tensor type: paged_kv_last_page_len"),
    ),
    *_per(
        "last-page-int64-1",
        "The low word of the first value is the value.",
        1,
        _wide("last_page_len"),
        TENSOR,
        RIGHT,
        finding="fi.int32",
    ),
    *_per(
        "last-page-int64-2",
        "The second word is the first value's high half, 0.",
        2,
        _wide("last_page_len"),
        TENSOR,
        WRONG,
        finding="fi.int32",
    ),
    *_per(
        "qo-indptr-int64-1",
        "Words [0, 0, a, 0, ...]: the one request has no rows.",
        1,
        _wide("qo_indptr"),
        PREFILL,
        WRONG,
        finding="fi.int32",
    ),
    *_per(
        "qo-indptr-int64-2",
        "Words [0, 0, a, 0, ...]: request 0 has no rows, request 1 has request 0's.",
        2,
        _wide("qo_indptr"),
        PREFILL,
        WRONG,
        finding="fi.int32",
    ),
    *_per(
        "qo-indptr-int64-3",
        "Words [0, 0, a, 0, ...] fall from a to 0.",
        3,
        _wide("qo_indptr"),
        PREFILL,
        FALLS,
    ),
    *_per(
        "indptr-headless-4",
        "Lengths are computed from two arrays whose sizes do not match.",
        4,
        _headless("indptr"),
        KERNELS,
        refused("RuntimeError", "must match"),
    ),
    *_per(
        "indptr-headless-3",
        "Lengths are computed from two arrays whose sizes do not match.",
        3,
        _headless("indptr"),
        KERNELS,
        refused("RuntimeError", "must match"),
    ),
    *_per(
        "indptr-headless-2",
        f"One difference broadcasts over two requests, then the planner reads past the end. {BEHIND}",
        2,
        _headless("indptr"),
        (*DECODE, "fa2"),
        UNDEFINED,
        finding="fi.indptr-length",
    ),
    *_per(
        "indptr-headless-1",
        "There is no length to take the maximum of.",
        1,
        _headless("indptr"),
        ("tensor_core", "fa2"),
        refused("ValueError"),
        refused("RuntimeError", "max"),
    ),
    *_per(
        "indptr-headless-1",
        "The planner reads past the end and divides by what it finds.",
        1,
        _headless("indptr"),
        ("cuda_core",),
        crashes("SIGFPE"),
        refused("RuntimeError", "illegal memory access"),
    ),
    *_per(
        "indptr-headless-lens",
        f"With seq_lens the sizes are never compared. {BEHIND}",
        3,
        _headless("indptr", with_lens=True),
        (*DECODE, "fa2"),
        UNDEFINED,
        finding="fi.indptr-length",
    ),
    *_per(
        "qo-indptr-headless-1",
        "There is no row count to take the maximum of.",
        1,
        _headless("qo_indptr"),
        PREFILL,
        refused("ValueError"),
        refused("RuntimeError", "max"),
    ),
    *_per(
        "qo-indptr-headless",
        "A batch has one request less, and every request has the rows of the one behind it.",
        3,
        _headless("qo_indptr"),
        PREFILL,
        WRONG,
        finding="fi.indptr-start",
    ),
    *_per(
        "qo-indptr-from-1",
        "Rows are read one further on, and written where they belong or one further on; 0.7.4 compares "
        "q's rows with the last entry.",
        3,
        _shifted,
        PREFILL,
        WRONG,
        refused("ValueError"),
        finding="fi.indptr-start",
    ),
    *_per(
        "indptr-falls",
        "CUDA-core decode does not look: the length wraps around.",
        3,
        _falling,
        ("cuda_core",),
        WRONG,
        finding="fi.indptr-falls",
    ),
    *_per(
        "indptr-falls",
        "The planner of the prefill kernel checks that lengths are not negative.",
        3,
        _falling,
        ("tensor_core", "fa2"),
        FALLS,
    ),
    *_per(
        "seq-lens-wrong",
        "fa2 derives lengths from the page arrays on the device.",
        3,
        _wrong_lens,
        ("tensor_core", "fa2"),
        RIGHT,
        finding="fi.seq-lens",
    ),
    *_per(
        "indices-short",
        f"Entries past the end are read. {BEHIND}",
        3,
        _short,
        (*DECODE, "fa2"),
        UNDEFINED,
        finding="fi.indices-short",
    ),
    *(
        rule(
            f"page-id.{page}.{kernel}",
            "An address is computed from any page id.",
            bind(_given, kernel, 3, _foreign(page)),
            # right before the pool there may be other memory of the process, far behind it there is none
            UNDEFINED if page == -1 else refused("RuntimeError", "CUDA error"),
        )
        for page in (-1, 10**6, 10**9)
        for kernel in ("cuda_core", "fa2")
    ),
)
