"""Named edge cases of features that meet: windows, caps, heads and shared pages in batches that are long or wide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cases.batches import decode, shared, step
from cases.beyond_kernels import SEED, kernel_case
from cases.model import MAX_SPARE_PAGES, Case, Heads, Mask, Request, Step

_GROUPED = Heads(4, 2)
_LONG_DECODE = (decode(1500, 3, 700),)
_LONG_HIT = (step("mixed", [(1500, 3), (0, 140), (600, 2)]),)


def _engine(*steps: Step, **settings: Any) -> Case:
    return Case(steps, seed=SEED, placement="scattered", **settings)


def _long(*steps: Step, **settings: Any) -> Case:
    return _engine(*steps, heads=_GROUPED, num_layers=1, page_size=16, dtype="bfloat16", **settings)


def _both(name: str, why: str, **settings: Any) -> dict[str, tuple[Case, str]]:
    """A decode and a prefill batch of the same settings."""
    return {
        f"{name}_decode": (_engine(decode(9, 4, 70), page_size=4, **settings), why),
        f"{name}_prefill": (
            _engine(step("mixed", [(3, 2), (0, 6), (64, 3)]), page_size=4, **settings),
            f"{why}, in a prefill batch",
        ),
    }


def _pairs(order: Iterable[int], extend: int) -> tuple[Request, ...]:
    """Two lenders, each with one borrower of three tokens."""
    made = ((4, 0, None), (6, 1, 0), (5, 2, None), (7, 3, 2))
    pairs = [Request(cached, extend, uid, lender, 0 if lender is None else 3) for cached, uid, lender in made]
    return tuple(pairs[i] for i in order)


_IN_PAIRS, _INTERLEAVED = (0, 1, 2, 3), (0, 2, 1, 3)

_ENGINE: dict[str, tuple[Case, str]] = {
    "long_decode_window_of_513": (
        _long(*_LONG_DECODE, mask=Mask(window=513)),
        "a window over many tiles of a long request, one key longer than a power of two",
    ),
    "long_decode_soft_cap": (
        _long(*_LONG_DECODE, mask=Mask(soft_cap=30.0)),
        "a soft cap over a long request",
    ),
    "long_hit_window_of_200": (
        _long(*_LONG_HIT, mask=Mask(window=200)),
        "a window behind a long hit, and over a prompt that does not outgrow it",
    ),
    "long_hit_soft_cap": (_long(*_LONG_HIT, mask=Mask(soft_cap=30.0)), "a soft cap behind a long hit"),
    "twenty_decodes_layer_windows": (
        _engine(decode(*range(3, 23)), heads=_GROUPED, page_size=4, mask=Mask(window=7, window_layers=(0,))),
        "a window in one layer of two, for more requests than the mix has",
    ),
    "twenty_prompts_soft_cap": (
        _engine(
            step("mixed", [(i % 5, 1 + i % 3) for i in range(20)]),
            heads=_GROUPED,
            page_size=4,
            mask=Mask(soft_cap=30.0),
        ),
        "a soft cap over more prompts than the mix has",
    ),
    **_both(
        "scores_below_a_finite_mask",
        "all that a row sees scores below -10000, and what it must not see more: no finite number can hide it",
        sm_scale=1.0,
        values="low",
    ),
    **_both(
        "fp8_soft_cap",
        "scales that are no powers of two, and a cap on scores that are scaled already",
        kv_dtype="float8_e4m3fn",
        k_scale=0.3,
        v_scale=1.7,
        mask=Mask(soft_cap=15.5),
    ),
    **_both(
        "fp8_window_own_scale",
        "two scales on the scores, and a window",
        kv_dtype="float8_e4m3fn",
        k_scale=0.3,
        v_scale=1.7,
        sm_scale=0.25,
        mask=Mask(window=7),
    ),
    **_both(
        "windows_in_five_of_six_layers",
        "a window in all layers but the last: a pattern of no period, over more layers than four",
        num_layers=6,
        mask=Mask(window=3, window_layers=(0, 1, 2, 3, 4)),
    ),
    **_both(
        "windows_in_the_first_two_layers",
        "a window in two layers running: they do not take turns",
        num_layers=3,
        mask=Mask(window=3, window_layers=(0, 1)),
    ),
    **_both("eight_kv_heads", "as many KV heads as query heads, eight", heads=Heads(8, 8)),
    **_both("forty_query_heads", "more query heads than a warp has threads", heads=Heads(40, 8)),
    **_both("group_of_20", "more query heads a KV head than a tile of 16 rows holds", heads=Heads(20, 1)),
    **_both("head_dims_72", "heads that are no multiple of 16 wide", heads=Heads(2, 1, 72, 72)),
    **_both("values_wider_than_keys", "V of 128 behind K of 64", heads=Heads(2, 1, 64, 128)),
    "two_kv_heads_on_pages_of_64_decode": (
        _engine(decode(65, 3, 130), heads=_GROUPED, page_size=64, num_layers=1),
        "large pages of more than one KV head",
    ),
    "two_kv_heads_on_pages_of_128_prefill": (
        _engine(step("mixed", [(64, 2), (0, 5), (127, 3)]), heads=_GROUPED, page_size=128, num_layers=1),
        "the same in a prefill batch",
    ),
    "hit_of_4200": (
        _engine(step("mixed", [(4200, 2), (0, 3)]), num_layers=1, page_size=16),
        "a longer hit than a table of 4,096 tokens holds",
    ),
    "hit_of_33000": (
        _engine(step("mixed", [(33_000, 2), (0, 3)]), num_layers=1, page_size=16),
        "a prefill batch of a length that int16 does not hold",
    ),
    "verify_16_drafts": (
        _engine(Step((Request(5, 16), Request(3, 16, 1)), kind="verify"), page_size=4),
        "more drafts than the mix has",
    ),
    "draft_extend_of_9": (
        _engine(Step((Request(5, 9), Request(3, 7, 1)), kind="draft_extend"), page_size=4),
        "more accepted drafts than the mix has",
    ),
    "pages_of_2_above_int16": (
        Case(
            (step("mixed", [(3, 2), (0, 4)]),),
            seed=SEED,
            num_layers=1,
            page_size=2,
            placement="reversed",
            spare_pages=MAX_SPARE_PAGES,
        ),
        "page ids above 65,535 where pages hold more than one token",
    ),
    "two_pairs_share_decode": (
        _engine(Step(_pairs(_IN_PAIRS, 1), "decode", "decode")),
        "two groups of requests share pages, each its own",
    ),
    "two_pairs_share_prefill": (
        _engine(Step(_pairs(_IN_PAIRS, 2))),
        "the same with hits of several new tokens",
    ),
    "pairs_interleaved_decode": (
        _engine(Step(_pairs(_INTERLEAVED, 1), "decode", "decode")),
        "requests that share pages do not follow each other",
    ),
    "pairs_interleaved_prefill": (_engine(Step(_pairs(_INTERLEAVED, 2))), "the same with several new tokens"),
    "nine_share_256_tokens": (
        _engine(shared("decode", 256, [(275 + i % 4, 1) for i in range(9)]), page_size=16, num_layers=1),
        "so many share so much that a common prefix is worth a pass of its own",
    ),
    "equal_whole_pages": (
        _engine(decode(8, 8, 8, 8), decode(12, 12, 12, first_uid=4), page_size=4),
        "all lengths equal, whole pages, rows anywhere",
    ),
}

_KERNEL: dict[str, tuple[Case, str]] = {
    "kernel_long_grouped_decode": (
        kernel_case([(1, 1279), (1, 600), (1, 5)], heads=Heads(8, 2), page_size=16),
        "long enough to be split over its keys, several query heads a KV head, one key short of whole tiles",
    ),
    "kernel_long_window_decode": (
        kernel_case([(1, 1279), (1, 600), (1, 5)], heads=_GROUPED, page_size=16, mask=Mask(window=513)),
        "a window over many tiles of a long request",
    ),
    "kernel_long_cap_decode": (
        kernel_case([(1, 1279), (1, 600), (1, 5)], heads=_GROUPED, page_size=16, mask=Mask(soft_cap=30.0)),
        "a soft cap over a long request",
    ),
    "kernel_long_window_prefill": (
        kernel_case([(150, 700), (5, 1300)], heads=_GROUPED, page_size=16, mask=Mask(window=200)),
        "a window longer than a tile of 128 keys, over more rows than one of 128 has",
    ),
    "kernel_long_cap_prefill": (
        kernel_case([(150, 300), (5, 700)], heads=_GROUPED, page_size=16, mask=Mask(soft_cap=30.0)),
        "a soft cap over more rows than a tile of 128 has",
    ),
    "kernel_wide_group_prefill": (
        kernel_case([(70, 70), (3, 9)], heads=Heads(16, 1), page_size=16),
        "more than 1,024 rows once the query heads of a KV head are packed",
    ),
    "kernel_keys_a_multiple_of_64_ahead": (
        kernel_case([(3, 67), (5, 133), (2, 194)], heads=Heads(2, 1), page_size=16),
        "the diagonal begins a whole number of tiles of 64 keys in",
    ),
    "kernel_forty_decodes_of_eight_kv_heads": (
        kernel_case([(1, 1 + i % 7) for i in range(40)], heads=Heads(8, 8), page_size=4),
        "more pairs of request and KV head than uint8 counts",
    ),
    "kernel_eight_kv_heads_prefill": (
        kernel_case([(3, 9), (4, 4)], heads=Heads(8, 8), page_size=4),
        "as many KV heads as query heads, eight",
    ),
    "kernel_forty_query_heads": (
        kernel_case([(1, 9), (1, 4)], heads=Heads(40, 8), page_size=4),
        "more query heads than a warp has threads",
    ),
    "kernel_group_of_20": (
        kernel_case([(1, 9), (1, 4)], heads=Heads(20, 1), page_size=4),
        "more query heads a KV head than a tile of 16 rows holds",
    ),
    "kernel_two_kv_heads_on_pages_of_64": (
        kernel_case([(1, 65), (1, 3), (1, 130)], heads=_GROUPED, page_size=64, placement="scattered"),
        "large pages of more than one KV head",
    ),
    "kernel_two_kv_heads_on_pages_of_64_hnd": (
        kernel_case([(1, 65), (1, 3), (1, 130)], heads=_GROUPED, page_size=64, layout="HND"),
        "the same, heads before slots",
    ),
    "kernel_equal_scales": (
        kernel_case([(1, 9), (1, 4)], kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.5),
        "both scales are one number",
    ),
    "kernel_scales_of_no_power_of_two": (
        kernel_case([(1, 9), (1, 4)], kv_dtype="float8_e4m3fn", k_scale=0.0123, v_scale=0.0457),
        "scales that bfloat16, and a byte of exponent, round",
    ),
    "kernel_fp8_window_head_dim_256": (
        kernel_case(
            [(1, 9), (3, 4)], heads=Heads(2, 1, 256, 256), kv_dtype="float8_e4m3fn", mask=Mask(window=3)
        ),
        "an fp8 cache, large heads and a window at once",
    ),
}

BEYOND_FEATURES = {**_ENGINE, **_KERNEL}
"""Case and what it is there for, by name."""
