"""Running on a real device, with stand-ins: memory of its own, results that come late, no GPU at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.registry import spec_of
from backends.torch_sdpa import TorchBackend
from cases.model import Case, Heads, KernelRequest, Mask, Request, Step
from conformance import question
from conformance.checks import CHECKS
from conformance.cli import run_command
from conformance.examine import examine
from conformance.machine import GPU, Machine, NoGPU, Poisoned
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
        return Poisoned()

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


@pytest.mark.parametrize("case", [MIXED, STRIDED, *named_cases("engine")[:6]])
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
    for layer in range(2):
        want = here.answer(0, layer)
        with large_answers_on(torch.device("cpu")):
            got = there.answer(0, layer)
        assert (got.state.out - want.state.out).abs().max() <= want.exact_tolerance
        assert torch.equal(torch.isneginf(got.state.lse), torch.isneginf(want.state.lse))
        for name in ("budget", "lse_budget"):
            ours, theirs = (getattr(asked, name)(0, layer).max_abs for asked in (there, here))
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)


def test_budgets_allow_the_tanh_of_the_hardware() -> None:
    """Measured: FlashAttention 3's LSE of one key, capped at 1, is 0.761628 where tanh gives 0.761622."""
    case = Case(
        (Step((KernelRequest(1, 1),), "decode", "decode"),),
        level="kernel",
        dtype="float32",
        num_layers=1,
        mask=Mask(soft_cap=1.0),
    )
    budgets: list[float] = []
    for session in (large_answers_on(torch.device("cpu")), nullcontext()):
        with session:
            asked = Question(case)
            budgets.append(float(torch.as_tensor(asked.lse_budget(0, 0).max_abs)))
            state = asked.answer(0, 0).state
    assert budgets[0] - budgets[1] == pytest.approx(2.0**-11 * min(1.0, state.max_score))
    assert budgets[1] < 6.26e-6 < budgets[0]


def test_only_large_steps_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[int] = []

    def answer_on(asked: Question, device: torch.device, step: int, layer: int) -> None:
        del asked, device, layer
        went.append(step)

    monkeypatch.setattr(Question, "_answer_on", answer_on)
    large = Case((*KERNEL.steps, Step((KernelRequest(90, 800),))), level="kernel", heads=Heads(4, 2))
    with large_answers_on(torch.device("cpu")):
        for step in range(2):
            Question(large).answer(step, 0)
    Question(large).answer(1, 0)
    assert went == [1]


def in_another_process(code: str, path: str = "") -> str:
    """The last line of what Python says to it."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


REAL = 'from conformance.session import Session\nSession(["fa"], library="real")'


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="it is installed here")
def test_real_libraries_that_are_not_installed() -> None:
    assert in_another_process(REAL) == (
        "backends.libraries.LibraryError: real sgl_kernel was asked for, but it is not installed: "
        "pip install sglang-kernel"
    )


def test_a_fake_that_poses_as_installed_is_refused(tmp_path: Path) -> None:
    copied = tmp_path / "sgl_kernel"
    shutil.copytree(ROOT / "fakes" / "site" / "sgl_kernel", copied)
    code = f"{REAL}\nimport sgl_kernel\nfrom backends.libraries import answered\nanswered()"
    said = in_another_process(code, path=str(tmp_path))
    assert said.startswith("backends.libraries.LibraryError: real sgl_kernel was asked for, but sgl_kernel")
    assert "is the fake one" in said


@pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU may answer here")
def test_the_command_says_that_no_gpu_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--library", "real", "--device", "cuda", "--backend", "torch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("conformance: error: no GPU answers: torch ")
    assert said.count("\n") == 1


def test_a_simulated_device_is_no_cuda_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--device", "cuda", "--backend", "torch"]) == 2
    assert "--device cuda needs --library real" in capsys.readouterr().err


def test_declared_dtypes_provoke_no_refusal_in_faithful_mode() -> None:
    case = Case((Step((Request(),)),), seed=16 * 2)
    with Session(["fi", "fa"], mode="faithful") as session:
        for one in session.askers:
            for seed in range(0, 16 * 8, 16):
                verdict = examine(Question(replace(case, seed=seed)), one, {"refusals"})
                assert verdict.passed, verdict.findings
