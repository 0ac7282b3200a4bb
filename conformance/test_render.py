from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.contract import EngineContext
from cases.codec import from_json, load
from cases.model import Case, Heads, Mask, Request, Step
from conformance.examine import examine
from conformance.mutants import MUTANTS
from conformance.outcome import Finding
from conformance.question import Question
from conformance.readback import read_back
from conformance.render import headline, page_map, render, replay_line, setting
from conformance.session import Session
from conformance.trial import Asker

Ask = Callable[[str], Asker]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(["torch", "fi", "fi-paged", "fa", "kernel:fa-kvcache", "kernel:fi-decode"]) as opened:
        yield opened


@pytest.fixture
def mutant(session: Session) -> Ask:
    """A mutant of a built-in backend, ready to be asked."""

    def plant(name: str) -> Asker:
        planted = MUTANTS[name]
        correct = next(a for a in session.askers if a.spec.name == planted.base)
        return replace(correct, spec=planted.spec(correct.spec))

    return plant


def prefill(*lengths: tuple[int, int], page_size: int = 4, **rest: object) -> Case:
    requests = tuple(Request(cached, extend, uid) for uid, (cached, extend) in enumerate(lengths))
    return Case((Step(requests),), page_size=page_size, **rest)  # type: ignore[arg-type]


def shown(asker: Asker, case: Case, folder: Path) -> str:
    verdict = examine(Question(case), asker)
    assert verdict.failed
    return render(asker, case, verdict, folder)


def test_whole_text_of_a_failure(mutant: Ask, tmp_path: Path) -> None:
    text = shown(mutant("lastlen_0_when_multiple"), prefill((4, 1), (0, 8)), tmp_path).splitlines()
    assert text[0].startswith("backend lastlen_0_when_multiple fails metadata, values, lse on case ")
    assert text[1] == (
        "level engine, heads 1/1 of 64/64, layers 2, float16, page_size 4 NHD, sequential, causal, "
        "values needles, seed 0"
    )
    assert text[2:8] == [
        "step 0: prefill: 2 requests, 9 rows, 13 keys",
        "  request  uid  cached  extend  kv_len  pages  last_page_len  row  prefix",
        "        0    0       4       1       5      2              1    0       -",
        "        1    1       0       8       8      2              4    1       -",
        "  page    0: 0 0 1 1 . .",
        "what is wrong:",
    ]
    assert "request 1: paged_kv_last_page_len[1] is 0, must be " in text[8]
    assert text[8].startswith("  metadata: ")
    assert text[-1].startswith("replay: conformance replay --backend lastlen_0_when_multiple '{")


def test_causes_stand_before_effects(mutant: Ask, tmp_path: Path) -> None:
    text = shown(mutant("lastlen_0_when_multiple"), prefill((0, 8)), tmp_path)
    assert text.index("  metadata: ") < text.index("  values: ")
    assert text.count("(also in layer 1)") >= 2


@pytest.mark.parametrize(
    ("name", "case", "sentence"),
    [
        (
            "causal_top_left",
            prefill((3, 1)),
            "row 0 (request 0, position 3), head 0: does not read its 3 keys at positions 1 to 3",
        ),
        (
            "prefix_not_counted",
            prefill((4, 2)),
            "does not read its 4 keys at positions 1 to 4",
        ),
        (
            "window_off_by_one_less",
            prefill((5, 1), mask=Mask(window=3)),
            "does not read its key at position 3, one key too few on the left: window off by one",
        ),
        (
            "window_off_by_one_more",
            prefill((5, 1), mask=Mask(window=3)),
            ": one key too many on the left, window off by one",
        ),
        (
            "row_of_another_request",
            prefill((0, 1), (0, 1)),
            "reads a foreign key with weight 1: request 0's at position 0 (page 0, offset 0)",
        ),
        (
            "scale_forgotten",
            prefill((3, 1)),
            "every score is 8 times what it must be: the softmax scale is not applied",
        ),
        (
            "scale_twice",
            prefill((3, 1)),
            "times what it must be: the softmax scale is applied twice",
        ),
        (
            "gqa_interleaved",
            prefill((0, 1), heads=Heads(4, 2)),
            "every row gives its keys the right weights, but row 0, head 1 takes the values of KV head 1, "
            "must take those of KV head 0 (wrong in heads 1, 2)",
        ),
        (
            "token_ids_as_page_ids",
            prefill((0, 1), (0, 1)),
            "not finite, though every slot of the pool holds numbers",
        ),
    ],
)
def test_weights_are_read_back(mutant: Ask, name: str, case: Case, sentence: str, tmp_path: Path) -> None:
    assert sentence in shown(mutant(name), case, tmp_path)


def test_scale_of_v_is_named(mutant: Ask, tmp_path: Path) -> None:
    case = from_json(
        '{"k_scale":0.5,"kv_dtype":"float8_e4m3fn","level":"kernel","num_layers":1,'
        '"steps":[{"kind":"decode","phase":"decode","requests":[{"kv_len":3,"qo_len":1}]}],"v_scale":2.0}'
    )
    assert "weights sum to 0.5, must be 1: v_scale is not applied" in shown(
        mutant("v_scale_ignored"), case, tmp_path
    )


def test_keys_take_as_many_passes_as_they_need(mutant: Ask, tmp_path: Path) -> None:
    case = prefill((150, 1), (0, 1), page_size=16)
    text = shown(mutant("causal_top_left"), case, tmp_path)
    assert "does not read its 150 keys at positions 1 to 150" in text


def test_right_weights_are_said_to_be_right(session: Session) -> None:
    case = prefill((5, 2), (0, 3), heads=Heads(4, 2))
    blamed = [Finding(check="values", step=0, layer=1, message="made up")]
    for asker in session.askers:
        if asker.spec.level == "engine":
            text = read_back(Question(case), asker, blamed)
            assert text.endswith("every row reads the keys that it must, with the right weights"), text


def test_reading_back_never_raises(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Asker, "start", fail)
    blamed = [Finding(check="values", step=0, layer=0, message="made up")]
    text = read_back(Question(prefill((0, 1))), session.askers[0], blamed)
    assert text.endswith("not possible: ZeroDivisionError: by zero")


def test_nothing_is_read_back_where_no_result_is_wrong(session: Session) -> None:
    blamed = [Finding(check="pool", step=0, layer=0, message="made up")]
    assert read_back(Question(prefill((0, 1))), session.askers[0], blamed) == ""


def test_sinks_that_nobody_asked_for_are_named(session: Session, tmp_path: Path) -> None:
    asker = next(a for a in session.askers if a.spec.name == "fa")

    def planted(engine: EngineContext) -> Any:
        backend: Any = asker.spec.factory(engine)
        attend = backend.flash_attn_with_kvcache
        sinks = torch.zeros(engine.num_qo_heads, dtype=torch.bfloat16, device=engine.device)
        backend.flash_attn_with_kvcache = partial(attend, sinks=sinks)
        return backend

    text = shown(replace(asker, spec=replace(asker.spec, factory=planted)), prefill((3, 1)), tmp_path)
    assert "metadata: step 0, layer 0: flash_attn_with_kvcache is given sinks, which no case has" in text


def test_replay_line_holds_the_case_or_a_file_of_it(session: Session, tmp_path: Path) -> None:
    torch_backend = session.askers[0]
    short_case = prefill((0, 2))
    words = shlex.split(replay_line(torch_backend, short_case, tmp_path))
    assert words[:4] == ["conformance", "replay", "--backend", "torch"]
    assert from_json(words[4]) == short_case
    long_case = prefill(*[(n, 2) for n in range(60)])
    words = shlex.split(replay_line(replace(torch_backend, mode="faithful"), long_case, tmp_path / "new"))
    assert words[4:6] == ["--mode", "faithful"]
    assert load(words[6]).case == long_case


def test_page_map_shows_shared_and_free_pages() -> None:
    requests = (Request(4, 1, 0), Request(4, 1, 1, prefix_of=0, prefix_len=4))
    case = Case((Step(requests, "decode", "decode"),), page_size=4)
    tensors = Question(case).tensors
    assert page_map(tensors.steps[0], tensors.plan.num_pages) == ["page    0: 0+1   0   1   .   ."]
    many = Question(prefill((0, 300), page_size=1)).tensors
    lines = page_map(many.steps[0], many.plan.num_pages)
    assert max(map(len, lines)) <= 110
    assert lines[-1] == "(46 more pages)"


def test_long_cases_are_cut(session: Session, tmp_path: Path) -> None:
    steps = tuple(Step((Request(0, 1, uid),)) for uid in range(9))
    asker = session.askers[0]
    verdict = replace(
        examine(Question(Case(steps)), asker),
        findings=tuple(Finding(check="values", step=7, request=n, message="made up") for n in range(40)),
    )
    text = render(asker, Case(steps), verdict, tmp_path)
    assert "step 7: prefill" in text
    assert "(7 more steps)" in text
    assert "(28 more findings)" in text
    wide = prefill(*[(0, 1)] * 40)
    assert "(24 more requests)" in render(asker, wide, verdict, tmp_path)


def test_setting_names_what_is_unusual(session: Session) -> None:
    case = from_json(
        '{"k_scale":0.5,"kv_dtype":"float8_e4m3fn","layout":"HND","level":"kernel","mask":{"causal":false,'
        '"soft_cap":30.0,"window":4},"placement":"scattered","sm_scale":0.25,"strided":true,'
        '"steps":[{"requests":[{"kv_len":3,"qo_len":1}]}]}'
    )
    assert setting(case) == (
        "level kernel, heads 1/1 of 64/64, layers 2, float16 over float8_e4m3fn (x0.5, x1), page_size 1 HND, "
        "scattered, not causal, window 4, soft cap 30, scale 0.25, values needles, strided, seed 0"
    )
    verdict = examine(Question(prefill((0, 1))), session.askers[0])
    assert headline(session.askers[0], verdict).endswith("(strict mode)")
