"""Named edge cases of kernel adapters beyond the default mix (`cases.beyond`)."""

from __future__ import annotations

from typing import Any

from cases.batches import kernel
from cases.model import MAX_SPARE_PAGES, Case, Heads, Mask

HEAD_DIMS = ((80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
"""(qk, vo) that kernels are compiled for, beside 64."""
SEED = 19
"""Draws neither a relation nor `capacity` (`conformance.checks`): one more execution each, of a large case."""


def kernel_case(lengths: list[tuple[int, int]], **settings: Any) -> Case:
    """One row per request is a decode batch."""
    rows = kernel(*lengths, decode=all(qo == 1 for qo, _ in lengths))
    return Case((rows,), level="kernel", num_layers=1, seed=SEED, **settings)


def _of_head_dims(qk: int, vo: int) -> dict[str, tuple[Case, str]]:
    heads, why = Heads(2, 1, qk, vo), f"head dims {qk}/{vo}, "
    return {
        f"kernel_head_dims_{qk}_{vo}_decode": (
            kernel_case([(1, 9), (1, 4)], heads=heads, page_size=4),
            why + "one row per request",
        ),
        f"kernel_head_dims_{qk}_{vo}_prefill": (
            kernel_case([(3, 9), (4, 4)], heads=heads, page_size=4),
            why + "several rows per request",
        ),
    }


BEYOND_KERNELS: dict[str, tuple[Case, str]] = {
    "kernel_pages_of_32": (
        kernel_case([(1, 40), (1, 64), (1, 65)], page_size=32, placement="reversed"),
        "pages of 32: lengths within, at and above two of them",
    ),
    "kernel_three_on_pages_of_64": (
        kernel_case([(1, 65), (1, 130), (1, 100)], page_size=64, placement="scattered", spare_pages=1),
        "three lengths, the longest in the middle, on large pages",
    ),
    "kernel_window_of_100_decode": (
        kernel_case([(1, 150), (1, 70), (1, 101)], page_size=16, mask=Mask(window=100)),
        "a window longer than a tile of 64 keys, before and behind its edge",
    ),
    "kernel_window_of_100_prefill": (
        kernel_case([(130, 150), (3, 102), (8, 60)], page_size=16, mask=Mask(window=100)),
        "the same over more rows than a tile of 128 has",
    ),
    "kernel_decode_of_2049": (
        kernel_case([(1, 2049), (1, 5)], page_size=16),
        "a length that float16 rounds to 2048",
    ),
    "kernel_decode_of_1100": (
        kernel_case([(1, 1100), (1, 5)]),
        "more page ids than a block of 1,024 threads copies at once",
    ),
    "kernel_decode_of_48": (
        kernel_case([(1, 1 + i % 5) for i in range(48)], page_size=2, placement="scattered"),
        "whole sixteens of requests",
    ),
    "kernel_three_kv_heads_decode": (
        kernel_case([(1, 9), (1, 4)], heads=Heads(9, 3), page_size=4),
        "three KV heads of three query heads each: neither count is a power of two",
    ),
    "kernel_three_kv_heads_prefill": (
        kernel_case([(3, 9), (4, 4)], heads=Heads(9, 3), page_size=4),
        "the same with several rows per request",
    ),
    "kernel_page_ids_above_int16": (
        kernel_case([(1, 3), (1, 5)], placement="reversed", spare_pages=MAX_SPARE_PAGES),
        "page ids above 65,535: neither int16 nor uint16 holds them",
    ),
    "kernel_thirty_three_prompts": (
        kernel_case([(1 + i % 3, 3 + i % 4) for i in range(33)], page_size=2, placement="scattered"),
        "more requests than buffers for 16 or 32 hold",
    ),
    "kernel_v_scale_alone": (
        kernel_case([(1, 9), (1, 4)], page_size=4, kv_dtype="float8_e4m3fn", v_scale=2.0),
        "k_scale 1 beside another v_scale: one does not tell whether there is the other",
    ),
    "kernel_k_scale_alone": (
        kernel_case([(1, 9), (1, 4)], page_size=4, kv_dtype="float8_e4m3fn", k_scale=0.5),
        "v_scale 1 beside another k_scale",
    ),
    **{name: named for dims in HEAD_DIMS for name, named in _of_head_dims(*dims).items()},
}
"""Case and what it is there for, by name."""
