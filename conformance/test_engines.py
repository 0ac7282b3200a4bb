"""Engines' own backends behind the contract. Tests marked `engine` need SGLang, which `make engine` installs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engines.path import look_in
from backends.registry import BackendError
from cases.model import Case, Heads, Request, Step
from conformance.examine import examine
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker

INSTALLED = Path(__file__).resolve().parent.parent / "build" / "engines" / "sglang"
SGLANG = ("backends.engines.sglang:FlashInfer", "backends.engines.sglang:FlashAttention")

DECODE = Case(
    (Step((Request(cached_len=4), Request(uid=1, cached_len=19)), phase="decode", kind="decode"),),
    page_size=4,
    placement="scattered",
)
CASES = {
    "decode": DECODE,
    "prefill": Case((Step((Request(extend_len=5), Request(uid=1, extend_len=1))),), page_size=4),
    "prefix": Case((Step((Request(cached_len=6, extend_len=3), Request(uid=1, extend_len=5))),), page_size=4),
    "mixed": Case(
        (Step((Request(cached_len=9), Request(uid=1, extend_len=7)), kind="mixed"),),
        heads=Heads(8, 2),
        page_size=16,
    ),
}

MINISGL = {
    "core": """
class Context:
    def __init__(self, page_size): self.page_size = page_size
class Batch:
    def __init__(self, reqs, phase): self.reqs, self.phase = reqs, phase
    is_decode = property(lambda self: self.phase == "decode")
    is_prefill = property(lambda self: self.phase == "prefill")
_GLOBAL_CTX = None
def set_global_ctx(context):
    global _GLOBAL_CTX
    assert _GLOBAL_CTX is None
    _GLOBAL_CTX = context
""",
    "distributed": "def set_tp_info(rank, size): pass",
    "attention.fa": """
import minisgl.core
import torch, zmq
from sgl_kernel.flash_attn import flash_attn_with_kvcache
class FlashAttentionBackend:
    def __init__(self, config):
        context = minisgl.core._GLOBAL_CTX
        self.pool, self.table, self.page_size = context.kv_cache, context.page_table, context.page_size
    def prepare_metadata(self, batch):
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=self.pool.device)
        longest = max(r.device_len for r in batch.padded_reqs)
        rows = [self.table[r.table_idx, : longest : self.page_size] for r in batch.padded_reqs]
        starts = [sum(r.extend_len for r in batch.padded_reqs[:i]) for i in range(len(rows) + 1)]
        batch.attn_metadata = dict(
            page_table=torch.stack(rows) // self.page_size,
            cache_seqlens=ints([r.device_len for r in batch.padded_reqs]),
            cu_seqlens_q=ints(starts),
            max_seqlen_q=max(r.extend_len for r in batch.padded_reqs),
        )
    def forward(self, q, k, v, layer_id, batch, *, softmax_scale=None):
        self.pool.store_kv(k, v, batch.out_loc, layer_id)
        caches = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)
        return flash_attn_with_kvcache(q, *caches, causal=True, softmax_scale=softmax_scale, **batch.attn_metadata)
    def init_capture_graph(self, max_seq_len, bs_list): raise NotImplementedError
    def prepare_for_capture(self, batch): raise NotImplementedError
    def prepare_for_replay(self, batch): raise NotImplementedError
""",
}
"""A package with mini-sglang's interface and a small backend in it: mini-sglang itself is not part of this project."""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    for name, text in MINISGL.items():
        path = tmp_path / "python" / "minisgl" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "minisgl"]:
        del sys.modules[name]


def test_a_checkout_with_minisgls_interface_is_asked(checkout: Path) -> None:
    look_in(str(checkout))
    with Session(["backends.engines.minisgl:FlashAttention"], device_sim="light") as session:
        verdicts = {name: examine(Question(case), session.askers[0]) for name, case in CASES.items()}
    assert not [(name, v.findings) for name, v in verdicts.items() if not v.passed]


def _nowhere(name: str) -> None:
    del name


@pytest.mark.parametrize("name", ["sglang:FlashInfer", "minisgl:FlashAttention"])
def test_an_engine_that_is_not_there_is_said_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", _nowhere)
    with pytest.raises(BackendError, match=r"is not installed: .*--engine-path"):
        Session([f"backends.engines.{name}"], device_sim="light").__enter__()
    with Session(["torch"]) as session:  # nothing was left behind
        assert session.askers


@pytest.fixture(scope="module")
def askers() -> Iterator[dict[str, Asker]]:
    if not (INSTALLED / ".installed").is_file():
        pytest.skip("SGLang is not installed: make engine installs it")
    look_in(str(INSTALLED))
    with Session(SGLANG, device_sim="full") as session:
        yield {asker.spec.name: asker for asker in session.askers}


def _verdict(askers: dict[str, Asker], name: str, case: Case) -> Verdict:
    return examine(Question(case), askers[name])


@pytest.mark.engine
@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize("kind", CASES)
def test_sglang_is_right(askers: dict[str, Asker], name: str, kind: str) -> None:
    verdict = _verdict(askers, name, CASES[kind])
    assert not verdict.findings
    assert {"metadata", "lifecycle", "values", "pool", "poison"} <= verdict.outcomes.keys()
    assert ("graphs" in verdict.outcomes) == (kind == "decode")


@pytest.mark.engine
@pytest.mark.parametrize("name", SGLANG)
def test_what_sglang_is_known_to_get_wrong_is_still_wrong(askers: dict[str, Asker], name: str) -> None:
    for waiver in askers[name].spec.waivers:
        assert Outcome.KNOWN in _verdict(askers, name, waiver.case).outcomes.values(), waiver


@pytest.mark.engine
def test_a_plan_that_raised_leaves_the_next_case_nothing(askers: dict[str, Asker]) -> None:
    (raises,) = (w.case for w in askers[SGLANG[0]].spec.waivers if w.outcome == "raised")
    assert _verdict(askers, SGLANG[0], raises).outcomes["graphs"] is Outcome.KNOWN
    assert not _verdict(askers, SGLANG[0], DECODE).findings


@pytest.mark.engine
def test_a_length_that_sglang_loses_is_found(
    askers: dict[str, Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in its index builder: the oldest key of every request is left out."""
    translator: Any = importlib.import_module("sglang.srt.mem_cache.kv_index_translator").KVIndexTranslator
    pack: Any = translator.pack_read_stream

    def shifted(self: Any, plan: Any, *, out: torch.Tensor, **rest: Any) -> Any:
        answer = pack(self, plan, out=out, **rest)
        out[0] = out[1]
        return answer

    monkeypatch.setattr(translator, "pack_read_stream", shifted)
    verdict = _verdict(askers, SGLANG[0], DECODE)
    assert "metadata" in verdict.failed
    assert any("does not read the key at position 0" in f.message for f in verdict.findings)
