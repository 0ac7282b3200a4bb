"""How sharp the default values see: one dropped, extra or foreign key at any position, beside plain random values.

Each trial is one decode request among three. The fault is planted in the page list that a kernel adapter is given, so
that everything behind it, the fake included, is the real flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from backends.contract import Attention, EngineContext, KernelAdapter, KernelCall
from cases.model import Case, Heads, KernelRequest, Step
from conformance.examine import examine
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker, Trial

Fault = Literal["dropped", "extra", "foreign"]
FAULTS: tuple[Fault, ...] = ("dropped", "extra", "foreign")
KV_LENS = (16, 128, 2048, 8192)
USUAL_TOLERANCE = 1e-2
BASE = "kernel:fa-kvcache"


@dataclass(frozen=True)
class Sharpness:
    """Trials of one fault at one length: how many the values check caught, and how many plain random values at 1e-2."""

    fault: Fault
    kv_len: int
    trials: int
    caught: int
    caught_usual: int

    def __str__(self) -> str:
        return (
            f"{self.fault:8} kv_len {self.kv_len:5}   needles {self.caught:5}/{self.trials}   "
            f"random values at 1e-2 {self.caught_usual:5}/{self.trials}"
        )


def measure(trials: int, kv_lens: tuple[int, ...] = KV_LENS) -> Iterator[Sharpness]:
    """Run the trials; one line a fault and length."""
    with Session([BASE]) as session:
        correct = session.askers[0]
        for kv_len in kv_lens:
            for fault in FAULTS:
                yield _sharpness(correct, fault, kv_len, trials)


def _sharpness(correct: Asker, fault: Fault, kv_len: int, trials: int) -> Sharpness:
    caught = usual = 0
    for trial in range(trials):
        rng = np.random.default_rng((trial, kv_len, FAULTS.index(fault)))
        asker = _faulty(correct, fault, int(rng.integers(0, kv_len)))
        case = _case(kv_len, trial)
        caught += "values" in examine(Question(case), asker, {"values"}).failed
        usual += _usual(Question(replace(case, values="random")), asker)
    return Sharpness(fault, kv_len, trials, caught, usual)


def _case(kv_len: int, seed: int) -> Case:
    requests = tuple(KernelRequest(qo_len=1, kv_len=n, uid=i) for i, n in enumerate((8, kv_len, 8)))
    return Case(
        level="kernel",
        num_layers=1,
        heads=Heads(num_qo_heads=2, num_kv_heads=1, head_dim_qk=64, head_dim_vo=64),
        steps=(Step(requests=requests, phase="decode", kind="decode"),),
        placement="scattered",
        dtype="float16",
        seed=seed,
    )


def _faulty(correct: Asker, fault: Fault, position: int) -> Asker:
    """The adapter, given the middle request's pages (of one slot each) with one fault."""

    class Faulty:
        def __init__(self, engine: EngineContext) -> None:
            self.num_pages = engine.num_pages
            self.inner: KernelAdapter = correct.spec.factory(engine)

        def attend(self, call: KernelCall) -> Attention:
            pages, kv_lens = [list(p) for p in call.pages], list(call.kv_lens)
            mine = pages[1]
            if fault == "dropped":
                del mine[position]
            elif fault == "extra":
                taken = {page for own in pages for page in own}
                mine.insert(position, next(page for page in range(self.num_pages) if page not in taken))
            else:
                mine[position] = pages[0][position % len(pages[0])]
            kv_lens[1] = len(mine)
            return self.inner.attend(replace(call, pages=pages, kv_lens=kv_lens))

    # An extra key holds finite poison, as an old key would; NaN would be seen by anyone.
    capabilities = replace(correct.spec.capabilities, reads_unowned_slots=True)
    return Asker(
        replace(correct.spec, factory=Faulty, capabilities=capabilities), correct.machine, correct.mode
    )


def _usual(question: Question, asker: Asker) -> bool:
    """Whether the usual comparison sees it: rounded output against the oracle, at 1e-2."""
    trial = Trial(question, asker)
    values = trial.first.steps[0].layers[0].values
    if values is None:
        return True
    error = (values.double() - trial.answer(0, 0).state.out).abs()
    return not bool((error <= USUAL_TOLERANCE).all())
