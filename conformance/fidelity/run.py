"""Both halves of a comparison: the fakes in this process where no GPU is seen, the real libraries in workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch

from conformance.fidelity import record
from conformance.fidelity.call import (
    ENTRIES,
    FLASHINFER_APPEND,
    FLASHINFER_MERGE,
    LibraryCall,
    from_json,
    to_json,
)
from conformance.fidelity.compare import Disagreement, disagreement
from conformance.fidelity.generate import VARIANTS, draw
from conformance.fidelity.observe import on_fakes, probe_fake
from conformance.fidelity.record import Observations
from conformance.fidelity.shrink import AskAgain
from conformance.fidelity.verdict import Seen
from conformance.fidelity.workers import Answer, Death, Pool, Task
from fakes import cuda, releases
from fakes.contract import rules as contract_rules
from fakes.contract.rule import Observation, Rule

WORKER = "conformance.fidelity.worker"
FAKE_WORKER = "conformance.fidelity.fake_worker"
CALL_DEADLINE = 60.0
HANG_DEADLINE = 30.0
"""For calls that the fakes say crash, hang or may do so: a kernel that loops over 2**32 keys takes minutes."""
BUILD_DEADLINE = 900.0
"""For a first call of a kernel variant, which the library compiles."""

Told = Callable[[str], object]


def observe_fakes(
    calls: Iterable[LibraryCall], versions: Mapping[str, str], *, rules: bool, seed: int | None = None
) -> Observations:
    """Ask the fakes of these releases, in faithful mode: in this process, or in others where this one sees a GPU."""
    chosen = {library: versions.get(library) or releases.selected(library) for library in versions}
    seen = Observations("fake", chosen, seed)
    asked = list(calls)
    known = [rule for rule in rules_of(chosen) if rule.device == "light"] if rules else []
    if sees_gpu():
        with _fake_workers(chosen, min(8, os.cpu_count() or 1)) as pool:
            asking = _Asking(pool, seen, str)
            asking.calls(asked, "")
            asking.rules([rule.id for rule in known])
        seen.calls = {call: seen.calls[call] for call in asked}
        return seen
    with on_fakes(chosen) as ask:
        for call in asked:
            seen.calls[call] = ask(call)
    if known:
        with cuda.simulated_cuda("light"), releases.select(**chosen):
            for rule in known:
                seen.rules[rule.id] = probe_fake(rule)
    return seen


def sees_gpu() -> bool:
    """Whether torch finds a real GPU in this process, where no device can be simulated then."""
    return cuda.current() is None and torch.backends.cuda.is_built() and torch.cuda.device_count() > 0


def _fake_workers(versions: Mapping[str, str], size: int) -> Pool:
    words = [f"{library}={version}" for library, version in versions.items()]
    return Pool(FAKE_WORKER, size, words, spares=0, environment={"CUDA_VISIBLE_DEVICES": ""})


def rules_of(versions: Mapping[str, str]) -> list[Rule]:
    """The contract's rules about these releases."""
    return [rule for rule in contract_rules() if versions.get(rule.library) in rule.verdicts]


def variants(libraries: Iterable[str]) -> dict[str, LibraryCall]:
    """The kernel variants that calls of `generate` make FlashInfer compile, each with a call that needs it."""
    needed: dict[str, LibraryCall] = {}
    if "flashinfer" not in libraries:
        return needed
    random = Random(0)
    for entry in ENTRIES:
        if not entry.startswith(("fi.decode", "fi.prefill")):
            continue
        kernel = "fa2" if entry.endswith("tensor_core") else entry.rpartition(".")[2]
        for variant in VARIANTS.get(kernel, ("plain", "window", "cap")):
            call = draw(random, entry, variant)
            name = "decode on CUDA cores" if kernel == "cuda_core" else f"prefill {kernel}"
            extra = {"plain": "", "window": ", window", "cap": ", soft cap"}[variant]
            needed.setdefault(f"{name}, {call.dtype}, head dim {call.head_dim}{extra}", call)
    wide = replace(draw(random, "fi.prefill.fa2", "plain"), malformations=("wide_indptr:kv_indptr",))
    needed["prefill fa2, bfloat16, head dim 128, 64-bit indptr"] = wide
    masked = replace(draw(random, "fi.ragged.fa2", "plain"), custom_mask=True, host_metadata=False)
    needed["custom masks (quantization)"] = masked
    needed["stores (page)"] = draw(random, FLASHINFER_APPEND[0], "plain")
    needed["merges (cascade)"] = draw(random, FLASHINFER_MERGE[0], "plain")
    return needed


def observe_real(
    calls: Sequence[LibraryCall],
    versions: Mapping[str, str],
    *,
    rules: bool,
    expected: Mapping[LibraryCall, Seen],
    workers: int,
    told: Told,
    seed: int | None = None,
    journal: str | None = None,
    spares: int = 2,
    module: str = WORKER,
) -> Observations:
    """Ask the real libraries in `workers` processes; calls that `expected` says may crash come last.

    `journal`: a file that answers to calls are written to as they come.

    Raises:
        WorkerError: they cannot be asked here: no GPU, a library that is missing or of another version.
    """
    words = [f"{library}={version}" for library, version in versions.items()]
    seen = Observations("real", dict(versions), seed)
    with Pool(module, workers, words, spares) as pool, _kept(journal, seen) as kept:
        for_each = _Asking(pool, seen, told, kept)
        builds = variants(versions)
        for_each.calls(list(builds.values()), "kernel variants compiled", BUILD_DEADLINE, keep=False)
        last = {call for call in calls if expected.get(call, _SOUND).kind in ("crashed", "hung", "undefined")}
        for_each.calls([call for call in calls if call not in last], "calls")
        for_each.calls([call for call in calls if call in last], "calls that may crash", HANG_DEADLINE)
        seen.versions = dict(pool.versions) or seen.versions
        if rules:
            for_each.rules([rule.id for rule in rules_of(seen.versions)])
    seen.calls = {call: seen.calls[call] for call in calls}
    return seen


_SOUND = Seen("right")


@contextmanager
def _kept(path: str | None, seen: Observations) -> Generator[record.Journal | None]:
    if path is None:
        yield None
        return
    journal = record.Journal(path, seen)
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def asking_again(
    fake: Mapping[str, str], other: Mapping[str, str], *, real: bool, module: str = WORKER
) -> Generator[AskAgain]:
    """Ask both sides one more call: fakes of two releases, or a fake and the real library."""

    def of_fakes(call: LibraryCall) -> Disagreement | None:
        one, two = (observe_fakes([call], which, rules=False).calls[call] for which in (fake, other))
        return disagreement(call, one, two, real=False)

    if not real:
        yield of_fakes
        return
    words = [f"{library}={version}" for library, version in other.items()]
    with Pool(module, 1, words, spares=2) as pool, ExitStack() as stack:
        fakes = stack.enter_context(_fake_workers(fake, 1)) if sees_gpu() else None

        def asked(pool: Pool, call: LibraryCall) -> Seen:
            seen = Observations("", {})
            _Asking(pool, seen, str).calls([call], "")
            return seen.calls[call]

        def of_real(call: LibraryCall) -> Disagreement | None:
            here = asked(fakes, call) if fakes else observe_fakes([call], fake, rules=False).calls[call]
            return disagreement(call, here, asked(pool, call), real=True)

        yield of_real


class _Asking:
    """Puts tasks to a pool and keeps the answers."""

    def __init__(
        self, pool: Pool, seen: Observations, told: Told, journal: record.Journal | None = None
    ) -> None:
        self._pool = pool
        self._seen = seen
        self._told = told
        self._journal = journal

    def calls(
        self, calls: Sequence[LibraryCall], what: str, deadline: float = 0.0, *, keep: bool = True
    ) -> None:
        def hear(task: Task, answer: Answer | Death) -> None:
            step()
            if not keep:
                return
            call = from_json(task["call"])
            if isinstance(answer, Death):
                self._seen.calls[call] = Seen("hung" if answer.hung else "crashed", detail=answer.how)
            else:
                self._seen.calls[call] = Seen.from_json(answer["seen"])
            if self._journal is not None:
                self._journal.call(call, self._seen.calls[call])

        step = self._progress(what, len(calls))
        self._pool.ask(
            ({"call": to_json(call)} for call in calls),
            deadline=lambda task: deadline or _deadline(task),
            told=hear,
        )

    def rules(self, names: Sequence[str]) -> None:
        def hear(task: Task, answer: Answer | Death) -> None:
            step()
            if isinstance(answer, Death):
                self._seen.rules[task["rule"]] = Observation("crashes", answer.how)
            else:
                kind, detail, *errors = answer["seen"]
                self._seen.rules[task["rule"]] = Observation(kind, detail, tuple(errors))

        step = self._progress("contract rules", len(names))
        self._pool.ask(({"rule": name} for name in names), deadline=_for_rules, told=hear)

    def _progress(self, what: str, count: int) -> Callable[[], None]:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if done == count or done % max(1, count // 5) == 0:
                self._told(f"{what}: {done} of {count}")

        return step


def _deadline(task: Task) -> float:
    text: Any = task["call"]
    return BUILD_DEADLINE if "wide_indptr" in text else CALL_DEADLINE


def _for_rules(_: Task) -> float:
    return BUILD_DEADLINE
