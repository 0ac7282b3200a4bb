"""Faults that show in one of `forward` and `forward_return_lse` alone, in a batch that comes again, or at once."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from backends.fa import FlashAttentionBackend
from cases.model import Case, Request, Step
from conformance.examine import examine
from conformance.outcome import Verdict
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker

pytestmark = pytest.mark.cpu


class Plain(FlashAttentionBackend):
    capabilities = replace(FlashAttentionBackend.capabilities, cuda_graph=False)


class ForwardGivesNothing(Plain):
    def forward(self, *given: Any) -> Any:
        super().forward(*given)


class ForwardIsDoubled(Plain):
    def forward(self, *given: Any) -> Any:
        return super().forward(*given) * 2


class ForwardWithLseIsDoubled(Plain):
    def forward_return_lse(self, *given: Any) -> Any:
        out, lse = super().forward_return_lse(*given)
        return out * 2, lse


class ForwardChangesQ(Plain):
    def forward(self, q: Any, *given: Any) -> Any:
        out = super().forward(q, *given)
        q.zero_()
        return out


class ForwardStoresElsewhere(Plain):
    def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
        out = super().forward(q, k, v, layer_id, batch)
        self.kv_pool.k_cache(layer_id).view(-1)[-8:] = 7
        return out


class LseIsDoubled(Plain):
    def forward_return_lse(self, *given: Any) -> Any:
        out, lse = super().forward_return_lse(*given)
        return out, lse * 2


class ForwardBreaksOffAtOnce(LseIsDoubled):
    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        self.prepared: int = getattr(self, "prepared", 0) + 1
        if self.prepared == 1:
            raise RuntimeError("not yet")


class NothingTheSecondTime(Plain):
    capabilities = replace(Plain.capabilities, lse=None)

    def forward(self, *given: Any) -> Any:
        self.called: int = getattr(self, "called", 0) + 1
        return None if self.called > 2 else super().forward(*given)


class MakesNone(Plain):
    def __new__(cls, *_: Any) -> Any:  # pyright: ignore[reportInconsistentConstructor]
        return None


class Cancels(Plain):
    def forward(self, *_: Any) -> Any:
        raise asyncio.CancelledError


class Skips(Plain):
    def forward(self, *_: Any) -> Any:
        pytest.skip("not here")


class CannotBeSaid(Plain):
    def forward(self, *_: Any) -> Any:
        class SilentError(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise SilentError


def asked(backend: type, seed: int, batches: int = 1) -> Verdict:
    requests = (Request(0, 3), Request(2, 1, uid=1))
    case = Case(steps=(Step(requests=requests),) * batches, seed=seed)
    with Session([f"{__name__}:{backend.__name__}"]) as session:
        asker = session.askers[0]
        assert isinstance(asker, Asker)
        return examine(Question(case), asker)


SEEDS = {"forward_return_lse": 0, "forward": 2}
"""A case's seed decides which method its first execution calls."""


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize(
    ("backend", "check", "said"),
    [
        (ForwardGivesNothing, "values", "the output is None, must be a tensor"),
        (ForwardIsDoubled, "values", "the output at row"),
        (ForwardWithLseIsDoubled, "values", "the output at row"),
        (LseIsDoubled, "lse", "the LSE at row"),
        (NothingTheSecondTime, "determinism", "gave different bits when it was run again"),
        (MakesNone, "values", "construction raised: TypeError: the class made None, not a backend"),
        (Cancels, "values", "forward raised: CancelledError:"),
        (Skips, "values", "forward raised: Skipped: not here"),
        (CannotBeSaid, "values", "forward raised: SilentError: (it cannot be put in words)"),
    ],
)
def test_both_methods_are_judged(backend: type, check: str, said: str, seed: int) -> None:
    findings = asked(backend, seed).findings
    assert {f.check for f in findings} <= {check, "smoke", "relations", "refusals"}, findings
    assert any(said in f.message for f in findings if f.check == check), findings


@pytest.mark.parametrize(
    ("backend", "check"), [(ForwardChangesQ, "inputs"), (ForwardStoresElsewhere, "pool")]
)
def test_what_the_first_execution_alone_shows_is_seen_of_forward(backend: type, check: str) -> None:
    assert [f.check for f in asked(backend, SEEDS["forward"]).findings][:1] == [check]


def test_the_method_that_differs_is_named() -> None:
    for seed, said in (
        (0, "forward, unlike forward_return_lse: "),
        (2, "forward_return_lse, unlike forward: "),
    ):
        backend = ForwardIsDoubled if seed == 0 else ForwardWithLseIsDoubled
        assert asked(backend, seed).findings[0].message.startswith(said)


def test_an_lse_is_judged_where_the_other_method_broke_off_before() -> None:
    findings = asked(ForwardBreaksOffAtOnce, SEEDS["forward"], batches=2).findings
    assert {"values", "lse"} <= {f.check for f in findings}
