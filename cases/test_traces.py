"""Traces: both formats are read, bad lines are named, and the batches are ones that an engine could run."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cases import Case, CaseError, Request, to_json
from cases.trace_files import Row, Trace, read_trace
from cases.trace_scaling import fit
from cases.traces import batches, describe

DATA = Path(__file__).with_name("testdata")
AZURE = read_trace(DATA / "azure_tiny.csv")
MOONCAKE = read_trace(DATA / "mooncake_tiny.jsonl")
TRACES = pytest.mark.parametrize("trace", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16, 64])


def test_azure_is_read() -> None:
    assert AZURE.format == "azure"
    assert len(AZURE.rows) == 20
    assert AZURE.rows[0] == Row(0.0, 339, 90)
    assert AZURE.rows[1].arrival == pytest.approx(0.02)


def test_mooncake_is_read() -> None:
    assert MOONCAKE.format == "mooncake"
    assert len(MOONCAKE.rows) == 20
    assert MOONCAKE.rows[0] == Row(0.0, 1024, 110, (0, 1))
    assert MOONCAKE.rows[1] == Row(1.5, 812, 160, (0,)), (
        "812 tokens fill one block of 512; the second is ragged"
    )


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
NO_TRACE = f"is no known trace, neither CSV that begins with {HEADER.strip()} nor JSON lines"
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
BAD = {
    "": NO_TRACE,
    "a,b\n1,2\n": NO_TRACE,
    HEADER: "holds no request",
    "TIMESTAMP,ContextTokens\n": ":1: the header has no column GeneratedTokens",
    HEADER + "2025-03-01 09:30:00,5,6\nnever,5,6\n": ":3: TIMESTAMP must be a date and time, got 'never'",
    HEADER + "2025-03-01 09:30:00,5.5,6\n": ":2: ContextTokens must be a whole number, got '5.5'",
    HEADER + "2025-03-01 09:30:00,0,6\n": ":2: ContextTokens must be at least 1, got 0",
    HEADER + "2025-03-01 09:30:00,5,-1\n": ":2: GeneratedTokens must be at least 0, got -1",
    HEADER + "2025-03-01 09:30:00,5\n": ":2: has 2 cells, the header 3",
    GOOD + "{": ":2: is not JSON: Expecting property name enclosed in double quotes at column 2",
    GOOD + "[1]\n": ":2: must be an object, got [1]",
    GOOD + GOOD.replace("600", "true"): ":2: input_length must be a whole number, got True",
    GOOD.replace('"output_length": 5, ', ""): ":1: output_length is missing",
    GOOD.replace("[1, 2]", "[1]"): ":1: hash_ids holds 1 ids, but 600 tokens are 2 blocks of 512",
    GOOD.replace("[1, 2]", "7"): ":1: hash_ids must be an array, got 7",
    GOOD.replace("[1, 2]", '[1, "b"]'): ":1: hash_ids must be a whole number, got 'b'",
    GOOD.replace('"timestamp": 0', '"timestamp": "0"'): (
        ":1: timestamp must be a number of milliseconds, got '0'"
    ),
    **{
        GOOD.replace('"timestamp": 0', f'"timestamp": {stamp}'): (
            f":1: timestamp must have at most 15 digits, got {shown}"
        )
        for stamp, shown in (
            ("NaN", "nan"),
            ("1e400", "inf"),
            ("-Infinity", "-inf"),
            ("1" * 400, "1" * 57 + "..."),
        )
    },
    GOOD.replace("600", "6" * 400): f":1: input_length must have at most 15 digits, got {'6' * 57}...",
    GOOD.replace("600", "6" * 5000): ":1: holds a number of more than 4300 digits",
    GOOD + "[" * 100_000: ":2: is nested too deeply",
    HEADER + f"2025-03-01 09:30:00,{'5' * 400},6\n": ":2: ContextTokens must have at most 15 digits, got 400",
    HEADER + "x" * 200_000: ":2: is not CSV: field larger than field limit (131072)",
}


@pytest.mark.parametrize(("text", "sentence"), BAD.items(), ids=range(len(BAD)))
def test_bad_lines_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(CaseError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}{sentence if sentence.startswith(':') else ': ' + sentence}"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="none: cannot be read"):
        read_trace(tmp_path / "none")


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    rows = [json.loads(GOOD) | {"timestamp": stamp} for stamp in (3000, 1000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [row.arrival for row in read_trace(path).rows] == [0.0, 2.0]


@TRACES
@PAGE_SIZES
def test_limits_hold(trace: Trace, page_size: int) -> None:
    limits: dict[str, Any] = {"token_limit": 256, "kv_budget": 900, "max_batch": 6, "chunk_tokens": 50}
    for case in batches(trace, page_size=page_size, **limits):
        assert case.page_size == page_size
        for step in case.steps:
            assert max(step.kv_lens) <= limits["token_limit"]
            assert sum(step.kv_lens) <= limits["kv_budget"]
            assert len(step.requests) <= limits["max_batch"]
            assert step.num_rows <= limits["chunk_tokens"] + limits["max_batch"]


def _by_uid(cases: list[Case]) -> dict[int, list[Request]]:
    found: dict[int, list[Request]] = defaultdict(list)
    for case in cases:
        for step in case.steps:
            for r in step.requests:
                assert isinstance(r, Request)
                found[r.uid].append(r)
    return found


@TRACES
@PAGE_SIZES
def test_every_token_is_computed_once(trace: Trace, page_size: int) -> None:
    """From its prefix hit to its last token but one, which no step reads: without a gap, without a repeat."""
    scaling = fit(trace, page_size=page_size, token_limit=256, occupancy=20.0)
    found = _by_uid(list(batches(trace, page_size=page_size)))
    assert sorted(found) == list(range(len(trace.rows)))
    for uid, requests in found.items():
        scaled = scaling.apply(trace.rows[uid])
        hit = requests[0].cached_len
        assert hit % scaling.block_tokens == 0
        assert hit < scaled.input_len
        stored = hit
        for r in requests:
            assert r.cached_len == stored
            stored = r.kv_len
        assert stored == scaled.input_len + scaled.output_len - 1


@PAGE_SIZES
def test_shared_pages(page_size: int) -> None:
    """Only leading blocks that both requests' rows name, whole, and stored by both before the step."""
    scaling = fit(MOONCAKE, page_size=page_size, token_limit=256, occupancy=20.0)
    borrowed = 0
    for case in batches(MOONCAKE, page_size=page_size):
        stored = {r.uid: r.stored_len for r in case.steps[0].requests}
        for r in case.steps[0].requests:
            if r.prefix_of is None:
                continue
            borrowed += 1
            assert r.prefix_len % scaling.block_tokens == 0
            assert r.prefix_len % page_size == 0
            assert r.prefix_len <= min(r.stored_len, stored[r.prefix_of])
            blocks = r.prefix_len // scaling.block_tokens
            mine, lenders = (
                scaling.apply(MOONCAKE.rows[uid]).blocks[:blocks] for uid in (r.uid, r.prefix_of)
            )
            assert len(mine) == blocks
            assert mine == lenders
    assert borrowed > 20


def test_hits_are_blocks_computed_before() -> None:
    scaling = fit(MOONCAKE, page_size=16, token_limit=256, occupancy=20.0)
    computed: set[int] = set()
    started: set[int] = set()
    hits = 0
    for case in batches(MOONCAKE):
        for r in case.steps[0].requests:
            assert isinstance(r, Request)
            if r.uid not in started:
                started.add(r.uid)
                blocks = scaling.apply(MOONCAKE.rows[r.uid]).blocks[: r.cached_len // scaling.block_tokens]
                assert set(blocks) <= computed
                hits += len(blocks)
        for r in case.steps[0].requests:
            computed.update(scaling.apply(MOONCAKE.rows[r.uid]).blocks[: r.kv_len // scaling.block_tokens])
    assert hits > 20


def test_requests_that_hit_nothing_share_nothing() -> None:
    """Two equal prompts at the same time are computed side by side: equal tokens, but pages of their own."""
    row = Row(0.0, 1024, 4, (1, 2))
    trace = Trace("mooncake", (row, row, Row(9.0, 1024, 4, (1, 2))))
    cases = list(batches(trace, chunk_tokens=512))
    first = cases[0].steps[0].requests
    assert [r.prefix_of for r in first] == [None, None]
    assert [r.stored_len for r in first] == [0, 0]
    # all of the third prompt is cached, but a token must be left to compute: its last block is computed again
    block_tokens = fit(trace, page_size=16, token_limit=256, occupancy=20.0).block_tokens
    assert _by_uid(cases)[2][0].cached_len == block_tokens


@TRACES
def test_kinds(trace: Trace) -> None:
    kinds = {step.kind for case in batches(trace, chunk_tokens=64) for step in case.steps}
    assert {"decode", "prefill", "chunked", "mixed"} == kinds
    for case in batches(trace, chunk_tokens=64):
        step = case.steps[0]
        if step.kind == "mixed":
            assert any(r.qo_len == 1 and r.stored_len for r in step.requests)
            assert len(step.requests) > 1


@TRACES
def test_never_mixed(trace: Trace) -> None:
    kinds = {step.kind for case in batches(trace, mixed_share=0.0) for step in case.steps}
    assert "mixed" not in kinds


@TRACES
def test_deterministic(trace: Trace) -> None:
    first, second, other = ([to_json(c) for c in batches(trace, seed=seed)] for seed in (1, 1, 2))
    assert first == second
    assert first != other


@TRACES
def test_several_steps_in_a_case(trace: Trace) -> None:
    single = [step for case in batches(trace) for step in case.steps]
    grouped = list(batches(trace, steps_per_case=3))
    assert [step for case in grouped for step in case.steps] == single
    assert {len(case.steps) for case in grouped[:-1]} == {3}


def test_blocks_scale_to_whole_pages() -> None:
    scaling = fit(MOONCAKE, page_size=64, token_limit=256, occupancy=20.0)
    assert scaling.block_tokens == 64
    assert scaling.input_limit == 192
    long = max(MOONCAKE.rows, key=lambda row: row.input_len)
    scaled = scaling.apply(long)
    assert len(scaled.blocks) * 64 <= scaled.input_len <= 192
    assert scaled.blocks == long.blocks[: len(scaled.blocks)]


def test_short_traces_are_not_scaled_up() -> None:
    scaling = fit(Trace("azure", (Row(0.0, 10, 3),)), page_size=4, token_limit=64, occupancy=4.0)
    assert (scaling.input_factor, scaling.output_factor) == (1.0, 1.0)
    assert str(scaling).startswith("inputs x 1 up to 48 tokens, outputs x 1 up to 16, blocks of 512 as 4, ")


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"token_limit": 16}, "token_limit 16 is too small for page_size 16"),
        ({"token_limit": 64, "kv_budget": 32}, "kv_budget 32 cannot hold one request of token_limit 64"),
        ({"token_limit": 1 << 21, "kv_budget": 1 << 21}, "token_limit must be at most 1048576, got 2097152"),
        ({"page_size": 5000}, "page_size must be at most 4096, got 5000"),
        ({"max_batch": 5000}, "max_batch must be at most 4096, got 5000"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"steps_per_case": 0}, "steps_per_case must be at least 1, got 0"),
    ],
)
def test_impossible_limits(limits: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        next(batches(AZURE, **limits))


def test_describe() -> None:
    lines = describe(islice(batches(MOONCAKE), 40)).split("\n")
    assert lines[0] == "batches            40"
    assert lines[1].startswith("requests a batch   median ")
    assert "shared pages       in " in lines[4]
    assert describe([]) == "no batches"
