"""Attention weights read back: the failing case again with one-hot V, so that its output is the weights.

Every slot of a step has a column of its own. `head_dim_vo` columns are read at a time; slots that nobody owns
hold zeros, so that weight on them is what the others lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cases.bits import bits
from cases.tensors import CaseTensors
from conformance.fields import unasked
from conformance.outcome import Finding
from conformance.question import Question
from conformance.trial import Asker
from conformance.weights import Weights, describe

MAX_PASSES = 256
"""Executions spent on one case; longer ones are not read back."""
_ABOUT_RESULTS = {"smoke", "metadata", "lifecycle", "values", "lse", "poison"}
"""Checks whose findings are about the case itself as it was asked."""


def read_back(question: Question, asker: Asker, findings: Sequence[Finding]) -> str:
    """Which keys the worst row of the first finding lacks, weighs wrongly, or reads though it must not.

    Empty where no finding is about results. Never raises: what a backend throws here is said.
    """
    finding = next((f for f in findings if f.check in _ABOUT_RESULTS and f.step is not None), None)
    if finding is None or finding.step is None:
        return ""
    layer = 0 if finding.layer is None else finding.layer
    try:
        weights = read_weights(question, asker, finding.step, layer)
        lines = (
            [weights] if isinstance(weights, str) else [*describe(weights, finding.request), *weights.given]
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the report of a failure must not fail
        lines = [f"not possible: {type(error).__name__}: {error}"]
    return "\n".join(
        [f"weights read back with one-hot V, step {finding.step}, layer {layer}:", *(f"  {x}" for x in lines)]
    )


def read_weights(question: Question, asker: Asker, step: int, layer: int) -> Weights | str:
    """The weight of every slot for every row and head of one layer, or why they cannot be read."""
    case, tensors = question.case, question.tensors.steps[step]
    dim = case.heads.head_dim_vo
    slots = np.concatenate(tensors.placed.slots)
    owned, column = np.unique(slots, return_inverse=True)
    passes = -(-len(owned) // dim)
    if not 0 < passes <= MAX_PASSES:
        return f"not done: {len(owned)} keys take {passes} passes, the limit is {MAX_PASSES}"
    got: list[np.ndarray] = []
    want: list[np.ndarray] = []
    exact = True
    for first in range(0, len(owned), dim):
        hot = column[:, None] - first == np.arange(dim)
        reading = _read(question, asker, step, layer, hot[:, None])
        if isinstance(reading, str):
            return reading
        got.append(reading.values)
        want.append(reading.answer)
        exact &= reading.exact
    tags = np.arange(1, case.heads.num_kv_heads + 1)[None, :, None]
    tagged = _read(question, asker, step, layer, tags)
    if isinstance(tagged, str):
        return tagged
    return Weights(
        case=case,
        mask=case.mask.of_layer(layer),
        tensors=tensors,
        slots=owned,
        got=np.concatenate(got, axis=2)[:, :, : len(owned)] / case.v_scale,
        want=np.concatenate(want, axis=2)[:, :, : len(owned)] / case.v_scale,
        kv_heads=tagged.values[:, :, 0] / case.v_scale - 1,
        tolerance=1e-7 if exact else 4 * torch.finfo(getattr(torch, case.dtype)).eps,
        given=tagged.given,
    )


@dataclass(frozen=True)
class _Reading:
    """What came back and what must come: float64 `[num_rows, num_qo_heads, head_dim_vo]`. `given`: see `Weights`."""

    values: np.ndarray
    answer: np.ndarray
    exact: bool
    given: tuple[str, ...]


def _read(question: Question, asker: Asker, step: int, layer: int, v: np.ndarray) -> _Reading | str:
    """One layer's output with V as given (it broadcasts to `[num_tokens, num_kv_heads, head_dim_vo]`)."""
    asked = Question(question.case, _with_values(question.tensors, step, v))
    execution = asker.start(asked).execute(nan=False)
    layers = execution.steps[step].layers if step < len(execution.steps) else []
    if layer >= len(layers):
        return f"not possible: the backend broke off: {execution.failure}"
    handed = layers[layer]
    values = handed.exact
    if values is None and handed.values is not None:
        values = handed.values.double().numpy()
    own = execution.answers.get((step, layer))
    answer = (asked.answer(step, layer) if own is None else own).state.out.numpy()
    if values is None or values.shape != answer.shape:
        return "not possible: the output has not the shape that it must have"
    calls = [c for c in execution.calls(step) if c.op == "attend" and c.at.layer == layer]
    given = tuple(field.message for call in calls for field in unasked(call))
    return _Reading(np.array(values), answer, handed.exact is not None, given)


@dataclass(frozen=True)
class _Unpoisoned(CaseTensors):
    """A pool whose unowned slots hold zeros."""

    def poison(self, which: str, *, nan: bool) -> float:
        del which, nan
        return 0.0


def _with_values(tensors: CaseTensors, step: int, v: np.ndarray) -> CaseTensors:
    """The same tensors with another V in every layer of one step, and zeros in the slots of nobody's.

    In a session earlier steps store what this one reads: there its tokens have these values, too, others zeros.
    """
    old = tensors.steps[step]
    values = torch.tensor(v).to(old.v_all.dtype).expand(old.v_all.shape).clone()
    steps = list(tensors.steps)
    steps[step] = replace(old, v_all=values)
    if tensors.case.session:
        index = {token: i for i, token in enumerate(old.tokens.pairs())}
        words = bits(values)
        words = torch.cat([words, torch.zeros_like(words[:, :1])], dim=1)
        for i, earlier in enumerate(tensors.steps[:step]):
            at = [index.get(token, -1) for token in earlier.tokens.pairs()]
            steps[i] = replace(earlier, v_all=words[:, at].view(values.dtype))
    return _Unpoisoned(tensors.case, tensors.plan, tuple(steps))
