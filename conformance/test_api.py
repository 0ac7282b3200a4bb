from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import conformance
from backends.registry import BackendError
from backends.torch_sdpa import TorchBackend
from cases.model import Case, Request, Step
from conformance import misbehave
from conformance.campaign import Campaign
from conformance.examine import examine
from conformance.question import Question
from conformance.session import Session
from fakes import cuda
from fakes.cuda import DeviceUnavailable


class Right(TorchBackend):
    """Takes one page size, so that few of the named edges are for it."""

    capabilities = replace(TorchBackend.capabilities, page_sizes=frozenset({4}))


class ForgetsTheLastKey(Right):
    """Leaves out the newest key of every request that has more than one."""

    def prepare_metadata(self, batch: conformance.Batch) -> None:
        super().prepare_metadata(batch)
        lengths = batch.attn_metadata.cache_seqlens
        lengths -= (lengths > 1).int()


def test_public_names() -> None:
    assert set(conformance.__all__) <= set(dir(conformance))
    for name in conformance.__all__:
        assert getattr(conformance, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'conformance' has no attribute 'chekc'"):
        conformance.chekc  # noqa: B018


def test_right_backend_passes() -> None:
    conformance.check(Right, cases=5, sessions=2)


def test_wrong_backend_fails_with_its_smallest_case() -> None:
    with pytest.raises(AssertionError) as caught:
        conformance.check(ForgetsTheLastKey, cases=20, sessions=2)
    said = str(caught.value)
    assert said.startswith("backend ")
    assert "FAIL " in said
    assert f"backend {__name__}:ForgetsTheLastKey fails values on case " in said
    assert "does not read its key at position 1" in said
    assert f"replay: conformance replay --backend {__name__}:ForgetsTheLastKey '" in said


MISBEHAVING = [
    ("Raises", "forward raised: RuntimeError: no kernel for (1, 1, 64)"),
    ("RaisesAtOnce", "construction raised: RuntimeError: no memory for "),
    ("Refuses", "forward refused a case that it declares: Refused: (1, 1, 64) is not for this backend"),
    ("Exits", "forward raised: SystemExit: the engine has had enough"),
    ("ReturnsNone", "the output is None, must be a tensor"),
    ("ReturnsPair", "the output is tuple, must be a tensor"),
    ("WrongShape", "the output has shape [1, 64], must have [1, 1, 64]"),
    ("OneRowLess", "the output has shape [0, 1, 64], must have [1, 1, 64]"),
    ("Scalar", "the output has shape [], must have [1, 1, 64]"),
    ("WrongDtype", "the output is float64, must be float16"),
    ("Booleans", "the output is bool, must be float16"),
    ("WrongDevice", "the output is on cpu, must be on cuda:0"),
    ("OnMeta", "the output is on meta, must be on cpu"),
    ("NotFinite", "head 0 is nan, must be "),
    ("Sparse", "the output is sparse_coo, must be dense"),
]


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    """All of them in one run."""
    classes = [getattr(misbehave, name) for name, _ in MISBEHAVING]
    with Session([*classes, misbehave.TracksGradients, Right]) as session:
        campaign = Campaign(session.askers, smoke=True, count=20)
        campaign.run()
    return campaign


@pytest.mark.parametrize(("name", "sentence"), MISBEHAVING)
def test_misbehaving_backend_gets_a_verdict(name: str, sentence: str, campaign: Campaign) -> None:
    tally = campaign.tallies[f"conformance.misbehave:{name}"]
    assert tally.ran == tally.failed("values") > 20
    _, verdict = tally.failures["smoke"]
    assert sentence in verdict.findings[0].message


def test_run_goes_on_beside_them(campaign: Campaign) -> None:
    for name in (f"{__name__}:Right", "conformance.misbehave:TracksGradients"):
        assert campaign.tallies[name].clean


def test_every_misbehaving_backend_is_tested() -> None:
    every = {
        name for name, kind in vars(misbehave).items() if isinstance(kind, type) and hasattr(kind, "spoil")
    }
    public = {name for name in every if not name.startswith("_")}
    assert public == {name for name, _ in MISBEHAVING} | {"TracksGradients"}


def test_bad_backends_are_refused() -> None:
    class Half:
        def __init__(self, engine: Any) -> None: ...

    with pytest.raises(BackendError, match="lacks the method prepare_metadata"):
        conformance.check(Half)
    with pytest.raises(BackendError, match="unknown backend 'tosch'"):
        conformance.check("tosch")


def test_bad_arguments_are_refused() -> None:
    refused: list[tuple[type[Exception], dict[str, Any], str]] = [
        (ValueError, {"cases": -1}, "cases must be at least 0, got -1"),
        (ValueError, {"sessions": -1}, "sessions must be at least 0, got -1"),
        (ValueError, {"seed": -1}, "seed must be at least 0, got -1"),
        (TypeError, {"cases": "3"}, "cases must be an integer, got '3'"),
        (TypeError, {"cases": True}, "cases must be an integer, got True"),
        (TypeError, {"backend": 3}, "backend must be a name or a class, got 3"),
        (ValueError, {"mode": "lax"}, "mode must be one of strict, faithful, got 'lax'"),
    ]
    for kind, given, sentence in refused:
        arguments: dict[str, Any] = {"backend": Right, **given}
        with pytest.raises(kind, match=f"^{sentence}$"):
            conformance.check(**arguments)


class Absent(TorchBackend):
    @classmethod
    def environment(cls) -> Any:
        raise RuntimeError("no engine here\nat all")


class NoContext(TorchBackend):
    @classmethod
    def environment(cls) -> Any:
        return None


def test_bad_environment_is_told_in_one_sentence() -> None:
    name = f"backend '{__name__}:Absent': its environment "
    with pytest.raises(BackendError, match=f"^{name}raised RuntimeError: no engine here$"), Session([Absent]):
        pass
    with pytest.raises(BackendError, match="is a NoneType, expected a context manager"), Session([NoContext]):
        pass
    with Session([Right]):
        pass


@pytest.mark.parametrize("name", ["torch", "fa"])
def test_session_knows_what_its_device_leaves_out(name: str) -> None:
    with Session([name], device_sim="light") as session:
        assert session.left_out.startswith(
            "graphs and the room of their buffers, in-flight copies: they need "
        )
    try:
        with Session([name], device_sim="full") as session:
            assert session.left_out == "nothing"
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("outer", ["torch", "fa"])
def test_a_session_inside_another_uses_its_device(outer: str) -> None:
    question = Question(Case((Step((Request(4, 1), Request(2, 1, 1)), "decode", "decode"),)))
    with Session([outer]) as around:
        with Session(["fi"]) as session:
            assert not examine(question, session.askers[0]).findings
        assert not examine(question, around.askers[0]).findings
    assert cuda.current() is None


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with Session(["torch"]):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
