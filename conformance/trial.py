"""One case put to one backend: both executions, and the means to ask again. What every check is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from backends.registry import BackendSpec
from cases.model import Case
from cases.tensors import CaseTensors
from conformance.engine import EngineRun
from conformance.execution import Execution, differing_layers
from conformance.graphs_run import GraphExecution, graph_execution
from conformance.kernel import KernelRun
from conformance.machine import Machine
from conformance.outcome import Finding, Verdict
from conformance.pool import Pool
from conformance.question import Answer, Question
from fakes.recorder import Mode


@dataclass(frozen=True)
class Asker:
    """A backend on a machine, ready to be asked cases."""

    spec: BackendSpec
    machine: Machine
    mode: Mode

    def start(self, question: Question) -> EngineRun:
        """A new backend object for this case."""
        run = EngineRun if self.spec.capabilities.level == "engine" else KernelRun
        return run(question, self.spec, self.machine, self.mode)

    def ask(self, case: Case, tensors: CaseTensors | None = None) -> Execution:
        """One execution of another case, on a backend object of its own."""
        return self.start(Question(case, tensors)).execute(nan=self.poisons_with_nan)

    @property
    def real(self) -> bool:
        """Whether it runs on a GPU, with real libraries."""
        return self.machine.real

    @property
    def poisons_with_nan(self) -> bool:
        return not self.spec.capabilities.reads_unowned_slots


class RemoteAsker(ABC):
    """A backend in another process, ready to be asked cases there. What it was asked leaves nothing but verdicts."""

    def __init__(self, spec: BackendSpec, mode: Mode, *, real: bool = False) -> None:
        self.spec = spec
        self.mode: Mode = mode
        self.real = real

    @abstractmethod
    def examine(self, case: Case, checks: Collection[str] | None) -> Verdict:
        """What `conformance.examine.examine` says there. A case that it does not survive has a verdict too."""

    @abstractmethod
    def stream(
        self, items: Iterable[tuple[Case, Sequence[str]]], checks: Collection[str] | None
    ) -> Iterator[tuple[Case, Verdict]]:
        """The same for many cases, each with the backends of this asker's session that are asked it."""

    @abstractmethod
    def read_back(self, case: Case, findings: Sequence[Finding]) -> str:
        """What `conformance.readback.read_back` says there."""


AnyAsker = Asker | RemoteAsker


class Trial:
    """One case on one backend. `first` and `second` run on the same backend object over differently poisoned pools.

    Where a backend has `forward_return_lse`, one of them calls it and the other `forward`, by the case's seed: what is
    looked at in the first execution alone is so seen of both.
    """

    def __init__(self, question: Question, asker: Asker) -> None:
        self.question = question
        self.asker = asker
        self.spec = asker.spec
        self.found: dict[str, list[Finding] | None] = {}
        """What the checks that have run found, by name."""
        self._run = asker.start(question)
        self._lse_first = self.spec.capabilities.level == "kernel" or not question.case.seed & 2

    @cached_property
    def first(self) -> Execution:
        """The one that is looked at closely, made when it is first looked at."""
        return self._execute(nan=self.asker.poisons_with_nan)

    def _execute(self, *, nan: bool, otherwise: bool = False) -> Execution:
        """Once more through the method of the first execution, or through the other."""
        return self._run.execute(nan=nan, with_lse=self._lse_first != otherwise)

    @property
    def case(self) -> Case:
        return self.question.case

    @cached_property
    def second(self) -> Execution:
        """The other of the two, made when it is first looked at."""
        self.first  # noqa: B018 - the backend object's first execution is that one
        self.asker.machine.soil()
        return self._execute(nan=False, otherwise=self.spec.capabilities.level == "engine")

    @property
    def with_lse(self) -> Execution:
        """That of the two that called `forward_return_lse`."""
        return self.first if self._lse_first else self.second

    @cached_property
    def changed(self) -> list[tuple[int, int, int]]:
        """(step, layer, first row) wherever the second execution gave other bits than the first."""
        return differing_layers(self.first, self.second)

    @cached_property
    def _again(self) -> Execution | None:
        """The second once more through the first's method, where they differ."""
        if self.spec.capabilities.lse is None or self.spec.capabilities.level == "kernel":
            return None
        return self._execute(nan=False)

    @cached_property
    def by_method(self) -> list[tuple[int, int, int]]:
        """What changed because the second called the other method, and not for what its pool held."""
        if not self.changed or self._again is None:
            return []
        by_poison = {(step, layer) for step, layer, _ in differing_layers(self.first, self._again)}
        return [at for at in self.changed if at[:2] not in by_poison]

    @cached_property
    def broken_by_method(self) -> bool:
        """Whether the second failed because it called the other method."""
        failed = self.first.failure is None and self.second.failure is not None
        return failed and self._again is not None and self._again.failure is None

    @cached_property
    def third(self) -> Execution:
        """A further execution over a pool poisoned as for the first."""
        return self._execute(nan=self.asker.poisons_with_nan)

    @cached_property
    def graphs(self) -> GraphExecution | None:
        """The case once more with its decode steps replayed from captured graphs, on a backend object of its own."""
        return graph_execution(self.question, self.spec, self.asker.machine, self.asker.mode)

    def answer(self, step: int, layer: int) -> Answer:
        own = self.first.answers.get((step, layer)) if self.spec.capabilities.merges else None
        return self.question.answer(step, layer) if own is None else own

    def request_of(self, step: int, row: int) -> int | None:
        """The request of a row; None where the step has none such."""
        requests = self.question.step(step).rows.request
        return int(requests[row]) if row < len(requests) else None

    @property
    def pool(self) -> Pool:
        return self._run.pool
