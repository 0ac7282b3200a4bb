from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from conformance.__main__ import main
from conformance.fidelity import run, worker, workers
from conformance.fidelity.call import LibraryCall
from conformance.fidelity.compare import compare
from conformance.fidelity.generate import calls
from conformance.fidelity.observe import on_fakes
from conformance.fidelity.shrink import shrink
from conformance.fidelity.workers import Death, Pool, WorkerError
from fakes.flashinfer import plans
from fakes.sgl_kernel import masking

pytestmark = pytest.mark.cpu

BOTH = {"flashinfer": "0.6.6", "sgl_kernel": "0.4.6"}
STAND_IN = "conformance.fidelity.stand_in"


def test_faithful_fakes_answer_sound_calls_right_but_for_measured_faults() -> None:
    sound = [call for call in calls(112, 11) if call.valid]
    seen = run.observe_fakes(sound, BOTH, rules=False)
    for call, what in seen.calls.items():
        assert what.kind in ("right", "wrong", "refused")
        if what.kind == "wrong":  # of 0.6.6: rows that see no key, and merges of empty states
            keyless = any(n > m or not m for n, m in zip(call.qo_lens, call.kv_lens, strict=True))
            assert keyless or call.empty_states or call.custom_mask, call
        if what.kind == "refused":
            assert call.kernel == "cuda_core", call
            assert "Unsupported group_size" in what.detail


def test_releases_differ_where_the_facts_say() -> None:
    later = BOTH | {"flashinfer": "0.7.4"}
    asked = [
        LibraryCall(entry="fi.merge_state", empty_states=True, seed=1, qo_lens=(5,), kv_lens=(5,)),
        LibraryCall(entry="fi.prefill.fa2", qo_lens=(4,), kv_lens=(2,), causal=True),
        LibraryCall(entry="fi.prefill.fa2", malformations=("rows:more",)),
        LibraryCall(entry="fi.prefill.fa3", malformations=("offset:qo_indptr",)),
        LibraryCall(entry="fi.decode.cuda_core", malformations=("headless:kv_indptr",)),
        LibraryCall(entry="fi.decode.cuda_core", kv_lens=(30,)),
        LibraryCall(entry="sgl.kvcache", qo_lens=(4,), kv_lens=(2,), causal=True),
    ]
    before, after = (run.observe_fakes(asked, which, rules=False) for which in (BOTH, later))
    assert [seen.kind for seen in before.calls.values()] == [
        "wrong",
        "wrong",
        "right",
        "wrong",
        "undefined",
        "right",
        "right",
    ]
    assert [seen.kind for seen in after.calls.values()] == [
        "right",
        "right",
        "refused",
        "refused",
        "undefined",
        "right",
        "right",
    ]
    assert len(compare(before, after).disagreements) == 4


def test_a_fake_that_is_not_faithful_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = calls(40, 2, ("sgl.kvcache",))
    honest = run.observe_fakes(asked, BOTH, rules=False)
    real_visible = masking.visible

    def one_key_less(causal: bool, window: tuple[int, int], **sizes: object) -> masking.Visible:
        left = window[0] - 1 if window[0] > 0 else window[0]
        return real_visible(causal, (left, window[1]), **sizes)  # pyright: ignore[reportArgumentType]

    def ask(call: LibraryCall):
        one = run.observe_fakes([call], BOTH, rules=False)
        with monkeypatch.context() as patch:
            patch.setattr("fakes.sgl_kernel.forward.visible", one_key_less)
            return next(iter(compare(one, run.observe_fakes([call], BOTH, rules=False)).disagreements), None)

    with monkeypatch.context() as patch:
        patch.setattr("fakes.sgl_kernel.forward.visible", one_key_less)
        mutant = run.observe_fakes(asked, BOTH, rules=False)
    found = compare(honest, mutant).disagreements
    assert found
    assert all(one.call.window_left > 0 for one in found)
    small = shrink(found[0], ask)
    assert small.call.window_left == 1
    assert (len(small.call.qo_lens), small.call.num_qo_heads, small.call.page_size) == (1, 1, 1)
    assert small.call.kv_lens[0] <= 3
    assert not small.call.malformations


def test_a_fake_that_forgives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = calls(30, 4, ("fi.ragged.fa2",))
    honest = run.observe_fakes(asked, BOTH, rules=False)

    def forgive(name: str, indptr: list[int], i: int) -> None:
        """Takes every order."""

    monkeypatch.setattr(plans, "_check_rise", forgive)
    found = compare(honest, run.observe_fakes(asked, BOTH, rules=False)).disagreements
    assert found
    assert all(one.fake.kind == "refused" for one in found)


@pytest.mark.slow
def test_workers_die_and_the_others_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> dict[str, LibraryCall]:
        return {}

    monkeypatch.setattr(run, "variants", none)
    asked = [
        LibraryCall(entry="fi.decode.cuda_core", kv_lens=(30,), page_size=16),
        LibraryCall(entry="fi.decode.cuda_core", malformations=("headless:kv_indptr",)),
        LibraryCall(entry="fi.prefill.fa2", page_size=16, malformations=("far_page:far",)),
        LibraryCall(entry="fi.decode.cuda_core", malformations=("plan:none",)),
    ]
    expected = run.observe_fakes(asked, BOTH, rules=False)
    heard: list[str] = []
    seen = run.observe_real(
        asked,
        {"flashinfer": "0.6.6"},
        rules=False,
        expected=expected.calls,
        workers=1,
        told=heard.append,
        journal=str(tmp_path / "journal"),
        spares=0,
        module=STAND_IN,
    )
    assert list(seen.calls) == asked
    assert [one.kind for one in seen.calls.values()] == ["right", "crashed", "crashed", "refused"]
    assert seen.calls[asked[1]].detail == "SIGFPE"
    assert seen.versions == {"flashinfer": "0.6.6"}
    assert heard[-1] == "calls that may crash: 2 of 2"
    assert not compare(expected, seen).disagreements
    assert len((tmp_path / "journal").read_text().splitlines()) == 1 + len(asked)


def test_a_worker_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no GPU answers"):
        worker.start_real({})


SAYS = "import os, sys, time\nos.write(int(sys.argv[1]), b'{}\\n')\n"
"""A worker that needs no torch; to be formatted with its first answer."""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules here can be workers."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_workers_that_do_not_start_are_told(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STARTS", 1)
    (scripts / "unable.py").write_text(SAYS.format('{"error": "RuntimeError: no GPU answers"}'))
    with pytest.raises(WorkerError, match="do not start: RuntimeError: no GPU answers"):
        run.observe_real([], BOTH, rules=False, expected={}, workers=1, told=str, spares=0, module="unable")


def test_a_worker_that_fills_memory_is_killed(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MEMORY_LIMIT", 1 << 28)  # more than a process needs to start
    monkeypatch.setattr(workers, "MEMORY_CHECK", 0.05)
    (scripts / "hoarder.py").write_text(
        SAYS.format('{"versions": {}}') + "hoard = b'x' * (1 << 29)\ntime.sleep(600)\n"
    )
    answers: list[object] = []
    with Pool("hoarder", 1, (), spares=0) as pool:
        pool.ask([{"call": 1}], deadline=lambda _: 60.0, told=lambda _, answer: answers.append(answer))
    assert answers == [Death("the process took more than 0 GiB of memory")]


def test_fakes_are_asked_in_processes_that_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = calls(8, 3, ("fi.decode.cuda_core",))
    here = run.observe_fakes(asked, BOTH, rules=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with pytest.raises(RuntimeError, match="not simulated where torch finds a real one"), on_fakes(BOTH):
        pass
    there = run.observe_fakes(asked, BOTH, rules=False)
    assert list(there.calls) == asked
    assert there.versions == BOTH
    assert not compare(here, there).disagreements


def test_a_worker_that_hangs_is_killed(scripts: Path) -> None:
    (scripts / "sleeper.py").write_text(SAYS.format('{"versions": {}}') + "time.sleep(600)\n")
    answers: list[object] = []
    with Pool("sleeper", 1, (), spares=0) as pool:
        pool.ask([{"call": 1}], deadline=lambda _: 0.2, told=lambda _, answer: answers.append(answer))
    assert answers == [Death("no answer within 0.2 s", hung=True)]


def test_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    draw = ["--cases", "30", "--entry", "fi.merge_state", "--entry", "fi.ragged.fa2", "--ask", "calls"]
    assert main(["fidelity", "observe", "--library", "fake", "--out", a, *draw]) == 0
    assert main(["fidelity", "observe", "--library", "fake", "--out", b, *draw]) == 0
    later = ["--library-version", "flashinfer=0.7.4"]
    assert main(["fidelity", "observe", "--library", "fake", "--out", c, *draw, *later]) == 0
    assert main(["fidelity", "compare", a, b]) == 0
    assert "30 of 30 calls agree (15 malformed)" in capsys.readouterr().out
    assert main(["fidelity", "compare", a, c]) == 1
    assert "fake flashinfer 0.7.4: refused ValueError at run" in capsys.readouterr().out


def test_command_lists_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelity", "--list-variants"]) == 0
    assert "prefill fa3, float16, head dim 64, window" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["compare", "one"], "compare takes two files, got 1"),
        (["observe"], "observe needs --out FILE"),
        (["--entry", "fi.nothing"], "unknown entry point 'fi.nothing'"),
        (["--library-version", "torch=1"], "must be flashinfer or sgl_kernel"),
        (["--against", "flashinfer=0.1"], "no fake of flashinfer 0.1"),
        (["both", "file"], "both takes no files"),
        (["observe", "--out", "nowhere/f"], "nowhere/f: cannot be written (No such file or directory)"),
        (["observe", "--out", "."], ".: cannot be written (Is a directory)"),
        (["--out", "nowhere/f"], "nowhere/f.fake: cannot be written (No such file or directory)"),
        (["--expected", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
        (["--seed", "-3"], "--seed: must be at least 0, got -3"),
    ],
)
def test_wrong_usage_is_told(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "observe_fakes", None)  # nothing is computed before
    assert main(["fidelity", *argv]) == 2
    assert words in capsys.readouterr().err


def test_strictness_plays_no_part() -> None:
    with on_fakes(BOTH) as ask:
        seen = ask(LibraryCall(entry="fi.decode.cuda_core", malformations=("float32:all",)))
    assert (seen.kind, seen.error) == ("refused", "ValueError")
