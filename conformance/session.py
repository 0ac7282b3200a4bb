"""Sets up a run: libraries chosen, backends resolved, devices opened; all of it undone at the end."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]

from backends.libraries import DISTRIBUTIONS, Answer, LibraryError, LibraryKind, answered, use
from backends.registry import BackendError, BackendSpec, resolve, spec_of
from conformance.jit.choose import DEFAULT_VARIANTS, modules_for, narrowed
from conformance.machine import GPU, Machine
from conformance.question import large_answers_on
from conformance.trial import Asker
from fakes import cuda
from fakes.recorder import Mode

NOT_ON_GPU = "in-flight copies, which a GPU does not show"
NEEDS_FULL_DEVICE = (
    "graphs and the room of their buffers, in-flight copies: they need the full simulated CUDA device "
    "(--device-sim full says why it is not here)"
)


class Session:
    """Backends by name, ready to be asked. A context manager; one at a time in a process.

    Args:
        names: backends as `backends.registry.resolve` takes them, or classes.
        library: "fake" or "real": which kind of kernel library answers.
        mode: how the fakes behave (`fakes.recorder`); real libraries are faithful to themselves.
        device_sim: which simulated device: "auto", "light" or "full".
        variants: with real libraries, how many kernels FlashInfer compiles at most; cases are drawn for these.

    With real libraries every backend runs on the first GPU that this process sees.

    Raises:
        BackendError, LibraryError: a name or a library that cannot be had, in one sentence.
        fakes.cuda.DeviceUnavailable: the simulated device, or a real one, cannot be had.
    """

    def __init__(
        self,
        names: Sequence[str | type[Any]],
        *,
        library: LibraryKind = "fake",
        mode: Mode = "strict",
        device_sim: Literal["auto", "light", "full"] = "auto",
        variants: int = DEFAULT_VARIANTS,
    ) -> None:
        use(library, DISTRIBUTIONS if library == "fake" else ())
        self._real = library == "real"
        self.mode: Mode = "faithful" if self._real else mode
        self._device_sim: Literal["auto", "light", "full"] = device_sim
        self.specs: list[BackendSpec] = [
            resolve(name) if isinstance(name, str) else spec_of(name) for name in names
        ]
        self._needed = {name for spec in self.specs for name in spec.capabilities.library}
        if self._real:
            use(library, self._needed & DISTRIBUTIONS.keys())
            modules = modules_for(self.specs, variants)
            self.specs = [narrowed(spec, modules) for spec in self.specs]
        self.askers: list[Asker] = []
        self.libraries: dict[str, Answer] = {}
        self._full = device_sim == "full"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # two threads made small cases 12 times slower
        self._stack.callback(torch.set_num_threads, threads)
        self._stack.enter_context(threadpool_limits(1))  # numpy's BLAS does not listen to torch
        self._stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(50_000, 20, 20)  # a case makes and drops thousands of objects, few of them in cycles
        gc.freeze()
        self._stack.callback(gc.unfreeze)
        device = self._open_gpu() if self._real else None
        for spec in self.specs:
            on_device = bool(self._real or spec.capabilities.library)
            if (on_device or self._for_graphs(spec)) and device is None:
                simulation = self._simulation()
                self._stack.enter_context(cuda.paused())
                self._full = simulation.kind == "full"
                device = Machine(simulation)
            machine = device if on_device and device is not None else Machine(None)
            self.askers.append(Asker(spec, machine, self.mode))
        for spec in self.specs:
            self._enter_environment(spec)
        for library in sorted(self._needed & DISTRIBUTIONS.keys()):
            importlib.import_module(library)  # which one answers must be known before anything is asked
        self.libraries = answered()

    def _for_graphs(self, spec: BackendSpec) -> bool:
        """Whether a backend that runs on the plain CPU needs the simulated device for its graphs."""
        return not self._real and spec.capabilities.cuda_graph and self._device_sim != "light"

    def _simulation(self) -> cuda.Simulation:
        """A process has one device: that of a session around this one, if it will do."""
        around = cuda.current()
        if around is not None and self._device_sim in ("auto", around.kind):
            return around
        return self._stack.enter_context(cuda.simulated_cuda(self._device_sim))

    def _enter_environment(self, spec: BackendSpec) -> None:
        """Of an engine: its import, and the releases that it pins."""
        environment = getattr(spec.factory, "environment", None)
        if environment is None:
            return
        where = f"backend {spec.name!r}: its environment"
        try:
            entered = environment()
            if isinstance(entered, AbstractContextManager):
                self._stack.enter_context(cast("AbstractContextManager[object]", entered))
                return
        except (BackendError, LibraryError, cuda.DeviceUnavailable):
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BackendError(f"{where} raised {type(error).__name__}: {reason}") from error
        raise BackendError(f"{where} is a {type(entered).__name__}, expected a context manager")

    def _open_gpu(self) -> Machine:
        gpu = GPU()
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*determinis")  # `GPU.running` makes torch speak of it
        self._stack.enter_context(large_answers_on(gpu.device))
        return gpu

    @property
    def device(self) -> str:
        """What the backends run on, in words."""
        return " and ".join(dict.fromkeys(asker.machine.name for asker in self.askers))

    @property
    def left_out(self) -> str:
        """What no check looks at on this device, in words."""
        if self._real:
            return NOT_ON_GPU
        return "nothing" if self._full else NEEDS_FULL_DEVICE

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.libraries = answered()
