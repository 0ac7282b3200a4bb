"""Named edge cases of several batches beyond the default mix: what must not be remembered of an earlier one."""

from __future__ import annotations

from typing import Any

from cases.batches import decode, shared, step
from cases.beyond_kernels import SEED
from cases.model import Case, Request, Step


def _session(*steps: Step, **settings: Any) -> Case:
    return Case(steps, seed=SEED, session=True, placement="scattered", **settings)


def _decoded(*requests: tuple[int, int]) -> Step:
    """One token more for each (kv_len, uid)."""
    return Step(tuple(Request(kv_len - 1, 1, uid) for kv_len, uid in requests), "decode", "decode")


def _prompts(*requests: tuple[int, int], finished: tuple[int, ...] = ()) -> Step:
    """Whole prompts, as (tokens, uid)."""
    return Step(tuple(Request(0, tokens, uid) for tokens, uid in requests), finished=finished)


BEYOND_HISTORY: dict[str, tuple[Case, str]] = {
    "session_of_64_tokens": (
        _session(*(decode(n) for n in range(1, 65)), num_layers=1),
        "more batches in a row than a ring of pinned buffers has",
    ),
    "row_and_lengths_of_one_who_left": (
        _session(
            Step((Request(2, 1),), "decode", "decode"),
            Step((Request(2, 1, 1),), "decode", "decode", finished=(0,)),
        ),
        "another request, in the row and with the lengths of the one before, in other pages",
    ),
    "shared_prefix_then_none": (
        Case(
            (shared("decode", 3, [(5, 1), (4, 1)]), decode(6, 5, first_uid=2)),
            seed=SEED,
            placement="scattered",
        ),
        "as many requests as before with as many tokens, and no prefix that they share",
    ),
    "back_with_as_many_pages": (
        _session(
            _prompts((6, 0), (5, 1)),
            _decoded((7, 0), (6, 1)),
            _prompts((5, 2), finished=(0,)),
            _prompts((7, 0)),
            _decoded((8, 0), (7, 1)),
            page_size=4,
        ),
        "a request that left comes back with as many pages as it had: others, since its own have gone",
    ),
    "two_borrowers_in_one_row": (
        _session(
            _prompts((4, 0)),
            Step((Request(4, 3, 1, 0, 4),)),
            Step((Request(4, 3, 2, 0, 4),), finished=(1,)),
            num_layers=1,
        ),
        "the next borrower of a prefix has the row, the first page and the length of the one before, but other pages",
    ),
    "borrower_of_a_borrower": (
        _session(
            _prompts((4, 0)),
            Step((Request(2, 3, 1, 0, 2),)),
            Step((Request(4, 1, 2, 1, 4),)),
            _decoded((5, 0), (6, 1), (6, 2)),
        ),
        "the third request shares more with the second than either does with the first",
    ),
    "verify_2_then_4_drafts": (
        _session(
            _prompts((5, 0)),
            Step((Request(5, 2),), kind="verify"),
            Step((Request(6, 4),), kind="verify"),
        ),
        "more drafts than the first time",
    ),
    "three_then_one_then_three": (
        _session(
            _prompts((5, 0), (9, 1), (6, 2)),
            _decoded((6, 0), (10, 1), (7, 2)),
            _decoded((8, 2)),
            _decoded((7, 0), (11, 1), (9, 2)),
            page_size=16,
        ),
        "with a graph a size: the same three requests as when theirs was last replayed, and another size between",
    ),
    "three_then_one_then_the_same_three": (
        _session(
            _prompts((5, 0), (9, 1), (6, 2)),
            _decoded((6, 0), (10, 1), (7, 2)),
            _decoded((8, 2)),
            _decoded((6, 0), (10, 1), (7, 2)),
            page_size=4,
        ),
        "the same, of the same lengths: what was decoded is rejected, and decoded anew",
    ),
    "second_request_crosses_a_page": (
        _session(
            _prompts((1, 0), (3, 1)),
            _decoded((2, 0), (4, 1)),
            _decoded((3, 0), (5, 1)),
            page_size=4,
        ),
        "a request that is not the first one begins a page",
    ),
    "page_begun_between_replays": (
        _session(
            _prompts((1, 0), (1, 1)),
            _decoded((2, 0), (2, 1)),
            Step((Request(2, 4, 0), Request(2, 4, 1)), kind="chunked"),
            _decoded((7, 0), (7, 1)),
            page_size=4,
        ),
        "a batch without a graph begins a page, the next replay does not",
    ),
    "lengths_swapped": (
        Case(
            (
                step("prefill", [(0, 1), (0, 3)]),
                step("prefill", [(0, 3), (0, 1)], 2),
                decode(1, 3, first_uid=4),
                decode(3, 1, first_uid=6),
            ),
            seed=SEED,
            placement="scattered",
        ),
        "the lengths of the batch before in another order",
    ),
    "captured_for_the_smaller_alone": (
        Case((decode(2), decode(3, 4, 2, first_uid=1)), seed=SEED + 32, placement="scattered"),
        "by seed, the largest decode batch has no graph and runs beside those of the others",
    ),
    "captured_for_3_and_4": (
        Case((decode(2, 5, 3), decode(1, 4, 2, 6, first_uid=3)), seed=SEED + 64, placement="scattered"),
        "by seed, a size that is no power of two beside the next one that is",
    ),
}
