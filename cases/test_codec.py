"""Cases as text: what is written reads back the same, and what is wrong is told in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from cases import Case, CaseError, KernelRequest, Request, Step, digest, from_json, load, save, short, to_json
from cases.strategies import engine_cases, kernel_cases

ONE = Case((Step((Request(4, 3), Request(0, 2, 1))),), page_size=4)


@settings(max_examples=150, database=None, deadline=None)
@given(engine_cases() | kernel_cases())
def test_round_trip(case: Case) -> None:
    text = to_json(case)
    assert from_json(text) == case
    assert to_json(from_json(text)) == text
    assert " " not in text


def test_canonical_text_is_pinned() -> None:
    """Digests are names in reports and files: a change of the text form would orphan them."""
    assert to_json(ONE) == (
        '{"page_size":4,"steps":[{"requests":[{"cached_len":4,"extend_len":3},{"extend_len":2,"uid":1}]}]}'
    )
    assert digest(ONE) == "50fa4eb86a8febacbc9aebd1a3e78870815279af0fe897da4287cb284797c9a8"
    assert short(digest(ONE)) == digest(ONE)[:8]


def test_lengths_of_a_kernel_request_are_always_written() -> None:
    case = Case((Step((KernelRequest(),)),), level="kernel")
    assert '{"kv_len":1,"qo_len":1}' in to_json(case)
    assert from_json(to_json(case)) == case


def test_order_of_keys_and_written_defaults_do_not_matter() -> None:
    requests = '[{"extend_len":3,"cached_len":4},{"uid":1,"extend_len":2}]'
    text = f'{{"page_size":4, "layout":"NHD", "steps":[{{"requests":{requests}}}]}}'
    assert digest(from_json(text)) == digest(ONE)


def test_a_whole_number_is_a_number() -> None:
    case = from_json('{"steps":[{"requests":[{}]}],"sm_scale":1}')
    assert to_json(case) == '{"sm_scale":1.0,"steps":[{"requests":[{}]}]}'


REFUSED = {
    '{"steps":[{"requests":[{},{"uid":1,"extend_len":0}]}]}': (
        "steps[0].requests[1].extend_len must be at least 1, got 0"
    ),
    '{"steps":[{"requests":[{"cached_len":1.5}]}]}': (
        "steps[0].requests[0].cached_len must be an integer, got 1.5"
    ),
    '{"steps":[{"requests":[{"cached_len":99999999999999999999}]}]}': (
        "steps[0].requests[0].cached_len must be at most 1048576, got 99999999999999999999"
    ),
    '{"steps":[{"requests":[{"extend":1}]}]}': (
        "steps[0].requests[0]: unknown key 'extend', did you mean 'extend_len'?"
    ),
    '{"steps":[{"requests":[{"qo_len":1,"cached_len":4}]}]}': (
        "steps[0].requests[0]: unknown key 'cached_len',"
        " the keys are kv_len, prefix_len, prefix_of, qo_len, uid"
    ),
    '{"step":[]}': "unknown key 'step', did you mean 'steps'?",
    "{}": "steps is missing",
    '{"steps":[]}': "steps must hold at least 1, got none",
    '{"steps":[{"requests":[]}]}': "steps[0].requests must hold at least 1, got none",
    '{"steps":3}': "steps must be an array, got 3",
    '{"steps":[{"requests":[null]}]}': "steps[0].requests[0] must be an object, got null",
    '{"steps":[{"requests":["abc"]}]}': 'steps[0].requests[0] must be an object, got "abc"',
    "[]": "the document must be an object, got []",
    '{"steps":[{"requests":[{}]}],"dtype":"half"}': (
        "dtype must be one of 'float16', 'bfloat16', 'float32', got \"half\""
    ),
    '{"steps":[{"requests":[{}]}],"strided":1}': "strided must be true or false, got 1",
    '{"steps":[{"requests":[{}]}],"page_size":"4"}': 'page_size must be an integer, got "4"',
    '{"steps":[{"requests":[{}]}],"sm_scale":0}': "sm_scale must be at least 1e-06, got 0",
    '{"steps":[{"requests":[{}]}],"seed":4294967296}': "seed must be below 4294967296, got 4294967296",
    '{"steps":[{"requests":[{}]}],"sm_scale":NaN}': "NaN is no JSON number",
    '{"steps":[{"requests":[{}]}],"sm_scale":1e999}': "sm_scale must be finite, got Infinity",
    '{"steps":[{"requests":[{}]}],"seed":1,"seed":2}': "key 'seed' stands twice in one object",
    '{"steps":[{"requests":[{}]}]': "is not JSON: expecting ',' delimiter at line 1, column 29",
    "": "is not JSON: expecting value at line 1, column 1",
    '{"\\ud800":1}': "is not JSON: unexpected end of hex escape at line 1 column 9",
    "[" * 100_000: "is nested too deeply",
    f'{{"steps":[{{"requests":[{{"extend_len":{"9" * 5000}}}]}}]}}': "holds a number of more than 4300 digits",
    f'{{"steps":[{{"requests":[{{"uid":{1 << 63}}}]}}]}}': (
        "steps[0].requests[0].uid must be at most 9223372036854775807, got 9223372036854775808"
    ),
    f'{{"steps":[{{"requests":[{{"extend_len":{"9" * 400}}}]}}]}}': (
        f"steps[0].requests[0].extend_len must be at most 1048576, got {'9' * 57}..."
    ),
    '{"kv_dtype":"float8_e5m2","k_scale":1e-7,"steps":[{"requests":[{}]}]}': (
        "k_scale must be at least 1e-06, got 1e-07"
    ),
    '{"kv_dtype":"float8_e5m2","v_scale":1e7,"steps":[{"requests":[{}]}]}': (
        "v_scale must be at most 1000000, got 10000000.0"
    ),
    '{"sm_scale":1e308,"steps":[{"requests":[{}]}]}': "sm_scale must be at most 1000000, got 1e+308",
    '{"mask":{"soft_cap":1e-300},"steps":[{"requests":[{}]}]}': (
        "mask.soft_cap must be at least 1e-06, got 1e-300"
    ),
    '{"steps":[{"requests":[{}]}],"heads":{"num_qo_heads":3,"num_kv_heads":2}}': (
        "heads: num_qo_heads 3 is not a multiple of num_kv_heads 2"
    ),
    '{"steps":[{"requests":[{"extend_len":2}],"phase":"decode","kind":"decode"}]}': (
        "steps[0]: a decode step computes one token per request: every extend_len must be 1"
    ),
    '{"level":"kernel","steps":[{"requests":[{"qo_len":2}],"phase":"decode","kind":"decode"}]}': (
        "steps[0]: a decode step computes one token per request: every qo_len must be 1"
    ),
    '{"steps":[{"requests":[{"extend_len":9,"cached_len":5}]}],"max_seq_len":4}': (
        "max_seq_len 4 is below the longest kv_len 14"
    ),
    '{"steps":[{"requests":[{"qo_len":2}]}]}': "step 0, uid 0: a case of level engine holds Requests only",
    '{"steps":[{"requests":[{"prefix_of":3,"prefix_len":4,"cached_len":4}]}]}': (
        "step 0, uid 0: prefix_of 3 is no other request of this step"
    ),
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.items(), ids=list(REFUSED.values()))
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises(CaseError) as caught:
        from_json(text, name="x.json")
    assert str(caught.value) == f"x.json: {sentence}"


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    written = save(path, ONE, why="a test", issue="flashinfer#1654")
    assert load(path) == written
    assert written.case == ONE
    assert written.digest == digest(ONE)[:32]


def _file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "x.json"
    save(path, ONE, why="a test")
    plain = json.loads(path.read_text())
    plain |= changes
    path.write_text(json.dumps({key: value for key, value in plain.items() if value is not None}))
    return path


def test_a_file_by_hand_needs_no_digest(tmp_path: Path) -> None:
    assert load(_file(tmp_path, digest=None)).case == ONE


BAD_FILES: dict[str, dict[str, Any]] = {
    "digest 0123456789abcdef0123456789abcdef does not match the case, which has " + digest(ONE)[:32]: {
        "digest": "0123456789abcdef0123456789abcdef"
    },
    "unknown key 'reason', the keys are case, digest, issue, why": {"reason": "none"},
    "unknown key 'pagesize', did you mean 'page_size'?": {"case": {"pagesize": 3, "steps": []}},
    "page_size must be at least 1, got 0": {"case": {"page_size": 0, "steps": [{"requests": [{}]}]}},
    "max_seq_len 1 is below the longest kv_len 2": {
        "case": {"max_seq_len": 1, "steps": [{"requests": [{"extend_len": 2}]}]}
    },
    "case is missing": {"case": None},
    "why is missing": {"why": None},
}


@pytest.mark.parametrize(("sentence", "changes"), BAD_FILES.items(), ids=list(BAD_FILES))
def test_bad_file(tmp_path: Path, sentence: str, changes: dict[str, Any]) -> None:
    path = _file(tmp_path, **changes)
    with pytest.raises(CaseError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {sentence}"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as caught:
        load(tmp_path / "none.json")
    assert str(caught.value) == f"{tmp_path / 'none.json'}: cannot be read (No such file or directory)"


def test_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CaseError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: is not UTF-8 text"
