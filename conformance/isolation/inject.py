"""Faults set off on purpose, beside harmless neighbours: does each get its own outcome, and is nothing lost?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.libraries import LibraryKind
from cases.model import Case, Heads, Request, Step
from conformance import report
from conformance.campaign import Campaign
from conformance.isolation.faults import TRIGGER
from conformance.isolation.session import IsolatedSession
from conformance.outcome import Outcome, Verdict

_CRASHED, _RAISED, _TIMED_OUT = Outcome.CRASHED, Outcome.RAISED, Outcome.TIMED_OUT


@dataclass(frozen=True)
class Fault:
    """A class of `conformance.isolation.<module>`, and what must become of the case that sets it off."""

    module: str
    name: str
    outcome: Outcome
    says: str

    @property
    def backend(self) -> str:
        return f"conformance.isolation.{self.module}:{self.name}"


ON_CPU = (
    Fault("faults", "Aborts", _CRASHED, "died of SIGABRT, at "),
    Fault("faults", "Segfaults", _CRASHED, "died of SIGSEGV, at "),
    Fault("faults", "DividesByZero", _CRASHED, "died of SIGFPE, at "),
    Fault("faults", "Leaves", _CRASHED, "left with exit status 0 in the middle of the case"),
    Fault("faults", "ClosesEverything", _CRASHED, "closed its channel"),
    Fault("faults", "Killed", _CRASHED, "was killed from outside (SIGKILL"),
    Fault("faults", "Hangs", _TIMED_OUT, "the process was killed, at "),
    Fault("faults", "HangsWithGil", _TIMED_OUT, "the process was killed, at "),
    Fault("faults", "Compiles", Outcome.PASSED, ""),
    Fault("faults", "OutOfMemory", _RAISED, "MemoryError"),
    Fault("faults", "Lies", Outcome.MISMATCH, "the output at row "),
)
ON_GPU = (
    Fault("cuda_faults", "WritesAstray", _CRASHED, "the CUDA context is lost: "),
    Fault("cuda_faults", "ReadsAstray", _CRASHED, "the CUDA context is lost: "),
    Fault("cuda_faults", "AssertsOnDevice", _CRASHED, "the CUDA context is lost: "),
    Fault("cuda_faults", "HangsOnDevice", _TIMED_OUT, "the process was killed, at "),
    Fault("cuda_faults", "OutOfDeviceMemory", _RAISED, "OutOfMemoryError"),
    Fault("cuda_faults", "HoardsDeviceMemory", _RAISED, "emory"),
)
RIGHT = {"fake": "conformance.isolation.faults:Right", "real": "conformance.isolation.cuda_faults:RightOnGPU"}
_HEADS = Heads(4, 2, 64, 64)
HARMLESS = tuple(
    Case((Step((Request(n, 1), Request(2, 4, uid=1))),), heads=_HEADS, dtype="float16") for n in range(4)
)
FATAL = Case((Step((Request(2, TRIGGER), Request(1, 5, uid=1))),), heads=_HEADS, dtype="float16")


@dataclass(frozen=True)
class Seen:
    """What became of one fault. `wrong`: what should not be so; empty if all is well."""

    fault: Fault
    message: str
    wrong: tuple[str, ...]


def inject(
    *, library: LibraryKind = "fake", deadline: float = 10.0, faults: Sequence[Fault] | None = None
) -> Iterator[Seen]:
    """Set off every fault for this kind of library in one run; what became of each.

    Raises:
        what an `IsolatedSession` raises; conformance.report.ReportError: the run's report is not complete.
    """
    chosen = faults if faults is not None else (*ON_CPU, *ON_GPU) if library == "real" else ON_CPU
    names = [*(fault.backend for fault in chosen), RIGHT[library]]
    told: dict[tuple[str, Case], list[Verdict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.jsonl"
        with IsolatedSession(names, library=library, deadline=deadline, folder=folder) as session:
            head = report.header(
                command=["inject"],
                backends=names,
                libraries=session.libraries,
                device=session.device,
                mode=session.mode,
                seed=0,
                checks=["values"],
            )
            with report.Writer(path, head) as writer:

                def tell(case: Case, verdict: Verdict) -> None:
                    told.setdefault((verdict.backend, case), []).append(verdict)
                    writer.verdict(case, verdict)

                given = [*HARMLESS[:2], FATAL, *HARMLESS[2:]]
                Campaign(session.askers, given=given, checks={"values"}, told=tell).run()
        written = report.read(path)
    if len(written.verdicts) != len(names) * (len(HARMLESS) + 1):
        raise report.ReportError(
            f"{len(written.verdicts)} verdicts for {len(names)} backends are in the report"
        )
    for fault in chosen:
        yield _look(fault, told)
    yield _look_at_right(names[-1], told)


def _look(fault: Fault, told: dict[tuple[str, Case], list[Verdict]]) -> Seen:
    wrong = [*_neighbours(fault.backend, told)]
    (verdict,) = told[fault.backend, FATAL]
    outcome = verdict.outcomes.get("values")
    message = verdict.findings[0].message if verdict.findings else "passed"
    if outcome is not fault.outcome:
        wrong.append(f"ended {outcome}, must end {fault.outcome}")
    if fault.says not in message:
        wrong.append(f"does not say {fault.says!r}")
    return Seen(fault, message, tuple(wrong))


def _look_at_right(backend: str, told: dict[tuple[str, Case], list[Verdict]]) -> Seen:
    wrong = [*_neighbours(backend, told)]
    (verdict,) = told[backend, FATAL]
    if verdict.failed:
        wrong.append(f"failed: {verdict.findings[0].message}")
    module, _, name = backend.rpartition(".")[2].partition(":")
    return Seen(Fault(module, name, Outcome.PASSED, ""), "passed beside them", tuple(wrong))


def _neighbours(backend: str, told: dict[tuple[str, Case], list[Verdict]]) -> Iterator[str]:
    """What is wrong with the verdicts on the harmless cases."""
    for number, case in enumerate(HARMLESS):
        verdicts = told.get((backend, case), [])
        if [v.outcomes for v in verdicts] != [{"values": Outcome.PASSED}]:
            yield f"harmless case {number}: {[(v.outcomes, v.findings[:1]) for v in verdicts]}"
