"""graphs: a replayed decode step gives what the eager one gives, reads what its batch asks for, and harms nobody.

Where the eager run of a case is wrong already, nothing is said here: a graph repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from cases.model import Mask
from conformance import reading
from conformance.checks import inputs, lse, pool, values
from conformance.checks.metadata import wrong_factors
from conformance.checks.stepwise import found_in
from conformance.compare import describe
from conformance.decode import LayerTensors, ReadSpan, doubtful, read_spans
from conformance.execution import LayerRun
from conformance.fields import unasked, wrong_fields
from conformance.graphs_marks import CapturedCall
from conformance.graphs_run import GraphExecution, Replay
from conformance.outcome import Finding, Outcome
from conformance.padding import foreign
from conformance.trial import Trial
from fakes.recorder import Attended, Call, TensorRecord

NAME = "graphs"
_INDPTR = ("indptr", "paged_kv_indptr")
"""What `plan` of the decode and of the prefill wrapper call the running sum of pages."""


def check(trial: Trial) -> list[Finding] | None:
    done = trial.graphs
    if done is None:
        return None
    found = findings(trial, done)
    if not found:
        return found
    wrong = {f.step for f in found_in(trial)}
    return [f for f in found if f.step not in wrong and (f.step is not None or not wrong)]


def findings(trial: Trial, done: GraphExecution) -> list[Finding]:
    """All that is wrong with an execution through graphs, whatever the eager one did."""
    found = [] if done.broken is None else [_broken(done)]
    found += [inputs.changed(NAME, None, name, "while graphs were captured, ") for name in done.altered[:1]]
    for at in done.replays:
        outputs = _outputs(trial, at.step, at.run.layers, at.how)
        found += [
            *_rules(done, at),
            *_plans(at),
            *_memory(at),
            *_reads(trial, done, at),
            *(_causes(trial, done, at) if outputs else []),
            *outputs,
            *_lse(trial, done, at.step, at.run.layers, at.how),
            *_padding(trial, at),
            *(inputs.changed(NAME, at.step, name, f"{at.how}: ") for name in at.run.changed[:1]),
            *_pool(trial, done, at),
        ]
    replayed = {at.step for at in done.replays}
    for step, run in enumerate(done.steps.steps):
        if step not in replayed:
            how = "run eagerly beside captured graphs"
            found += _outputs(trial, step, run.layers, how) + _lse(trial, done, step, run.layers, how)
    return found


def _broken(done: GraphExecution) -> Finding:
    failure = done.broken
    assert failure is not None
    sizes = ", ".join(map(str, done.sizes))
    return Finding(
        check=NAME,
        outcome=Outcome.RAISED,
        step=failure.step if failure.step >= 0 else None,
        message=f"{done.during} raised, with graphs for batch sizes {sizes}: {failure}",
    )


def _rules(done: GraphExecution, at: Replay) -> list[Finding]:
    """What the fakes recorded while the batch was prepared and its graph replayed."""
    found: dict[tuple[object, ...], Finding] = {}
    for f in done.steps.recorder.findings:
        if f.at.batch == at.step:
            finding = Finding(
                check=NAME,
                step=at.step,
                request=f.request,
                field=f.argument,
                rule=f.rule,
                message=f"{at.how}: {f.message}",
            )
            found.setdefault((f.rule, f.argument, f.request), finding)
    return list(found.values())


def _plans(at: Replay) -> list[Finding]:
    """Each captured run must follow a plan of this batch, or of one with as many pages: it knows no more."""
    for captured in at.calls:
        plan = captured.plan
        if plan is not None and plan.at.batch != at.step and not _same_pages(plan, captured.attended):
            when = f"step {plan.at.batch}" if plan.at.batch >= 0 else "the capture"
            message = (
                f"{at.how}: {captured.call.name} executes the plan of {when}: "
                "plan the graph's wrapper again before each replay"
            )
            return [Finding(check=NAME, step=at.step, layer=captured.layer, field="plan", message=message)]
    return []


def _same_pages(plan: Call, read: Attended) -> bool:
    """Whether a FlashInfer plan was made for requests of as many pages as were read: work is cut by whole pages.

    What fa3's plan holds beside them, lengths, shows in what is read.
    """
    given = next((plan.arguments[name] for name in _INDPTR if name in plan.arguments), None)
    if not isinstance(given, TensorRecord) or given.values is None:
        return False
    return np.diff(given.values).tolist() == [-(-len(span.slots) // read.page_size) for span in read.spans]


def _memory(at: Replay) -> list[Finding]:
    """Buffers that a graph reads must stay; wrappers of FlashInfer's plain mode move theirs at each plan."""
    found = [
        Finding(
            check=NAME,
            step=at.step,
            field=path,
            message=f"{at.how}: {path} stands elsewhere than at capture: the graph reads the old memory",
        )
        for path in at.moved[:1]
    ]
    for name in at.movable[:1]:
        message = (
            f"{name} was captured on a wrapper made without use_cuda_graph: its next plan moves the arrays that the "
            "graph reads"
        )
        found.append(Finding(check=NAME, step=at.step, field="use_cuda_graph", message=message))
    return found


def _reads(trial: Trial, done: GraphExecution, at: Replay) -> list[Finding]:
    """What each captured layer read: its own keys in the real rows, nothing but the dummies' page in the others."""
    tensors, found = trial.question.step(at.step), list[Finding]()
    for layer in range(len(at.run.layers)):
        calls = [c for c in at.calls if c.layer == layer]
        decoded = [pair for c in calls for pair in _decoded(trial, done, c, at, layer)]
        count = len(tensors.step.requests)
        real = [pair for pair in decoded if pair[1].rows[0] < count]
        padding = [span for _, span in decoded if span.rows[0] >= count]
        if doubtful([span for _, span in real], count):
            continue
        mask = trial.case.mask.of_layer(layer)
        if calls and not _plainly(real, tensors.placed.slots, mask):
            wrong = reading.compare(trial.case, tensors, mask, real)
            if wrong is not None:
                whole = len(calls) == 1 and reading.of_whole_batch(real, tensors, mask)
                found += _fields(trial, at, calls) if whole else []
                request, message = wrong
                message = f"{at.how}: {message}"
                found.append(Finding(check=NAME, step=at.step, layer=layer, request=request, message=message))
        found += _foreign(done, at, layer, padding)
        if found:
            return found
    return found


def _decoded(
    trial: Trial, done: GraphExecution, call: CapturedCall, at: Replay, layer: int
) -> list[tuple[Attended, ReadSpan]]:
    spans = read_spans(call.attended, _tensors(trial, done, at, layer))
    return [(call.attended, span) for span in spans if span.num_rows]


def _tensors(trial: Trial, done: GraphExecution, at: Replay, layer: int) -> LayerTensors:
    return LayerTensors.of(trial.question, at.step, layer, at.run.layers[layer], done.pool)


def _plainly(real: list[tuple[Attended, ReadSpan]], slots: tuple[np.ndarray, ...], mask: Mask) -> bool:
    """The usual case, quickly: one span a request, with its slots in order, all of which its row sees."""
    if mask.window is not None or len(real) != len(slots):
        return False
    return all(
        span.heads is None
        and attended.window_left < 0
        and span.rows.tolist() == [row]
        and np.array_equal(span.k_slots, own)
        and np.array_equal(span.v_slots, own)
        for row, ((attended, span), own) in enumerate(zip(real, slots, strict=True))
    )


def _fields(trial: Trial, at: Replay, calls: list[CapturedCall]) -> list[Finding]:
    """Which array of a call, or of the plan that it followed, is wrong."""
    tensors = trial.question.step(at.step)
    return [
        field.finding(NAME, at.step, how=f"{at.how}: ")
        for captured in calls
        for given in (captured.plan, captured.call if captured.again else None)
        if given is not None
        for field in wrong_fields(trial.case, tensors, None, given, captured.attended.page_size)
    ]


def _causes(trial: Trial, done: GraphExecution, at: Replay) -> list[Finding]:
    """What of a call may be why an output is wrong: a factor, or what nobody asked for."""
    how = f"{at.how}: "
    for captured in at.calls:
        found = [field.finding(NAME, at.step, captured.layer, how=how) for field in unasked(captured.call)]
        if 0 <= captured.layer < len(at.run.layers):
            tensors = _tensors(trial, done, at, captured.layer)
            found += wrong_factors(NAME, captured.attended, tensors, at.step, how)
        if found:
            return found[:1]
    return []


def _foreign(done: GraphExecution, at: Replay, layer: int, spans: list[ReadSpan]) -> list[Finding]:
    words = foreign(done, at, spans)
    if words is None:
        return []
    return [Finding(check=NAME, step=at.step, layer=layer, message=f"{at.how}: {words}")]


def _outputs(trial: Trial, step: int, layers: list[LayerRun], how: str) -> list[Finding]:
    tensors, heads = trial.question.step(step), trial.case.heads
    shape = (tensors.step.num_rows, heads.num_qo_heads, heads.head_dim_vo)
    for layer, handed in enumerate(layers):
        if handed.values is None or tuple(handed.values.shape) != shape:
            got = "no tensor" if handed.values is None else f"shape {list(handed.values.shape)}"
            message = f"{how}: the output is {got}, must have shape {list(shape)} in its real rows"
            return [Finding(check=NAME, step=step, layer=layer, message=message)]
        wrong = values.output_wrong(trial, handed, step, layer)
        if wrong is not None:
            request, message = describe(wrong, tensors, f"{how}: the output")
            return [Finding(check=NAME, step=step, layer=layer, request=request, message=message)]
    return []


def _lse(trial: Trial, done: GraphExecution, step: int, layers: list[LayerRun], how: str) -> list[Finding]:
    """The first LSE that is wrong, where `forward_return_lse` was captured."""
    if not done.steps.with_lse:
        return []
    found = (
        f for i, handed in enumerate(layers) for f in lse.layer_findings(trial, handed, step, i, done.machine)
    )
    return [replace(f, check=NAME, message=f"{how}: {f.message}") for f in islice(found, 1)]


def _padding(trial: Trial, at: Replay) -> list[Finding]:
    first = len(trial.case.steps[at.step].requests)
    for layer, rows in enumerate(at.padding):
        bad = (~torch.isfinite(rows)).flatten(1).any(1).nonzero()
        if len(bad):
            message = (
                f"{at.how}: row {first + int(bad[0])}, which pads the batch, is not finite: "
                "whatever looks at the whole batch, a quantisation scale for one, spreads it"
            )
            return [Finding(check=NAME, step=at.step, layer=layer, message=message)]
    return []


def _pool(trial: Trial, done: GraphExecution, at: Replay) -> list[Finding]:
    """K and V of the real rows are stored, and nothing else is written outside of the dummies' page."""
    if at.run.pool is None:
        return []
    found: list[Finding] = []
    for which, after in zip("kv", at.run.pool, strict=True):
        want = done.room.pool(at.step, which, nan=done.steps.nan, after=True)[:, :-1]
        found += [
            replace(f, check=NAME, message=f"{at.how}: {f.message}")
            for f in pool.difference(trial, at.step, which, after[:, :-1], want)
        ]
    return found
