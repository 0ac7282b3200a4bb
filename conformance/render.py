"""A failing case as text: what was asked, what is wrong, which keys were read, the line that replays it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cases.codec import save, short, to_json
from cases.model import Case, KernelRequest, Mask
from cases.tensors import CaseTensors, StepTensors
from conformance.outcome import Finding, Verdict, ordered
from conformance.question import Question
from conformance.readback import read_back
from conformance.trial import AnyAsker, RemoteAsker

INLINE = 1500
"""Longest case, in characters of JSON, that stands in the replay line itself."""
MAX_REQUESTS = 16
MAX_FINDINGS = 12
MAX_STEPS = 4
MAX_PAGES = 256
FOLDER = ".conformance"
"""Where longer cases are written, below the current folder."""


def render(asker: AnyAsker, case: Case, verdict: Verdict, folder: str | Path = FOLDER) -> str:
    """Everything a person needs to know about one failing verdict. Long cases are written to `folder`."""
    question = Question(case)
    findings = ordered(verdict.findings)
    parts = [
        headline(asker, verdict),
        setting(case),
        *steps(question.tensors, findings),
        _findings(findings),
        _read_back(question, asker, findings),
        f"replay: {replay_line(asker, case, folder)}",
    ]
    return "\n".join(part for part in parts if part)


def _read_back(question: Question, asker: AnyAsker, findings: Sequence[Finding]) -> str:
    if isinstance(asker, RemoteAsker):
        return asker.read_back(question.case, findings)
    return read_back(question, asker, findings)


def headline(asker: AnyAsker, verdict: Verdict) -> str:
    """Who failed what."""
    checks = ", ".join(name for name in verdict.outcomes if name in verdict.failed)
    mode = "real libraries" if asker.real else f"{asker.mode} mode"
    return f"backend {verdict.backend} fails {checks} on case {short(verdict.digest)} ({mode})"


def setting(case: Case) -> str:
    """What holds for the whole case, in one line."""
    heads, mask = case.heads, case.mask
    words = [
        f"level {case.level}",
        f"heads {heads.num_qo_heads}/{heads.num_kv_heads} of {heads.head_dim_qk}/{heads.head_dim_vo}",
        f"layers {case.num_layers}",
        case.dtype
        if not case.stored_as_fp8
        else f"{case.dtype} over {case.kv_dtype} (x{case.k_scale:g}, x{case.v_scale:g})",
        f"page_size {case.page_size} {case.layout}",
        case.placement,
        "custom mask" if mask.custom is not None else "causal" if mask.causal else "not causal",
        *([f"window {mask.window}{_in_layers(mask)}"] if mask.window is not None else []),
        *([f"soft cap {mask.soft_cap:g}"] if mask.soft_cap is not None else []),
        *([f"scale {case.sm_scale:g}"] if case.sm_scale is not None else []),
        f"values {case.values}",
        *(["strided"] if case.strided else []),
        *(["one session"] if case.session else []),
        f"seed {case.seed}",
    ]
    return ", ".join(words)


def _in_layers(mask: Mask) -> str:
    return "" if mask.window_layers is None else f" in layers {', '.join(map(str, mask.window_layers))} alone"


def steps(tensors: CaseTensors, findings: Sequence[Finding]) -> Iterable[str]:
    """A table of requests and a map of pages for each step; of many steps, those that findings name."""
    total = len(tensors.steps)
    named = [f.step for f in findings if f.step is not None]
    shown = list(range(total)) if total <= MAX_STEPS else sorted({0, *named})[:MAX_STEPS]
    for index in shown:
        yield _step(tensors, index)
    if len(shown) < total:
        yield f"({total - len(shown)} more steps)"


def _step(tensors: CaseTensors, index: int) -> str:
    t = tensors.steps[index]
    step = t.step
    kind = "" if step.kind == step.phase else f", {step.kind}"
    counts = ((len(step.requests), "request"), (step.num_rows, "row"), (sum(step.kv_lens), "key"))
    sizes = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
    waiting = {slot // tensors.case.page_size for held in t.placed.waiting.values() for slot in held}
    lines = [f"step {index}: {step.phase}{kind}: {sizes}{_others(t)}"]
    lines += ["  " + line for line in _request_table(tensors.case, t)]
    lines += ["  " + line for line in page_map(t, tensors.plan.num_pages, waiting)]
    return "\n".join(lines)


def _others(t: StepTensors) -> str:
    """Who of a session is not in the batch."""
    left, waits = (", ".join(map(str, uids)) for uids in (t.step.finished, t.placed.waiting))
    return (f"; left: uid {left}" if left else "") + (f"; waiting (w): uid {waits}" if waits else "")


def _request_table(case: Case, t: StepTensors) -> list[str]:
    lengths = ("qo_len", "kv_len") if case.level == "kernel" else ("cached", "extend", "kv_len")
    rows = [["request", "uid", *lengths, "pages", "last_page_len", "row", "prefix"]]
    for index, r in enumerate(t.step.requests[:MAX_REQUESTS]):
        own = [r.qo_len, r.kv_len] if isinstance(r, KernelRequest) else [r.cached_len, r.extend_len, r.kv_len]
        last = (r.kv_len - 1) % case.page_size + 1 if r.kv_len else 0
        prefix = "-" if r.prefix_of is None else f"{r.prefix_len} of uid {r.prefix_of}"
        numbers = [index, r.uid, *own, len(t.placed.pages[index]), last, t.placed.rows[index]]
        rows.append([*map(str, numbers), prefix])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(t.step.requests) > MAX_REQUESTS:
        lines.append(f"({len(t.step.requests) - MAX_REQUESTS} more requests)")
    return lines


def page_map(t: StepTensors, num_pages: int, waiting: Iterable[int] = (), width: int = 96) -> list[str]:
    """Which request owns each page: its index, `0+2` for a shared page, `w` for one of those `waiting`, `.` for a page
    of nobody's.
    """
    owners = [list[str]() for _ in range(num_pages)]
    for request, pages in enumerate(t.placed.pages):
        for page in np.unique(pages):
            owners[int(page)].append(str(request))
    for page in waiting:
        owners[page].append("w")
    cells = ["+".join(own) or "." for own in owners[:MAX_PAGES]]
    wide = max(map(len, cells), default=1)
    per_line = max(1, (width - 12) // (wide + 1))
    lines: list[str] = []
    for first in range(0, len(cells), per_line):
        line = " ".join(cell.rjust(wide) for cell in cells[first : first + per_line])
        lines.append(f"page {first:>4}: {line}")
    if num_pages > MAX_PAGES:
        lines.append(f"({num_pages - MAX_PAGES} more pages)")
    return lines


def _findings(findings: Sequence[Finding]) -> str:
    grouped: dict[tuple[object, ...], list[Finding]] = {}
    smoke = any(f.check == "smoke" for f in findings)
    for f in findings:
        if not (smoke and f.check == "values"):  # smoke repeats them
            grouped.setdefault((f.check, f.step, f.request, f.field, f.rule), []).append(f)
    lines = ["what is wrong:"]
    for same in list(grouped.values())[:MAX_FINDINGS]:
        layers = sorted({f.layer for f in same[1:] if f.layer is not None} - {same[0].layer})
        also = f" (also in layer {', '.join(map(str, layers))})" if layers else ""
        lines.append(f"  {same[0].check}: {same[0]}{also}")
    if len(grouped) > MAX_FINDINGS:
        lines.append(f"  ({len(grouped) - MAX_FINDINGS} more findings)")
    return "\n".join(lines)


def replay_line(asker: AnyAsker, case: Case, folder: str | Path = FOLDER) -> str:
    """One shell line that asks this backend this case again."""
    words = ["conformance", "replay", "--backend", asker.spec.name]
    if asker.real:
        words += ["--library", "real"]
    elif isinstance(asker, RemoteAsker):
        words.append("--isolate")
    if asker.mode != "strict" and not asker.real:
        words += ["--mode", asker.mode]
    text = to_json(case)
    if len(text) > INLINE:
        digest = short(Question(case).digest)
        path = Path(folder) / f"{digest}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, case, why=f"failed on backend {asker.spec.name}")
        except OSError as error:
            return f"(the case is {len(text)} characters long and {path} cannot be written: {error.strerror})"
        text = str(path)
    return shlex.join([*words, text])
