"""Sessions put to backends: the correct ones pass, faults of history are told from others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from backends.contract import Batch
from backends.fi import FlashInferBackend
from backends.torch_sdpa import TorchBackend
from cases.model import Case, Request, Step
from conformance.checks import session as check
from conformance.examine import examine
from conformance.find import fails, smallest
from conformance.mutants import MUTANTS
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.render import render
from conformance.selection import cases_for, sessions_for
from conformance.session import Session
from conformance.sweep import Sweep, draw
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable

DOCS = Path(__file__).parent.parent / "docs/sessions.md"


def step(*requests: Request, finished: tuple[int, ...] = ()) -> Step:
    decode = all(r.extend_len == 1 for r in requests)
    return Step(requests, "decode" if decode else "prefill", "decode" if decode else "prefill", finished)


def session(*steps: Step) -> Case:
    return Case(steps, session=True, page_size=4)


PREFIX = session(
    step(Request(extend_len=9)),
    step(Request(extend_len=3, uid=1)),
    step(Request(8, 2, 2, prefix_of=0, prefix_len=8)),
    step(Request(10, 1, 2), Request(3, 1, 1), finished=(0,)),
    step(Request(9, 1, 3), Request(11, 1, 2)),
)
REUSED = replace(
    session(step(Request(extend_len=3), Request(extend_len=2, uid=1)), step(Request(3, 1, 2), finished=(0,))),
    page_size=2,
)


def ask(case: Case, base: str, planted: type[Any] | None = None) -> Verdict:
    with Session([base]) as opened:
        asker = opened.askers[0]
        if planted is not None:
            asker = replace(asker, spec=replace(asker.spec, factory=planted))
        return examine(Question(case), asker)


def test_correct_backends_pass_random_sessions() -> None:
    with Session(["torch", "fi", "fi-paged", "fa", "fa,fi"]) as opened:
        sweep = Sweep(opened.askers)
        for cases in draw(sessions_for([a.spec.capabilities for a in opened.askers]), 12, 11):
            sweep.ask_all(cases)
    assert sweep.clean
    assert all(tally.outcomes["session"][Outcome.PASSED] >= 8 for tally in sweep.tallies.values())


@pytest.mark.parametrize("base", ["torch", "fi-paged"])
def test_a_prefix_that_outlives_its_lender(base: str) -> None:
    verdict = ask(PREFIX, base)
    assert verdict.passed
    assert verdict.outcomes["session"] is Outcome.PASSED


def test_other_cases_are_no_business_of_the_check() -> None:
    assert "session" not in ask(replace(PREFIX, steps=PREFIX.steps[:1], session=False), "torch").outcomes


class LosesK(TorchBackend):
    """Stores the last token of a prompt in the first layer only."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        if batch.phase == "prefill" and layer_id:
            self.kv_pool.k_cache(layer_id).flatten(0, 1)[batch.out_loc[-1].long()] = 0
        return out


def test_what_is_stored_wrongly_hurts_later() -> None:
    verdict = ask(session(step(Request(extend_len=3)), step(Request(3)), step(Request(4))), "torch", LosesK)
    assert {f.step for f in verdict.findings if f.check == "pool"} == {0, 1, 2}
    assert {f.step for f in verdict.findings if f.check == "values"} >= {1, 2}
    (finding,) = [f for f in verdict.findings if f.check == "session"]
    assert finding.step == 1
    assert finding.message.startswith("what fails here (values) is right on a new backend")


class ReadsTheLeaver(TorchBackend):
    """Computes from the slots of the row's last owner, which are nobody's or another's now."""

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        rows = self.__dict__.setdefault("rows", {})
        for i, req in enumerate(batch.reqs):
            old = rows.get(req.table_idx)
            if old is not None and old[0] != req.uid:
                batch.attn_metadata.page_table[i, :1] = old[1]
            rows[req.table_idx] = (req.uid, int(batch.attn_metadata.page_table[i, 1]))


def test_slots_of_those_who_left_are_poisoned() -> None:
    left = session(step(Request(extend_len=6)), step(Request(extend_len=3, uid=1), finished=(0,)))
    verdict = ask(replace(left, page_size=1, placement="scattered"), "torch", ReadsTheLeaver)
    assert {f.step for f in verdict.findings if f.check in ("values", "session")} == {1}
    assert verdict.failed >= {"values", "poison", "session"}


class AlwaysWrong(TorchBackend):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any
    ) -> torch.Tensor:
        return super().forward(q, k, v, layer_id, batch) + 1


def test_what_is_wrong_anyway_is_no_fault_of_history() -> None:
    verdict = ask(REUSED, "torch", AlwaysWrong)
    assert verdict.failed == {"values"}
    assert verdict.outcomes["session"] is Outcome.PASSED


def test_one_step_alone_asks_the_same() -> None:
    alone = check.alone(PREFIX, 3)
    assert not alone.session
    assert alone.steps[0].kv_lens == PREFIX.steps[3].kv_lens
    assert alone.steps[0].kind == PREFIX.steps[3].kind
    assert alone.table_width == PREFIX.table_width


def test_a_failing_session_is_shown_with_all_who_are_there() -> None:
    planted = MUTANTS["row_kept_after_finish"]
    with Session([planted.base]) as opened:
        asker = Asker(planted.spec(opened.askers[0].spec), opened.askers[0].machine, "strict")
        text = render(asker, REUSED, examine(Question(REUSED), asker))
    assert "one session" in text
    assert "head 0: does not read its key at position 1" in text
    (shown,) = re.findall(r"^```text\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for line in shown.splitlines() if line != "..." and line not in text.splitlines()] == []


class FirstRow(FlashInferBackend):
    """A batch of one request reads the page table's first row, whoever owns it. It keeps nothing."""

    capabilities = replace(
        FlashInferBackend.capabilities, cuda_graph=False, window=False, layer_windows=False
    )

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        *,
        return_lse: bool,
    ) -> Any:
        if len(batch.reqs) > 1 or not batch.is_decode:
            return super()._run(q, k, v, layer_id, batch, return_lse=return_lse)
        import flashinfer  # pyright: ignore[reportMissingImports]

        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        ids = self.page_table[0, : batch.reqs[0].device_len].long()
        keys, values = (cache[ids, 0] for cache in self.paged_kv(layer_id))
        call = cast("Any", flashinfer).single_decode_with_kv_cache
        found = call(q[0], keys, values, use_tensor_cores=self.use_tensor_cores, return_lse=return_lse)
        return (found[0][None], found[1][None]) if return_lse else found[None]


def test_what_is_wrong_in_every_step_is_no_fault_of_history() -> None:
    """By what the first row holds its steps fail one check or another, on a new backend too."""
    one = Step((Request(2, 1, 0),), "decode", "decode")
    other = Step((Request(2, 1, 1),), "decode", "decode", (0,))
    case = Case((one, other), num_layers=1, placement="scattered", session=True)
    with Session([FirstRow]) as opened:
        verdicts = [examine(Question(replace(case, seed=seed)), opened.askers[0]) for seed in (0, 1, 4)]
    assert all("values" in verdict.failed for verdict in verdicts)
    assert not any("session" in verdict.failed for verdict in verdicts)


def test_some_faults_show_in_sessions_alone() -> None:
    planted = MUTANTS["waiting_forgotten"]
    with Session([planted.base]) as opened:
        correct = opened.askers[0]
        asker = Asker(planted.spec(correct.spec), correct.machine, correct.mode)
        found = smallest(asker, "values", cases_for([asker.spec.capabilities]), seed=1, max_examples=100)
    assert found is None


@pytest.fixture
def full() -> Iterator[Asker]:
    """`fi` on the full simulated device."""
    try:
        with Session(["fi"], device_sim="full") as opened:
            yield opened.askers[0]
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pad_rows_keep_out_loc", "reuse_staging"])
def test_planted_faults_show_in_sessions(name: str, full: Asker) -> None:
    """Padding that stores where a finished request stood; a staging buffer that is rewritten before its copy."""
    planted = MUTANTS[name]
    asker = Asker(planted.spec(full.spec), full.machine, full.mode)
    leaves = session(step(Request(), Request(uid=1)), step(Request(1), finished=(1,)))
    assert fails(leaves, asker, planted.check)
    assert not fails(leaves, full, planted.check)
