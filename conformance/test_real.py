"""Running on a real device, with stand-ins: memory of its own, results that come late, no GPU at all."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.registry import spec_of
from backends.torch_sdpa import TorchBackend
from cases.model import Case, Heads, KernelRequest, Mask, Request, Step
from conformance import machine, question
from conformance.checks import CHECKS
from conformance.examine import examine
from conformance.machine import GPU, Machine, NoGPU
from conformance.question import Question, large_answers_on
from conformance.selection import named_cases
from conformance.session import Session
from conformance.trial import Asker

ROOT = Path(__file__).resolve().parent.parent
MIXED = Case(
    (Step((Request(0, 5), Request(3, 1, uid=1))), Step((Request(5, 1),), phase="decode", kind="decode")),
    heads=Heads(4, 2),
    page_size=4,
    placement="scattered",
)
STRIDED = Case((Step((Request(2, 3), Request(0, 7, uid=1))),), strided=True, layout="NHD")


CHECKED = CHECKS.keys() - {"graphs", "capacity"}
"""A stand-in captures no graphs."""


class StandIn(GPU):
    """A device whose memory is its own, and whose faults show only when somebody waits for it."""

    def __init__(self) -> None:
        Machine.__init__(self, None)
        self.late: Exception | None = None
        self.soiled = 0

    @property
    def place(self) -> str:
        return "cpu"

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.preserve_format)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def running(self) -> Any:
        return machine._Poisoned()

    def settle(self) -> None:
        if self.late is not None:
            raise self.late

    def soil(self) -> None:
        self.soiled += 1


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


def asker(device: Machine, backend: type[Any] = TorchBackend) -> Asker:
    return Asker(spec_of(backend), device, "faithful")


@pytest.mark.parametrize("case", [MIXED, STRIDED, *named_cases("engine")[:12]])
def test_nothing_is_taken_for_shared(case: Case, stand_in: StandIn) -> None:
    """The harness writes to the device and reads from it, and never finds the one in the other."""
    verdict = examine(Question(case), asker(stand_in), CHECKED)
    assert verdict.unsupported is not None or verdict.passed, verdict.findings


class Forgetful(TorchBackend):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any
    ) -> torch.Tensor:
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        right = super().forward(q, k, v, layer_id, batch)
        out[1:] = right[1:]
        return out


def test_memory_that_nobody_fills_holds_nan(stand_in: StandIn) -> None:
    verdict = examine(Question(MIXED), asker(stand_in, Forgetful), CHECKED)
    assert {"values", "poison"} <= verdict.failed
    assert "NaN" in str(next(f for f in verdict.findings if f.check == "poison"))
    assert torch.get_deterministic_debug_mode() == 0


class Altering(TorchBackend):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        q[0] = 0
        self.page_table[0, 0] += 1
        return out


def test_changed_inputs_are_seen_on_the_device(stand_in: StandIn) -> None:
    found = [
        f.field
        for f in examine(Question(MIXED), asker(stand_in, Altering), CHECKED).findings
        if f.check == "inputs"
    ]
    assert {"q", "page_table"} <= set(found)


class Late(TorchBackend):
    device: StandIn

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any
    ) -> torch.Tensor:
        self.device.late = RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().forward(q, k, v, layer_id, batch)


def test_a_fault_that_comes_late_is_the_backends(stand_in: StandIn) -> None:
    Late.device = stand_in
    execution = asker(stand_in, Late).ask(MIXED)
    assert execution.failure is not None
    assert "illegal memory access" in str(execution.failure)
    assert (execution.failure.step, execution.failure.layer) == (0, 1)
    assert all(not run.layers for run in execution.steps)


def test_no_gpu_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoGPU, match=r"^no GPU answers: torch .* is built without CUDA$"):
        GPU()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGPU, match=r"^no GPU answers: torch .* finds no CUDA device$"):
        GPU()


KERNEL = Case(
    (Step((KernelRequest(9, 40), KernelRequest(3, 2, uid=1))),),
    level="kernel",
    heads=Heads(4, 2),
    num_layers=2,
)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False, custom=3), Mask(window=5)])
def test_large_answers_are_the_same_elsewhere(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(KERNEL, mask=mask)
    here, there = Question(case), Question(case)
    monkeypatch.setattr(question, "LARGE", 1)
    used: list[int] = []
    answer_on = Question._answer_on
    monkeypatch.setattr(
        Question, "_answer_on", lambda self, *where: (used.append(where[2]), answer_on(self, *where))[1]
    )
    for layer in range(2):
        want = here.answer(0, layer)
        with large_answers_on(torch.device("cpu")):
            got = there.answer(0, layer)
        assert (got.state.out - want.state.out).abs().max() <= want.exact_tolerance
        assert torch.equal(torch.isneginf(got.state.lse), torch.isneginf(want.state.lse))
        torch.testing.assert_close(
            there.budget(0, layer).max_abs, here.budget(0, layer).max_abs, rtol=1e-2, atol=0
        )
        torch.testing.assert_close(
            there.lse_budget(0, layer).max_abs, here.lse_budget(0, layer).max_abs, rtol=1e-2, atol=0
        )
    assert used == [0, 1]


def test_small_answers_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Question, "_answer_on", lambda *_: pytest.fail("a small case went to the device"))
    with large_answers_on(torch.device("cpu")):
        Question(KERNEL).answer(0, 0)


def command(*argv: str, path: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "conformance", *argv],
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="it is installed here")
def test_real_libraries_that_are_not_installed() -> None:
    code, said = command("run", "--no-isolate", "--library", "real", "--backend", "fa")
    assert code == 2
    assert said == (
        "conformance: error: real sgl_kernel was asked for, but it is not installed: pip install sglang-kernel"
    )


def test_a_fake_that_poses_as_installed_is_refused() -> None:
    site = str(ROOT / "fakes" / "site")
    code, said = command("run", "--no-isolate", "--library", "real", "--backend", "fa", path=site)
    assert code == 2
    assert said.startswith("conformance: error: real sgl_kernel was asked for, but ")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU may answer here")
def test_a_backend_without_a_library_needs_the_gpu_too() -> None:
    code, said = command("run", "--no-isolate", "--library", "real", "--backend", "torch")
    assert code == 2
    assert said.startswith("conformance: error: no GPU answers: torch ")


def test_declared_dtypes_provoke_no_refusal_in_faithful_mode() -> None:
    case = Case((Step((Request(),)),), seed=16 * 2)
    with Session(["fi", "fa"], mode="faithful") as session:
        for one in session.askers:
            for seed in range(0, 16 * 8, 16):
                verdict = examine(Question(replace(case, seed=seed)), one, {"refusals"})
                assert verdict.passed, verdict.findings
