from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.errors import UsageError
from conformance.fidelity import record
from conformance.fidelity.call import LibraryCall
from conformance.fidelity.compare import compare, disagreement
from conformance.fidelity.draft import LN2
from conformance.fidelity.observe import combine
from conformance.fidelity.record import Observations
from conformance.fidelity.sound import sound
from conformance.fidelity.verdict import Seen, differ, judge, refused, sketch
from fakes.contract.check import dense
from fakes.contract.rule import Observation

pytestmark = pytest.mark.cpu

CALL = LibraryCall(entry="sgl.varlen", qo_lens=(3, 2), kv_lens=(50, 30), num_qo_heads=2, num_kv_heads=1)
DRAFT = sound(CALL)
OUT, LSE = (t.clone() for t in DRAFT.expected)


def without_a_key() -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a kernel that misses the first of the first request's 50 keys, in its first row."""
    q, k, v = (DRAFT.tensors[name] for name in ("q", "k", "v"))
    out, lse = dense(q[:1], k[1:50], v[1:50])
    return torch.cat((out, OUT[1:])), torch.cat((lse, LSE[1:]))


def test_what_was_meant_is_right_in_either_base() -> None:
    assert judge(DRAFT, OUT.bfloat16(), LSE.float()).kind == "right"
    assert judge(DRAFT, OUT, LSE).base == "e"
    assert judge(DRAFT, OUT, LSE / LN2).base == "2"


def test_one_missing_key_among_fifty_is_wrong() -> None:
    assert judge(DRAFT, without_a_key()[0], LSE).kind == "wrong"


def test_a_wrong_lse_alone_is_wrong() -> None:
    seen = judge(DRAFT, OUT, LSE + 0.1)
    assert (seen.kind, seen.base) == ("wrong", "")
    assert "LSE fits no base" in seen.detail


def test_a_finite_lse_of_a_row_without_keys_is_wrong() -> None:
    draft = sound(replace(CALL, kv_lens=(50, 0)))
    out, lse = draft.expected
    assert judge(draft, out, lse).kind == "right"
    assert judge(draft, out, torch.where(lse.isfinite(), lse, -50000.0)).kind == "wrong"


def test_rows_that_nobody_meant_are_not_judged() -> None:
    draft = sound(CALL)
    draft.tensors["q"] = torch.cat((draft.tensors["q"], draft.tensors["q"][:1]))
    out = torch.cat((OUT, torch.full_like(OUT[:1], torch.nan)))
    lse = torch.cat((LSE, torch.full_like(LSE[:1], torch.nan)))
    assert judge(draft, out, lse).kind == "right"
    assert judge(draft, OUT, LSE).kind == "wrong"


def test_a_refusal_is_known_by_its_first_built_in_type() -> None:
    class OddError(ValueError):
        pass

    seen = refused(OddError("two\n words"), "plan")
    assert (seen.kind, seen.error, seen.stage, seen.detail) == ("refused", "ValueError", "plan", "two words")


def numbers(out: torch.Tensor, lse: torch.Tensor) -> np.ndarray:
    return sketch(out.double().numpy(), lse.double().numpy())


def test_rounding_is_no_difference_and_one_key_is() -> None:
    exact = numbers(OUT, LSE)
    assert differ(exact, numbers(OUT.bfloat16(), LSE.float())) == ""
    assert "row 0" in differ(exact, numbers(*without_a_key()))
    assert "LSE" in differ(exact, numbers(OUT, LSE + 0.1))
    nan = numbers(torch.full_like(OUT, torch.nan), LSE)
    assert "row 0, head 0" in differ(exact, nan)
    assert differ(nan, nan.copy()) == ""
    assert "rows" in differ(exact, exact[:-1])


def test_two_surroundings_that_decide_are_undefined() -> None:
    right, wrong = Seen("right", numbers=numbers(OUT, LSE)), Seen("wrong", numbers=numbers(OUT * 2, LSE))
    assert combine(right, right).kind == "right"
    assert combine(right, wrong).kind == "undefined"
    assert combine(wrong, replace(wrong, numbers=numbers(OUT * 3, LSE))).kind == "undefined"
    assert combine(Seen("refused", "ValueError"), Seen("refused", "KeyError")).kind == "undefined"


@pytest.mark.parametrize(
    ("fake", "other", "why"),
    [
        (Seen("right"), Seen("right"), None),
        (Seen("right"), Seen("wrong"), "verdict"),
        (Seen("refused", "ValueError"), Seen("refused", "RuntimeError"), "error type"),
        (Seen("undefined"), Seen("wrong"), None),
        (Seen("undefined"), Seen("crashed"), None),
        (Seen("undefined"), Seen("refused", "RuntimeError"), None),
        (Seen("undefined"), Seen("refused", "ValueError"), "verdict"),
        (Seen("wrong"), Seen("undefined"), "verdict"),
    ],
)
def test_what_agrees(fake: Seen, other: Seen, why: str | None) -> None:
    found = disagreement(CALL, fake, other, real=True)
    assert (found.why if found else None) == why


def test_a_result_at_the_limit_of_a_verdict_agrees_with_itself_and_with_no_other() -> None:
    at = numbers(OUT * 1.0199, LSE)
    wrong = Seen("wrong", numbers=numbers(OUT * 1.0201, LSE))
    assert disagreement(CALL, Seen("right", numbers=at), wrong, real=True) is None
    found = disagreement(CALL, Seen("right", numbers=numbers(OUT, LSE)), wrong, real=True)
    assert found is not None
    assert found.why == "verdict"


def test_between_fakes_undefined_agrees_with_itself_alone() -> None:
    assert disagreement(CALL, Seen("undefined"), Seen("wrong"), real=False)
    assert not disagreement(CALL, Seen("undefined"), Seen("undefined"), real=False)


def observations(*seen: Seen, kind: str = "fake") -> Observations:
    made = Observations(kind, {"sgl_kernel": "0.4.6"}, 3)
    for index, one in enumerate(seen):
        made.calls[replace(CALL, seed=index, malformations=("max_q:one",))] = one
    return made


def test_too_many_undefined_calls_are_a_finding() -> None:
    right = Seen("right")
    few = observations(*[right] * 19, Seen("undefined"))
    many = observations(*[right] * 17, *[Seen("undefined")] * 3)
    real = observations(*[right] * 20, kind="real")
    assert compare(real, few).clean
    assert not compare(many, real).clean
    assert compare(many, real).undefined == 3


def test_a_rule_that_a_library_breaks_is_a_finding() -> None:
    first, second = observations(), observations(kind="real")
    first.rules["sgl_kernel.fa.lse"] = Observation("right")
    second.rules["sgl_kernel.fa.lse"] = Observation("wrong", "relative error 0.4")
    found = compare(first, second)
    assert not found.clean
    assert len(found.rules) == 1
    assert "sgl_kernel.fa.lse on real sgl_kernel 0.4.6" in found.rules[0]


def test_other_calls_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="were asked different calls: 1 were asked of one alone"):
        compare(observations(Seen("right")), observations())


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    seen = observations(judge(DRAFT, OUT, LSE), Seen("refused", "ValueError", "plan", "no"))
    seen.rules["a.rule"] = Observation("refused", "words", ("ValueError", "Exception"))
    record.write(tmp_path / "file", seen)
    back = record.read(tmp_path / "file")
    assert (back.kind, back.versions, back.seed, back.rules) == (seen.kind, seen.versions, 3, seen.rules)
    for (call, one), (other_call, other) in zip(seen.calls.items(), back.calls.items(), strict=True):
        assert call == other_call
        assert replace(one, numbers=None) == replace(other, numbers=None)
        assert differ(one.numbers, other.numbers) == ""


@pytest.mark.parametrize("cut", [1, 2])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, cut: int) -> None:
    record.write(tmp_path / "file", observations(Seen("right"), Seen("right")))
    lines = (tmp_path / "file").read_text().splitlines()
    (tmp_path / "file").write_text("\n".join(lines[:-cut]))
    with pytest.raises(UsageError):
        record.read(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"format":1}\n{"done":true,"calls":0,"rules":0}\n', "has format 1, this release reads 2"),
        ("[1]\n[2]\n", "is no file of observations: TypeError: "),
        ("", "is no file of observations: ValueError: "),
        ("[" * 100_000, "is no file of observations: RecursionError: "),
        ("\udcff", "is not UTF-8 text"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError) as caught:
        record.read(tmp_path / "file")
    assert (
        str(caught.value)
        .replace(": ", " ", 1)
        .startswith(f"{tmp_path / 'file'} {sentence}".replace(": ", " ", 1))
    )
    assert "\n" not in str(caught.value)


def test_files_that_can_be_written_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    record.require_writable(str(tmp_path / "old"), str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"
