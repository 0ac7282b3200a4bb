"""A session whose backends are asked in worker processes, and the choice between it and one in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backends.libraries import Answer, LibraryKind
from backends.registry import BackendSpec
from cases.model import Case
from conformance.gpu import require_gpu_elsewhere
from conformance.isolation.deadlines import DEFAULT_CASE, Deadlines
from conformance.isolation.journal import require_writable
from conformance.isolation.messages import ReadBack, Setup, Task
from conformance.isolation.pool import Pool
from conformance.isolation.verdicts import cost_its_process
from conformance.jit.build import prepare
from conformance.jit.choose import DEFAULT_VARIANTS
from conformance.outcome import Finding, Verdict
from conformance.render import FOLDER
from conformance.session import Session
from conformance.trial import RemoteAsker
from fakes.recorder import Mode


class IsolatedSession:
    """What a `Session` is to its users, in worker processes. Nothing is imported here that a backend needs.

    Args:
        names: backends, as for a `Session`; a class must be importable by its name.
        library, mode, options: as for a `Session`.
        workers: processes; None: one a GPU, or one.
        deadline: seconds that one case on one backend may take.
        folder: where the case that is about to run is kept.

    Raises (on entering):
        what a `Session` raises; IsolationError: no worker comes up.
    """

    def __init__(
        self,
        names: Sequence[str | type[Any]],
        *,
        library: LibraryKind = "fake",
        mode: Mode = "strict",
        workers: int | None = None,
        deadline: float | None = None,
        folder: str | Path = FOLDER,
        **options: Any,
    ) -> None:
        setup = Setup(
            names=tuple(name if isinstance(name, str) else _path(name) for name in names),
            options={"library": library, "mode": mode, **options},
        )
        self.mode: Mode = mode
        self._folder = Path(folder)
        self.pool = Pool(
            setup,
            workers=workers,
            deadlines=Deadlines(case=DEFAULT_CASE if deadline is None else deadline),
            folder=self._folder,
        )
        self.specs: list[BackendSpec] = []
        self.askers: list[WorkerAsker] = []
        self.libraries: Mapping[str, Answer] = {}
        self.device = self.left_out = ""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.pool.close)
            require_writable(self._folder)
            ready = self.pool.open()
            self._stack = stack.pop_all()
        self.specs, self.mode = list(ready.backends), ready.mode
        self.askers = [WorkerAsker(spec, self.mode, self.pool, real=ready.gpus > 0) for spec in self.specs]
        self.libraries, self.device = ready.libraries, f"{ready.device} (isolated)"
        self.left_out = ready.left_out
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class WorkerAsker(RemoteAsker):
    """A backend in the workers of a pool."""

    def __init__(self, spec: BackendSpec, mode: Mode, pool: Pool, *, real: bool) -> None:
        super().__init__(spec, mode, real=real)
        self._pool = pool

    def examine(self, case: Case, checks: Collection[str] | None) -> Verdict:
        return self._pool.examine(Task(case, (self.spec.name,), _frozen(checks)))

    def stream(
        self, items: Iterable[tuple[Case, Sequence[str]]], checks: Collection[str] | None
    ) -> Iterator[tuple[Case, Verdict]]:
        return self._pool.stream(Task(case, tuple(names), _frozen(checks)) for case, names in items)

    def read_back(self, case: Case, findings: Sequence[Finding]) -> str:
        if cost_its_process(findings):
            return ""
        return self._pool.read_back(ReadBack(self.spec.name, case, tuple(findings)))


def open_session(
    names: Sequence[str | type[Any]],
    *,
    isolate: bool | None = None,
    workers: int | None = None,
    deadline: float | None = None,
    folder: str | Path = FOLDER,
    library: LibraryKind = "fake",
    variants: int = DEFAULT_VARIANTS,
    **options: Any,
) -> Session | IsolatedSession:
    """A session to be entered. `isolate` None: real libraries are isolated, fakes are not, unless workers or a deadline
    are asked for. With real ones the kernels that FlashInfer compiles (`variants`: at most) are made ready here.

    Raises:
        NoGPU: real libraries are asked for, and no GPU answers. LibraryError: a library is not there, or a kernel of
            it does not compile.
    """
    if library == "real":
        require_gpu_elsewhere()
        prepare([name if isinstance(name, str) else _path(name) for name in names], variants)
        options |= {"variants": variants}
    if isolate is None:
        isolate = library == "real" or workers is not None or deadline is not None
    if isolate:
        return IsolatedSession(
            names, library=library, workers=workers, deadline=deadline, folder=folder, **options
        )
    return Session(names, library=library, **options)


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _frozen(checks: Collection[str] | None) -> frozenset[str] | None:
    return None if checks is None else frozenset(checks)
