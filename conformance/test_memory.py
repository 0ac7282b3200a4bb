"""What a trial held goes when it ends, by reference counting: the cyclic collector may be far away."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from backends.contract import Batch, Capabilities, EngineContext
from backends.registry import BUILT_IN
from cases.model import Case, Request, Step
from conformance import memory
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.selection import smoke_cases
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable

STEPS = Case(
    (
        Step((Request(3, 1, 0), Request(8, 1, 1)), "decode", "decode"),
        Step((Request(0, 5, 7),)),
        Step((Request(5, 1, 7),), "decode", "decode"),
    ),
    page_size=4,
    dtype="float16",
)


@pytest.fixture
def uncollected() -> Iterator[list[Any]]:
    """No collection, but for one that keeps what it finds in the list."""
    gc.freeze()  # what lies about already is none of ours
    gc.disable()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def _watched(asker: Asker) -> tuple[Asker, list[weakref.ref[Any]]]:
    made: list[weakref.ref[Any]] = []

    def factory(engine: EngineContext) -> Any:
        backend = asker.spec.factory(engine)
        made.append(weakref.ref(backend))
        return backend

    return replace(asker, spec=replace(asker.spec, factory=factory)), made


def _names(found: list[Any]) -> list[str]:
    return sorted({type(x).__qualname__ for x in found})


@pytest.mark.parametrize("kind", ["light", "full"])
@pytest.mark.parametrize("name", [*BUILT_IN, "fa,fi"])
def test_a_trial_leaves_no_cycles_behind(
    name: str, kind: Literal["light", "full"], uncollected: list[Any]
) -> None:
    with ExitStack() as stack:
        try:
            session = stack.enter_context(Session([name], device_sim=kind))
        except DeviceUnavailable as error:
            pytest.skip(str(error))
        asker, made = _watched(session.askers[0])
        cases = smoke_cases(asker.spec.capabilities)
        for case in [*cases, STEPS] if asker.spec.level == "engine" else cases:
            assert examine(Question(case), asker).passed
        assert made
        assert [ref() for ref in made if ref() is not None] == []
        gc.collect()
        held = [x for x in uncollected if isinstance(x, torch.Tensor)]
        assert not held, f"{len(held)} tensors lie in cycles of {_names(uncollected)}"


class Raises:
    """Keeps what it raises, as code does that raises it later once more."""

    capabilities = Capabilities(library=frozenset())

    def __init__(self, engine: EngineContext) -> None:
        self.workspace = torch.zeros(1 << 10)

    def prepare_metadata(self, batch: Batch) -> None:
        try:
            self._prepare(batch)
        except RuntimeError as error:
            self.error = error
            raise ValueError from error

    def _prepare(self, batch: Batch) -> None:
        workspace = self.workspace
        raise RuntimeError(f"{len(batch.reqs)} requests, {workspace.nbytes} bytes")

    def forward(self, *_: Any) -> None: ...


def test_an_exception_keeps_nothing_alive(uncollected: list[Any]) -> None:
    with Session([Raises]) as session:
        asker, made = _watched(session.askers[0])
        for case in smoke_cases(asker.spec.capabilities):
            assert examine(Question(case), asker).outcomes["values"] is Outcome.RAISED
        assert made
        assert [ref() for ref in made if ref() is not None] == []
    del uncollected


class Cyclic(Raises):
    """Holds itself, as wrappers do whose methods engines replace by partial functions of them."""

    size = 1 << 20

    def __init__(self, engine: EngineContext) -> None:
        self.own = self
        self.workspace = torch.zeros(self.size, dtype=torch.uint8)

    def prepare_metadata(self, batch: Batch) -> None: ...


def test_cycles_of_a_backend_are_collected_before_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def alive() -> int:
        return sum(ref() is not None for ref in made)

    # What a whole process holds also falls, whenever a library gives memory back: a level of its own is exact.
    monkeypatch.setattr(memory, "resident", lambda: (1 + alive()) * Cyclic.size)
    monkeypatch.setattr(memory, "RISE", 3 * Cyclic.size)
    monkeypatch.setattr(memory, "Level", type("Level", (), {"bytes": 0}))
    gc.disable()
    try:
        with Session([Cyclic]) as session:
            asker, made = _watched(session.askers[0])
            case = smoke_cases(asker.spec.capabilities)[0]
            counts: list[int] = []
            for _ in range(10):
                examine(Question(case), asker, ["smoke"])  # one backend object
                counts.append(alive())
        assert counts == [1, 2, 3, 4, 0, 1, 2, 3, 0, 1]
    finally:
        gc.enable()


@pytest.mark.skipif(not memory.resident(), reason="there is no /proc")
def test_memory_that_is_taken_is_seen() -> None:
    before = memory.resident()
    taken = torch.ones(256 << 20, dtype=torch.uint8)
    assert memory.resident() - before > taken.nbytes // 2
