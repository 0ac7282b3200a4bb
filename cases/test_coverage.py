"""What a run reached is counted in cases, once per label, and survives merging and storing."""

from __future__ import annotations

import json

from cases import Case, Heads, KernelRequest, Mask, Request, Step
from cases.coverage import Reached


def _decode(*kv_lens: int) -> Step:
    return Step(tuple(Request(n - 1, 1, i) for i, n in enumerate(kv_lens)), "decode", "decode")


def _reached(*cases: Case) -> Reached:
    reached = Reached()
    for case in cases:
        reached.add(case)
    return reached


def test_borders_of_a_page() -> None:
    reached = _reached(Case((_decode(3, 4, 5, 7, 8, 9, 12, 8),), page_size=4))
    for name in ("P-1", "P", "P+1", "2P-1", "2P", "2P+1", "multiple of P from 2P on", "two pages and more"):
        assert reached.count("kv_len", name) == 1, name
    for name in ("0", "1", "limit", "W"):
        assert reached.count("kv_len", name) == 0, name


def test_page_size_1_has_no_borders_of_its_own() -> None:
    reached = _reached(Case((_decode(1, 2, 3),)))
    assert reached.count("kv_len", "P") == reached.count("kv_len", "2P") == 0
    assert reached.count("kv_len", "two pages and more") == 1
    assert reached.count("kv_len", "1") == 1


def test_window_and_limit() -> None:
    step = Step((KernelRequest(1, 4), KernelRequest(2, 5, 1), KernelRequest(6, 3, 2), KernelRequest(0, 0, 3)))
    reached = _reached(
        Case((step,), level="kernel", mask=Mask(window=4), max_seq_len=5), Case((_decode(2),), max_seq_len=3)
    )
    for name in ("W-1", "W", "W+1", "beyond W", "limit", "0"):
        assert reached.count("kv_len", name) == 1, name
    assert reached.count("kv_len", "W+P") == 1
    assert reached.count("qo_len", "more than kv_len") == 1
    assert reached.count("qo_len", "0") == 1
    assert reached.count("mask", "window") == 1


def test_settings_and_batches() -> None:
    shared = Step((Request(2, 1), Request(2, 3, 1, 0, 2)), kind="mixed")
    reached = _reached(Case((shared, _decode(4)), heads=Heads(14, 2), page_size=2, strided=True))
    labels = {
        "phase": ["prefill", "decode"],
        "kind": ["mixed", "decode"],
        "steps": [2],
        "requests": [1, 2],
        "page_size": [2],
        "group_size": [7],
        "heads": ["14/2"],
        "prefix": ["shared pages", "cached tokens before new ones"],
        "strided": ["yes"],
    }
    for group, names in labels.items():
        for name in names:
            assert reached.count(group, name) == 1, f"{group} {name}"


def test_merge_and_store() -> None:
    one, other = Case((_decode(1),)), Case((_decode(2),), page_size=2)
    both = _reached(one)
    both.merge(_reached(other))
    stored = json.loads(json.dumps(both.to_dict()))
    assert Reached.from_dict(**stored).table() == both.table() == _reached(one, other).table()
    assert both.cases == 2


def test_table() -> None:
    lines = _reached(Case((_decode(1, 16, 17),), page_size=16), Case((_decode(2),))).table().split("\n")
    assert lines[0] == "cases       2"
    assert "page_size   1: 1  16: 1" in lines
    assert "kv_len      1: 1  P: 1  P+1: 1  two pages and more: 2" in lines
    assert all(len(line) <= 110 for line in lines)


def test_events_of_a_session() -> None:
    steps = (
        Step((Request(extend_len=4), Request(2, 3, 1))),
        Step((Request(4, 2, 2, prefix_of=0, prefix_len=4),)),
        Step((Request(4, 1, 3, prefix_of=1, prefix_len=4), Request(5, 1, 1)), finished=(0,)),
        Step((Request(4, 2, 1), Request(4, 1, 0))),
    )
    reached = _reached(Case(steps, page_size=4, session=True))
    assert dict(reached.to_dict()["reached"]["session"]) == dict.fromkeys(  # type: ignore[index]
        (
            "comes",
            "comes back",
            "borrows of one who computes",
            "borrows of one who waits",
            "brings tokens along",
            "steps back",
            "leaves",
            "waits",
        ),
        1,
    )
    assert "session" not in _reached(Case(steps[:1])).table()
