"""Real kernel libraries or fakes: decided once per process, before a backend is imported, checked afterwards.

Engines import their libraries themselves, so the choice is made where Python looks for them: `fakes/site` is
first on `sys.path` or not on it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import fakes
from fakes import releases

LibraryKind = Literal["fake", "real"]

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "flashinfer": ("flashinfer-python",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
}
"""Importable name of each known library -> distributions that install it, the current one first."""

FAKES = Path(fakes.__file__).resolve().parent
SITE = FAKES / "site"
"""Holds the fakes under the real libraries' names, and nothing else."""

_chosen: LibraryKind | None = None


class LibraryError(RuntimeError):
    """The library that would answer, or did, is not of the kind asked for. The message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """Which library answers to a name in this process."""

    kind: LibraryKind
    version: str
    file: str


def use(kind: LibraryKind, libraries: Iterable[str]) -> dict[str, Answer]:
    """Decide for this process that `libraries` are fake or real; returns those that are imported already.

    Call it before a backend module is imported. Nothing is imported here.

    Raises:
        LibraryError: the process runs on the other kind already; a library was imported before this call and
            is of the other kind; a library is unknown; a real one is asked for and not installed.
    """
    global _chosen  # noqa: PLW0603 - sys.modules is a fact of the process, and so is this
    if kind not in ("fake", "real"):
        raise LibraryError(f"library kind is {kind!r}, expected 'fake' or 'real'")
    if _chosen not in (None, kind):
        raise LibraryError(
            f"this process runs on {_chosen} libraries; {kind} ones need a process of their own"
        )
    wanted = sorted(set(libraries))
    for name in wanted:
        if name not in DISTRIBUTIONS:
            raise LibraryError(f"unknown library {name!r}; known are {', '.join(DISTRIBUTIONS)}")
    loaded = _check(kind, "before the choice was made")
    _clear_site_from_path()
    if kind == "fake":
        sys.path.insert(0, str(SITE))
    else:
        for name in wanted:
            _require_installed(name)
    _chosen = kind
    return loaded


def chosen() -> LibraryKind | None:
    """The kind that this process was given by `use`, if any."""
    return _chosen


def answered() -> dict[str, Answer]:
    """Which file, version and kind answers for each known library that is imported by now.

    Raises:
        LibraryError: one is not of the kind that `use` chose, or its modules are of both kinds.
    """
    return _check(_chosen, "although this process chose otherwise")


def version_of(library: str) -> str | None:
    """The release of a library that answers in this process, or would; None: none does. Imports nothing.

    A fake that is chosen has the release that it stands for (`fakes.releases`).
    """
    if _chosen == "fake":
        return releases.selected(library)
    module = sys.modules.get(library)
    version = getattr(module, "__version__", None) or _installed_version(library)
    return None if version is None else str(version)


def _check(kind: LibraryKind | None, when: str) -> dict[str, Answer]:
    answers = {name: _answer(name, sys.modules[name]) for name in DISTRIBUTIONS if name in sys.modules}
    for module_name, module in list(sys.modules.items()):
        name = module_name.partition(".")[0]
        if name not in answers or not isinstance(module, ModuleType):
            continue
        found = _kind(module)
        if kind is not None and found != kind:
            raise LibraryError(
                f"{kind} {name} was asked for, but {module_name} is the {found} one, from {_file(module)}, "
                f"imported {when}"
            )
        if found != answers[name].kind:
            raise LibraryError(
                f"{name} is {answers[name].kind}, but {module_name} is {found}, from {_file(module)}"
            )
    return answers


def _answer(name: str, module: ModuleType) -> Answer:
    version = getattr(module, "__version__", None) or _installed_version(name) or "unknown"
    return Answer(_kind(module), str(version), _file(module))


def _kind(module: ModuleType) -> LibraryKind:
    says_so = getattr(module, "__fake__", False) is True
    lies_there = FAKES in Path(_file(module)).resolve().parents
    return "fake" if says_so or lies_there else "real"


def _file(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if file is None:  # a namespace package: a folder of that name somewhere on the path
        file = next(iter(getattr(module, "__path__", [])), "no file")
    return str(file)


def _installed_version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _require_installed(name: str) -> None:
    if name in sys.modules:  # and checked
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name
        raise LibraryError(
            f"real {name} was asked for, but it is not installed: pip install {DISTRIBUTIONS[name][0]}"
        )
    if FAKES in Path(spec.origin).resolve().parents:
        raise LibraryError(f"real {name} was asked for, but the fake one answers, from {spec.origin}")


def _clear_site_from_path() -> None:
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != SITE]
    sys.path_importer_cache.pop(str(SITE), None)
