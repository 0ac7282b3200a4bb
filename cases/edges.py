"""Named edge cases: worked examples and borders. Those from public reports are files in `corpus/`."""

from __future__ import annotations

from cases.batches import decode, growing, kernel, shared, step
from cases.beyond import BEYOND
from cases.model import Case, Heads, Mask, Request, Step

_SMALL = Heads(2, 1)

EDGES: dict[str, tuple[Case, str]] = {
    "one_token_prefill": (Case((step("prefill", [(0, 1)]),)), "the smallest prompt there is"),
    "one_token_decode": (Case((decode(1),)), "the smallest decode: the only key is the token's own"),
    "prefix_hit_page_1": (
        Case((step("mixed", [(3, 2), (5, 1)]),), heads=_SMALL),
        "two requests behind prefix hits: qo_indptr [0, 2, 3] is neither all ones nor kv_indptr",
    ),
    "prefix_hit_page_4": (
        Case((step("mixed", [(3, 2), (5, 1)]),), heads=_SMALL, page_size=4),
        "the same with pages of 4: the table holds page numbers, token location divided by 4",
    ),
    "prompt_hit_and_decode": (
        Case((step("mixed", [(0, 6), (4, 3), (8, 1)]),), heads=Heads(4, 2, 128, 128), dtype="float32"),
        "a whole prompt, a prompt behind a hit and a decode in one batch: cu_seqlens_q [0, 6, 9, 10]",
    ),
    "three_pages_full_page_part_page": (
        Case((decode(37, 16, 5),), heads=_SMALL, page_size=16),
        "kv_indptr [0, 3, 4, 5] and last_page_len [5, 16, 5]: the middle one is full, not empty",
    ),
    "one_page_borders": (
        Case((decode(1, 16, 17, 32, 48),), page_size=16, placement="scattered"),
        "lengths 1, P, P + 1 and multiples of P side by side",
    ),
    "around_the_page_edge": (
        Case((step("prefill", [(0, 15), (0, 16), (0, 17), (0, 32)]),), page_size=16, placement="reversed"),
        "prompts one short of a page, a page, one more, and two pages",
    ),
    "page_size_3": (
        Case((decode(2, 3, 4, 6, 7),), page_size=3, placement="scattered"),
        "a page size that is no power of two: a shift in place of a division shows",
    ),
    "page_256_first_and_second_page": (
        Case((decode(257, 256),), page_size=256, spare_pages=1),
        "one token on the second of two large pages beside exactly one large page",
    ),
    "many_short_one_long": (
        Case((decode(*[17] * 31, 1024, *[17] * 32),), page_size=16, placement="scattered"),
        "63 short requests and a long one: schedulers split the long one over its keys",
    ),
    "equal_requests": (
        Case((decode(*[21] * 8),), page_size=4, placement="scattered", values="random"),
        "eight requests of one length differ in their pages alone",
    ),
    "short_then_long": (
        Case((decode(1, 40, 2, 33),), heads=_SMALL, page_size=4),
        "the longest request is not the first: maxima taken from the first one are too small",
    ),
    "prefill_of_ones": (
        Case((step("prefill", [(4, 1), (0, 1), (16, 1)]),), page_size=4, placement="scattered"),
        "a prefill batch in which every request computes one token is still a prefill batch",
    ),
    "longer_after_shorter": (
        Case((decode(4, 4, 4, 4), decode(9, 17, 33, 5, first_uid=4)), page_size=4),
        "equally many requests, longer ones: a plan or a buffer of the batch before no longer fits",
    ),
    "shorter_after_longer": (
        Case((decode(33, 17), decode(2, 3, first_uid=2)), page_size=4),
        "equally many requests, shorter ones: what the batch before left must not be read",
    ),
    "decode_over_the_page_edge": (
        Case(growing(14, 4), page_size=16),
        "one request decodes through lengths P - 1, P and P + 1: it gets its second page on the way",
    ),
    "join_and_leave": (
        Case(
            (
                step("prefill", [(0, 5), (0, 9)]),
                step("mixed", [(9, 1), (0, 7)], first_uid=1),
                Step((Request(7, 1, 2),), "decode", "decode"),
            ),
            page_size=4,
            placement="scattered",
        ),
        "requests leave and join: rows and pages are handed on",
    ),
    "three_chunks": (
        Case(
            (
                step("chunked", [(0, 8), (0, 5)]),
                step("chunked", [(8, 8), (5, 6)]),
                step("chunked", [(16, 1), (11, 5)]),
            ),
            page_size=8,
        ),
        "prompts in three chunks, one of them cut at page edges and the other beside them",
    ),
    "prefix_6_extend_3": (
        Case((step("prefill", [(6, 3)]),), page_size=4, heads=_SMALL),
        "new tokens end within the page that the prefix left open: causal is aligned bottom right",
    ),
    "shared_pages_decode": (
        Case((shared("decode", 8, [(11, 1), (8, 1), (20, 1)]),), page_size=4, placement="scattered"),
        "three requests read the first one's two leading pages, one of them nothing else but its own token",
    ),
    "shared_pages_prefill": (
        Case((shared("prefill", 16, [(16, 5), (16, 1), (19, 4)]),), page_size=16, heads=_SMALL),
        "prompts behind a shared page: the prefix counts in kv_len, not in qo_len",
    ),
    "verify_over_the_page_edge": (
        Case((step("verify", [(14, 3), (29, 3)]),), page_size=16, heads=_SMALL),
        "three draft tokens each, across the end of a page: draft rows are masked among each other",
    ),
    "draft_extend_ragged": (
        Case((step("draft_extend", [(5, 2), (9, 1), (3, 4)]),), page_size=4),
        "accepted drafts are extended by different counts",
    ),
    "at_the_context_limit": (
        Case((decode(32, 31),), page_size=16, max_seq_len=32),
        "kv_len equals max_seq_len: the page table has no column to spare",
    ),
    "context_limit_within_a_page": (
        Case((decode(40, 33),), page_size=16, max_seq_len=40),
        "max_seq_len is no multiple of the page size: tables of max_seq_len // P pages are one short",
    ),
    "group_5": (Case((step("prefill", [(0, 9)]),), heads=Heads(5, 1)), "five query heads on one KV head"),
    "group_7_of_two": (
        Case((step("mixed", [(6, 1), (2, 5)]),), heads=Heads(14, 2), page_size=2),
        "groups of seven on two KV heads: a shift finds the wrong KV head from head 8 on",
    ),
    "group_16": (Case((decode(9, 4),), heads=Heads(16, 1)), "sixteen query heads on one KV head"),
    "fused_slices": (
        Case((step("prefill", [(2, 3), (0, 4)]),), heads=Heads(4, 2), page_size=2, strided=True),
        "q, k and v are slices of one tensor: rows do not follow each other",
    ),
    "own_scale": (
        Case((decode(12, 5),), heads=_SMALL, page_size=4, sm_scale=0.25),
        "a scale that is not head_dim ** -0.5: the library's default is wrong",
    ),
    "kernel_hnd": (
        Case(
            (kernel((3, 9), (1, 4)),),
            level="kernel",
            num_layers=1,
            heads=Heads(4, 2),
            page_size=4,
            layout="HND",
        ),
        "heads before slots within a page, two KV heads",
    ),
    "kernel_empty_between": (
        Case(
            (kernel((2, 5), (0, 0), (3, 3)),),
            level="kernel",
            num_layers=1,
            page_size=2,
            mask=Mask(causal=False),
        ),
        "a request without rows and keys between two others: indptr stands still",
    ),
    "kernel_cap_and_window": (
        Case(
            (kernel((4, 12), (1, 7)),),
            level="kernel",
            num_layers=1,
            page_size=4,
            mask=Mask(window=5, soft_cap=30.0),
            values="extreme",
        ),
        "a soft cap inside a window: the cap acts on scores before the mask",
    ),
    **BEYOND,
}
"""Case and what it is there for, by name."""
