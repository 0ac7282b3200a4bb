"""Compile modules side by side, in processes of their own, with a line about the progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from backends.libraries import LibraryError
from conformance.jit.choose import DEFAULT_VARIANTS
from conformance.jit.modules import KINDS, Module

JOBS_PER_CORE = 1.5
"""Compilers at a time: each waits for the disk now and then."""
_CHILD = "conformance.jit.child"


class JitError(LibraryError):
    """A kernel that does not compile. The message is one sentence, and names the log."""


@dataclass(frozen=True)
class Compiled:
    """One module: FlashInfer's name for it, the file, how many sources, whether it stood there before."""

    module: Module
    name: str
    file: Path
    sources: int
    ready: bool


@dataclass(frozen=True)
class Listing:
    """What a run needs. Without modules the rest is empty."""

    modules: tuple[Compiled, ...] = ()
    release: str = ""
    arch: str = ""
    folder: str = ""

    @property
    def missing(self) -> list[Compiled]:
        return [compiled for compiled in self.modules if not compiled.ready]


Environment = Mapping[str, str]


def needed(
    names: Sequence[str], limit: int = DEFAULT_VARIANTS, *, environment: Environment | None = None
) -> Listing:
    """Which modules the named backends need. Imports FlashInfer in another process, which sees the GPU.

    Raises:
        LibraryError: a backend or FlashInfer cannot be had.
    """
    answer = _ask("list", {"names": list(names), "limit": limit}, environment)
    if not answer["modules"]:
        return Listing()
    return Listing(
        modules=tuple(
            Compiled(Module(**m["module"]), m["name"], Path(m["file"]), m["sources"], m["ready"])
            for m in answer["modules"]
        ),
        release=answer["release"],
        arch=answer["arch"],
        folder=answer["folder"],
    )


def prepare(
    names: Sequence[str],
    limit: int = DEFAULT_VARIANTS,
    *,
    jobs: int | None = None,
    environment: Environment | None = None,
    out: TextIO | None = None,
) -> Listing:
    """Have everything compiled that the named backends need; what is compiled already stays.

    Args:
        names: backends.
        limit: modules at most (`choose.modules_for`).
        jobs: compilers at a time; None: by the number of cores.
        environment: of the compiling processes, beside this one's.
        out: is told the progress.

    Raises:
        LibraryError: a backend or FlashInfer cannot be had. JitError: a module does not compile.
    """
    listing = needed(names, limit, environment=environment)
    missing = listing.missing
    if missing:
        say = _teller(out or sys.stderr)
        say(
            f"jit: {len(missing)} of {len(listing.modules)} kernels of flashinfer {listing.release} to compile"
        )
        _Builds(missing, jobs or max(1, int(JOBS_PER_CORE * cores())), environment, say).run()
    return listing


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Build:
    what: Compiled
    process: subprocess.Popen[str]
    log: Path


@dataclass
class _Builds:
    """The slowest kinds first, as many at a time as there are jobs for."""

    missing: list[Compiled]
    jobs: int
    environment: Environment | None
    say: Callable[[str], None]
    running: list[_Build] = field(default_factory=list[_Build])
    started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        waiting = sorted(self.missing, key=lambda c: (_SLOWEST.index(c.module.kind), -c.module.head_dim_qk))
        together = max(1, min(len(waiting), self.jobs // 2))
        each = max(1, self.jobs // together)
        logs = Path(tempfile.mkdtemp(prefix="conformance-jit-"))
        done = 0
        try:
            while waiting or self.running:
                while waiting and len(self.running) < together:
                    what = waiting.pop(0)
                    self.running.append(self._start(what, each, logs / f"{what.name}.log"))
                time.sleep(0.2)
                for build in [b for b in self.running if b.process.poll() is not None]:
                    self.running.remove(build)
                    _require_built(build)
                    done += 1
                    took = time.monotonic() - self.started
                    self.say(
                        f"jit: {done} of {len(self.missing)} compiled after {took:.0f} s: {build.what.module}"
                    )
        finally:
            for build in self.running:
                build.process.terminate()

    def _start(self, what: Compiled, jobs: int, log: Path) -> _Build:
        with log.open("w") as file:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", _CHILD, "build", json.dumps(what.module.to_json())],
                env={**_environment(self.environment), "MAX_JOBS": str(jobs)},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return _Build(what, process, log)


_SLOWEST = ("fa3", "fa2", "decode", "merge")
assert set(_SLOWEST) == set(KINDS)


def _require_built(build: _Build) -> None:
    if build.process.returncode == 0 and build.what.file.is_file():
        return
    lines = build.log.read_text(errors="replace").splitlines()
    error = next((line for line in lines if "error:" in line), None)
    error = error or next((line for line in reversed(lines) if line.strip()), "it said nothing")
    raise JitError(f"{build.what.module} does not compile: {error.strip()} (all of it: {build.log})")


def _ask(action: str, told: dict[str, Any], environment: Environment | None) -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", _CHILD, action, json.dumps(told)],
        env=_environment(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise LibraryError(_sentence(lines[-1]))
    return json.loads(done.stdout.splitlines()[-1])


def _sentence(line: str) -> str:
    """The last line of a traceback without the exception's type, where it is one of ours."""
    kind, _, text = line.partition(": ")
    ours = kind.rpartition(".")[2] in ("LibraryError", "BackendError")
    return text if ours and text else f"the kernels that are needed cannot be found out: {line}"


def _environment(more: Environment | None) -> dict[str, str]:
    """This process's environment; the child finds our packages, and backends in the folder where the user stands."""
    found = [str(Path(__file__).resolve().parents[2]), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found)), **(more or {})}


def _teller(out: TextIO) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(line, file=out, flush=True)

    return say
