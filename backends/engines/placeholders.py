"""Placeholders for packages that an engine imports and that computing attention does not need.

An engine imports far more than its attention backends: image decoders, quantisation formats, kernels of other
models. While an engine is imported, a name of the listed packages that are not installed is answered by a class that
can be named, subclassed and looked into, and that raises when it is called. Installed packages always come first.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from fakes import extract, releases, shell


class PlaceholderUsed(RuntimeError):  # noqa: N818 - what the engine asked for is not here
    """An engine called something that stands in for a package which is not installed."""


class Placeholder(type):
    """The class of every placeholder. `_dotted`: what it stands for."""

    _dotted: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        raise PlaceholderUsed(f"{cls._dotted} was called: it is a placeholder, the package is not installed")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = placeholder(f"{cls._dotted}.{name}")
        setattr(cls, name, value)
        return value


def placeholder(dotted: str) -> Placeholder:
    """A new placeholder for the object with this dotted name."""
    package, _, name = dotted.rpartition(".")
    return Placeholder(name, (), {"_dotted": dotted, "__module__": package})


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def covers(self, name: str) -> bool:
        return name.partition(".")[0] in self.packages

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if not self.covers(fullname) or _only_asked():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names appear when they are asked for."""


class _Submodules(_Finder):
    """Modules of libraries that are there in part: the fakes cover attention and nothing else."""

    def covers(self, name: str) -> bool:
        if not super().covers(name) or "." not in name:
            return False
        library = sys.modules.get(name.partition(".")[0])
        return getattr(library, "__fake__", False) is True and name not in sys.modules


def _only_asked() -> bool:
    """Whether `importlib.util.find_spec` asks: what is not installed is then not there."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to see who asks
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


@contextmanager
def placeholders(packages: Collection[str], *, parts_of: Collection[str] = ()) -> Iterator[None]:
    """Answer for `packages` that are not installed, and for what the fakes of `parts_of` leave out, in the block.

    Afterwards a later import finds what is really there; what was imported within keeps its placeholders.
    """
    last, first = _Finder(packages), _Submodules(parts_of)
    sys.meta_path.append(last)
    sys.meta_path.insert(0, first)
    names = [
        _Names(sys.modules[f"{library}.{part}".rstrip(".")])
        for library in parts_of
        for part in ("", *shell.submodules(library))
    ]
    try:
        yield
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (first, last)]
        for module in names:
            module.remove()
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


@contextmanager
def quiet() -> Iterator[None]:
    """Whatever an engine's import warns of is between it and its packages; a test run may hold warnings for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Names:
    """Lets `from library import name` succeed for what the real release has and its fake leaves out."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.real = module.__name__.removeprefix("fakes.")
        library = self.real.partition(".")[0]
        surface = extract.load(library, releases.selected(library))
        self.has: Collection[str] = surface["modules"].get(self.real, ())
        self.own: Any = vars(module)["__getattr__"]
        vars(module)["__getattr__"] = self

    def remove(self) -> None:
        vars(self.module)["__getattr__"] = self.own

    def __call__(self, name: str) -> Any:
        if name in self.has and shell.imports_from(sys._getframe(1)):  # noqa: SLF001
            return placeholder(f"{self.real}.{name}")
        return self.own(name)
