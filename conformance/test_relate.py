"""Related cases keep the q, k and v of the rows and tokens that they share with the original."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.contract import Capabilities
from cases.model import Case, Heads, Request, Step
from conformance.question import Question
from conformance.relate import RELATIONS, Relation

CAPABILITIES = Capabilities(layouts=frozenset({"NHD", "HND"}))
REQUESTS = (
    Request(cached_len=4, extend_len=3, uid=0),
    Request(cached_len=2, extend_len=1, uid=1, prefix_of=0, prefix_len=2),
    Request(cached_len=0, extend_len=5, uid=2),
)
CASE = Case(
    steps=(Step(requests=REQUESTS),),
    heads=Heads(num_qo_heads=2, num_kv_heads=1),
    page_size=2,
    placement="scattered",
    seed=7,
)
ALONE = replace(CASE, steps=(Step(requests=(REQUESTS[0], REQUESTS[2])),))


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: r.__name__)
def test_rows_and_tokens_are_the_originals(relation: Relation) -> None:
    question = Question(CASE)
    related = relation(question, CAPABILITIES)
    if related is None:
        question = Question(ALONE)
        related = relation(question, CAPABILITIES)
    assert related is not None
    assert related.case != question.case
    original = question.step(0)
    keys = {token: original.k_all[:, i] for i, token in enumerate(original.tokens.pairs())}
    for step, rows in zip(related.tensors.steps, related.rows, strict=True):
        assert step.step.num_rows == len(rows)
        assert torch.equal(step.q, original.q[:, torch.as_tensor(rows)])
        assert np.array_equal(step.rows.position, original.rows.position[rows])
        for i, token in enumerate(step.tokens.pairs()):
            assert torch.equal(step.k_all[:, i], keys[token])


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: r.__name__)
def test_answers_of_the_rows_are_the_originals(relation: Relation) -> None:
    question = Question(ALONE)
    related = relation(question, CAPABILITIES)
    assert related is not None
    again = Question(related.case, related.tensors)
    for index, rows in enumerate(related.rows):
        for layer in range(CASE.num_layers):
            want = question.answer(0, layer)
            got = again.answer(index, layer).state.out
            error = (got - want.state.out[torch.as_tensor(rows)]).abs().max()
            assert float(error) <= want.exact_tolerance
