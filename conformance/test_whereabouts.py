"""Where an exception left a backend is said in its finding, shortly, and whose fault it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from backends.contract import Batch, Capabilities, EngineContext
from backends.fi import FlashInferBackend
from conformance.examine import examine
from conformance.find import smallest
from conformance.outcome import Verdict
from conformance.question import Question
from conformance.selection import cases_for, smoke_cases
from conformance.session import Session
from fakes import flashinfer
from fakes.cuda import DeviceUnavailable
from fakes.flashinfer import kernels

HERE = "test_whereabouts.py"
KINDS: tuple[Literal["light", "full"], ...] = ("light", "full")
both_devices = pytest.mark.parametrize("kind", KINDS)


class Simple:
    """Fails in the methods below."""

    capabilities = Capabilities(library=frozenset({"flashinfer"}), head_dims=frozenset({(64, 64)}))

    def __init__(self, engine: EngineContext) -> None:
        self.engine = engine

    def prepare_metadata(self, batch: Batch) -> None: ...

    def forward(self, q: Any, k: Any, v: Any, layer: int, batch: Batch) -> Any: ...


class Scatters(Simple):
    def prepare_metadata(self, batch: Batch) -> None:
        table = self.engine.page_table
        table.index_copy_(0, torch.zeros(3, dtype=torch.long, device=table.device), table[:1].clone())


class StoresTooMuch(Simple):
    def forward(self, q: Any, k: Any, v: Any, layer: int, batch: Batch) -> Any:
        self.engine.kv_pool.store_kv(k[:, :, :7], v, batch.out_loc, layer)


class IsRefused(Simple):
    def forward(self, q: Any, k: Any, v: Any, layer: int, batch: Batch) -> Any:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, kv_layout="DHN")


class Breaks(Simple):
    def forward(self, q: Any, k: Any, v: Any, layer: int, batch: Batch) -> Any:
        return flashinfer.single_prefill_with_kv_cache(q, k, v)


class Says(Simple):
    def __init__(self, engine: EngineContext) -> None:
        raise RuntimeError("nvcc failed:\n\n  error: no such file\n")


class RaisesHereAndThere(Simple):
    capabilities = Capabilities(library=frozenset())

    def prepare_metadata(self, batch: Batch) -> None:
        if len(batch.reqs) > 1:
            raise ValueError("more than one request")
        if batch.reqs[0].device_len > 1:
            raise IndexError("more than one token")


def _message(backend: type[Any], kind: Literal["light", "full"] = "light") -> str:
    try:
        with Session([backend], device_sim=kind) as session:
            (asker,) = session.askers
            case = smoke_cases(asker.spec.capabilities)[0]
            verdict: Verdict = examine(Question(case), asker)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    message = next(f.message for f in verdict.findings if f.check == "values")
    assert "\n" not in message
    assert str(inspect.getsourcefile(Simple)) not in message
    return message


def _place(method: Callable[..., Any], after: int) -> str:
    return f"(at {HERE}:{inspect.getsourcelines(method)[1] + after} in {method.__name__}"


@both_devices
def test_the_last_line_of_the_backend_is_named(kind: Literal["light", "full"]) -> None:
    message = _message(Scatters, kind)
    assert message.startswith("prepare_metadata raised: IndexError: index_copy_(): ")
    assert message.endswith(_place(Scatters.prepare_metadata, 2) + ")")


@both_devices
def test_what_the_pool_is_given_wrong_is_the_backends_fault(kind: Literal["light", "full"]) -> None:
    message = _message(StoresTooMuch, kind)
    assert message.endswith(_place(StoresTooMuch.forward, 1) + ")")


@both_devices
def test_a_refusal_of_a_library_is_the_backends_fault(kind: Literal["light", "full"]) -> None:
    message = _message(IsRefused, kind)
    assert message.startswith("forward raised: KeyError: 'Invalid kv_layout DHN'")
    assert message.endswith(_place(IsRefused.forward, 1) + ")")


@both_devices
def test_what_breaks_inside_a_fake_says_so(
    kind: Literal["light", "full"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LN2", "")
    message = _message(Breaks, kind)
    assert message.startswith("forward raised: TypeError: ")
    assert _place(Breaks.forward, 1) + ", inside fakes/flashinfer/kernels.py:" in message


def test_a_built_in_backend_is_named_by_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LN2", "")
    with Session(["fi"], device_sim="light") as session:
        case = smoke_cases(FlashInferBackend.capabilities)[0]
        verdict = examine(Question(case), session.askers[0])
    assert "(at fi_base.py:" in verdict.findings[0].message


def test_a_text_of_many_lines_is_told_in_one() -> None:
    message = _message(Says)
    assert message == (
        "construction raised: RuntimeError: nvcc failed: error: no such file "
        + _place(Says.__init__, 1)
        + ")"
    )


def test_another_place_is_the_same_failure_to_the_search() -> None:
    with Session([RaisesHereAndThere]) as session:
        (asker,) = session.askers
        strategy = cases_for([asker.spec.capabilities])
        case = smallest(asker, "values", strategy, seed=0, max_examples=40)
    assert case is not None
    assert [len(step.requests) for step in case.steps] == [1]
