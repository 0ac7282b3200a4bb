"""The committed mix holds what the specification asks for; a bad one is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import CaseError
from cases.mix import MIX_FILE, default_mix, load_mix, spread


def test_default_mix() -> None:
    for level in (default_mix().engine, default_mix().kernel):
        assert {1, 2, 4, 8, 16, 32, 64, 256} <= {size for size, _ in level.page_size}
        assert {1, 2, 4, 5, 7, 8} <= {qo // kv for (qo, kv), _ in level.heads}
        assert {"float16", "bfloat16", "float32"} == {dtype for dtype, _ in level.dtype}
        needles = dict(level.values)["needles"]
        assert needles > sum(weight for _, weight in level.values) / 2
        assert (level.max_requests, level.token_limit) == (8, 64)
        assert {1, 16, 100} <= {window for window, _ in level.window}
        assert {(1.0, 2.0), (0.5, 1.0), (0.5, 2.0)} <= {scales for scales, _ in level.kv_scales}


def test_large_heads_are_a_small_share() -> None:
    """A head of 256 costs four times what one of 64 does."""
    for level in (default_mix().engine, default_mix().kernel):
        large = sum(weight for (qk, _), weight in level.head_dims if qk > 128)
        assert large / sum(weight for _, weight in level.head_dims) <= 0.05


def test_long_cases_are_a_small_share() -> None:
    for level in (default_mix().engine, default_mix().kernel):
        long = sum(weight for size, weight in level.page_size if size >= level.long_page_size)
        assert long / sum(weight for _, weight in level.page_size) <= 0.15


def _first_weight(mix: dict[str, Any]) -> None:
    mix["engine"]["page_size"][0][1] = 0


def _unknown(mix: dict[str, Any]) -> None:
    mix["engine"]["pagesize"] = []


def _empty(mix: dict[str, Any]) -> None:
    mix["kernel"]["dtype"] = []


def _dtype(mix: dict[str, Any]) -> None:
    mix["engine"]["dtype"] = [["half", 1]]


def _no_kernel(mix: dict[str, Any]) -> None:
    del mix["kernel"]


def _kernel_chunks(mix: dict[str, Any]) -> None:
    mix["kernel"]["batch"] = [["chunked", 1]]


def _kernel_join(mix: dict[str, Any]) -> None:
    mix["kernel"]["later"] = [[["join"], 1]]


BAD: dict[str, Callable[[dict[str, Any]], None]] = {
    "engine.page_size[0][1] must be at least 1, got 0": _first_weight,
    "engine: unknown key 'pagesize', did you mean 'page_size'?": _unknown,
    "kernel.dtype must hold at least 1, got none": _empty,
    "engine.dtype[0][0] must be one of 'float16', 'bfloat16', 'float32', got \"half\"": _dtype,
    "kernel is missing": _no_kernel,
    "kernel.batch holds 'chunked', which only the engine level has": _kernel_chunks,
    "kernel.later holds ('join',), which only the engine level has": _kernel_join,
}


@pytest.mark.parametrize(("sentence", "spoil"), BAD.items(), ids=list(BAD))
def test_bad_mix(tmp_path: Path, sentence: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    plain = json.loads(MIX_FILE.read_text())
    spoil(plain)
    path = tmp_path / "mix.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(CaseError) as caught:
        load_mix(path)
    assert str(caught.value) == f"{path}: {sentence}"


def test_no_json(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text("{")
    with pytest.raises(CaseError, match=r"mix\.json: is not JSON: "):
        load_mix(path)


def test_spread_keeps_order_and_weights() -> None:
    assert spread([("a", 1), ("b", 2), ("c", 1)], 8) == ("a", "a", "b", "b", "b", "b", "c", "c")
    rare = spread([("a", 10_000), ("b", 1)], 256)
    assert (rare.count("a"), rare.count("b")) == (255, 1)
    with pytest.raises(CaseError, match="holds 3 values, at most 2 fit"):
        spread([(i, 1) for i in range(3)], 2)
