"""Named edge cases beyond the default mix: more rows, requests, layers and keys than it has, and what it rarely has.

Those of engines are here, those of kernel adapters in `cases.beyond_kernels`, features that meet in
`cases.beyond_features`, several batches in `cases.beyond_history`.

Decode and prefill are asked apart, so that a backend of one phase is asked its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases.batches import decode, step
from cases.beyond_features import BEYOND_FEATURES
from cases.beyond_history import BEYOND_HISTORY
from cases.beyond_kernels import BEYOND_KERNELS, HEAD_DIMS, SEED
from cases.model import MAX_SPARE_PAGES, Case, Heads, Kind, Mask, Request, Step

_SMALL = Heads(2, 1)


def _engine(*steps: Step, **settings: Any) -> Case:
    return Case(steps, seed=SEED, **settings)


def _borrowing(kind: Kind, *requests: tuple[int, int, int]) -> Step:
    """A batch from (cached_len, extend_len, prefix_len): leading tokens of the first request."""
    made = tuple(
        Request(cached, extend, uid, 0 if prefix else None, prefix)
        for uid, (cached, extend, prefix) in enumerate(requests)
    )
    return Step(made, "decode" if kind == "decode" else "prefill", kind)


def _of_head_dims(qk: int, vo: int) -> dict[str, tuple[Case, str]]:
    heads, why = Heads(2, 1, qk, vo), f"head dims {qk}/{vo}, "
    return {
        f"head_dims_{qk}_{vo}_decode": (_engine(decode(9, 4), heads=heads, page_size=4), why + "decode"),
        f"head_dims_{qk}_{vo}_prefill": (
            _engine(step("mixed", [(3, 2), (0, 6)]), heads=heads, page_size=4),
            why + "a prompt beside a hit",
        ),
    }


def _short(count: int, first_uid: int = 0) -> Step:
    """Decodes of 1 to 5 keys."""
    return decode(*(1 + i % 5 for i in range(count)), first_uid=first_uid)


def _prompts(count: int, first_uid: int = 0) -> Step:
    return step("prefill", [(i % 3, 1 + i % 4) for i in range(count)], first_uid)


_POOL: dict[str, Any] = {"num_layers": 1, "placement": "reversed", "spare_pages": MAX_SPARE_PAGES}

BEYOND: dict[str, tuple[Case, str]] = {
    "pages_of_32_decode": (
        _engine(decode(40, 31, 65, 32, 96), heads=_SMALL, page_size=32, placement="reversed"),
        "pages of 32: lengths below, at and above one, two and three of them",
    ),
    "pages_of_32_prefill": (
        _engine(step("mixed", [(32, 3), (0, 65), (30, 4)]), page_size=32, placement="scattered"),
        "pages of 32: a hit of a page, a prompt over two, a hit that ends short of one",
    ),
    "three_on_pages_of_64": (
        _engine(decode(65, 130, 100), page_size=64, placement="scattered", spare_pages=1),
        "three lengths, the longest in the middle: an order by length is no swap, nor its own inverse",
    ),
    "four_prompts_on_pages_of_128": (
        _engine(step("mixed", [(0, 5), (128, 2), (3, 1), (0, 129)]), page_size=128, spare_pages=1),
        "more than two requests on large pages, in a prefill batch",
    ),
    "prompt_of_200": (
        _engine(step("prefill", [(0, 200)]), heads=_SMALL, page_size=16),
        "more new rows than a tile of 128 has",
    ),
    "prompts_over_row_tiles": (
        _engine(step("chunked", [(70, 130), (0, 64), (9, 70)]), heads=_SMALL, placement="scattered"),
        "row tiles of 64 and of 128 that are cut, full and just begun, behind hits",
    ),
    "thirty_three_prompts": (
        _engine(_prompts(33), page_size=2, placement="scattered"),
        "a prefill batch of more requests than buffers for 16 or 32 hold",
    ),
    "decode_of_257_requests": (
        _engine(_short(257), num_layers=1, page_size=2, placement="scattered"),
        "more requests than a buffer of 128 or 256 holds, or uint8 counts",
    ),
    "prompts_of_130_requests": (
        _engine(_prompts(130), num_layers=1, page_size=2),
        "more requests than a buffer of 128 holds, in a prefill batch",
    ),
    "prompt_of_520": (
        _engine(step("prefill", [(0, 520)]), num_layers=1, page_size=16),
        "more new rows than a buffer of 512 holds",
    ),
    "group_of_32_and_head_dim_256": (
        _engine(decode(33, 5), heads=Heads(32, 1, 256, 256), page_size=16),
        "what a plan needs most of a workspace for: many query heads a KV head, and a large one",
    ),
    "prompts_of_16_and_65_requests": (
        _engine(_prompts(16), _prompts(65, 100), page_size=2),
        "as many requests as a buffer of 16 holds, and more than one of 64 does",
    ),
    "decode_of_16_32_48_requests": (
        _engine(_short(16), _short(32, 100), _short(48, 200), page_size=2, placement="scattered"),
        "batches of whole sixteens between the mix's 8 requests and 64",
    ),
    "decode_of_12_24_48_requests": (
        replace(_engine(_short(12), _short(24, 100), _short(48, 200), page_size=2), seed=SEED + 64),
        "captured sizes that are no powers of two",
    ),
    "three_kv_heads_decode": (
        _engine(decode(9, 4), heads=Heads(9, 3), page_size=4),
        "three KV heads of three query heads each: neither count is a power of two",
    ),
    "three_kv_heads_prefill": (
        _engine(step("mixed", [(3, 2), (0, 6)]), heads=Heads(9, 3), page_size=4),
        "the same with a prompt beside a hit",
    ),
    "group_of_six": (
        _engine(step("mixed", [(3, 2), (0, 6)]), decode(6, 7), heads=Heads(12, 2), page_size=4),
        "six query heads a KV head, prefill and decode",
    ),
    "window_of_100_decode": (
        _engine(decode(150, 70, 101, 120), page_size=16, placement="scattered", mask=Mask(window=100)),
        "a window longer than a tile of 64 keys, no multiple of it, before and behind its edge",
    ),
    "window_of_100_prefill": (
        _engine(step("mixed", [(0, 130), (99, 3), (60, 8)]), heads=_SMALL, mask=Mask(window=100)),
        "a window longer than a tile of 64 keys, over a prompt that outgrows it",
    ),
    "window_of_128_prefill": (
        _engine(step("chunked", [(120, 30), (0, 129)]), page_size=16, mask=Mask(window=128)),
        "a window of a whole tile of 128 keys: the row behind it loses one key",
    ),
    "window_in_some_layers_decode": (
        _engine(decode(9, 4, 30), num_layers=3, page_size=4, mask=Mask(window=4, window_layers=(0, 2))),
        "a window in the first and the last layer, all keys in the one between: a plan for each",
    ),
    "window_in_some_layers_prefill": (
        _engine(
            step("mixed", [(17, 2), (0, 6), (3, 4)]), page_size=4, mask=Mask(window=3, window_layers=(1,))
        ),
        "all keys in the first layer, a window in the second, over prompts and hits that outgrow it",
    ),
    "three_layers_decode": (
        _engine(decode(3, 6), num_layers=3, page_size=2),
        "the third layer has keys of its own: an index modulo two finds the first one's",
    ),
    "three_layers_prefill": (
        _engine(step("mixed", [(3, 2), (0, 4)]), num_layers=3, page_size=2),
        "the same in a prefill batch behind a hit",
    ),
    "decode_with_lse_in_a_graph": (
        replace(_engine(decode(4, 9, 2), decode(5, 10), page_size=4), seed=SEED + 128),
        "the LSE of a replay: by seed, `forward_return_lse` is captured",
    ),
    "decode_of_2049": (
        _engine(decode(2049, 5), page_size=16),
        "a length that float16 rounds to 2048",
    ),
    "hit_of_2048": (
        _engine(step("prefill", [(2048, 3), (0, 5)]), page_size=16),
        "lengths that float16 does not hold, in a prefill batch",
    ),
    "decode_of_1100": (
        _engine(decode(1100, 5), num_layers=1),
        "a page table of more columns than a block of 1,024 threads copies at once",
    ),
    "hit_of_1100": (
        _engine(step("mixed", [(1100, 2), (0, 3)]), num_layers=1),
        "the same in a prefill batch",
    ),
    "decode_of_65601": (
        _engine(decode(65_601, 3), num_layers=1, page_size=16),
        "a length that neither int16 nor uint16 holds",
    ),
    "uids_above_int16": (
        _engine(
            Step(
                tuple(Request(n, 1, uid) for n, uid in ((3, 0), (5, 1 << 16), (4, 1 << 33))),
                "decode",
                "decode",
            ),
            placement="scattered",
        ),
        "uids that are one and the same in their low 16 bits, and in their low 32",
    ),
    "page_ids_above_int16_decode": (
        _engine(decode(3, 5), **_POOL),
        "page ids above 65,535: neither int16 nor uint16 holds them",
    ),
    "page_ids_above_int16_prefill": (
        _engine(step("mixed", [(3, 2), (0, 4)]), **_POOL),
        "the same in a prefill batch, which stores several tokens there",
    ),
    "two_of_four_share_page_1": (
        _engine(_borrowing("decode", (6, 1, 0), (7, 1, 5), (6, 1, 2), (8, 1, 0)), placement="scattered"),
        "the first two share more than the third does, the fourth shares nothing",
    ),
    "two_of_four_share_page_16": (
        _engine(
            _borrowing("decode", (40, 1, 0), (33, 1, 32), (35, 1, 16), (47, 1, 0)),
            page_size=16,
            placement="scattered",
        ),
        "the same in whole pages of 16",
    ),
    "two_of_three_share_prefill": (
        _engine(
            _borrowing("prefill", (16, 5, 0), (18, 3, 16), (17, 4, 0)),
            heads=_SMALL,
            page_size=16,
            placement="scattered",
        ),
        "prompts: the third one has as many stored tokens as the two that share theirs",
    ),
    **{name: named for dims in HEAD_DIMS for name, named in _of_head_dims(*dims).items()},
    **BEYOND_FEATURES,
    **BEYOND_HISTORY,
    **BEYOND_KERNELS,
}
"""Case and what it is there for, by name."""
