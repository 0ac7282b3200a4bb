"""The fakes under the real libraries' names.

With `fakes/site` on `sys.path`, `import flashinfer` gives `fakes.flashinfer` itself: one module object
whichever name imports it, for submodules too. What the fake leaves out is refused in one sentence.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import FrameType, ModuleType
from typing import Any

from fakes import extract, releases

LIBRARIES = tuple(extract.MODULES)


def expose(library: str) -> None:
    """Enter a fake ("flashinfer", "sgl_kernel") and its submodules in `sys.modules` under the real names."""
    package = importlib.import_module(f"fakes.{library}")
    modules = {f"{library}.{part}": f"fakes.{library}.{part}" for part in submodules(library)}
    found = {real: importlib.import_module(name) for real, name in modules.items()} | {library: package}
    for module in found.values():
        said = vars(module)
        said["__fake__"] = True
        if not isinstance(said.get("__getattr__"), _Absent):
            said["__getattr__"] = _Absent(module.__name__, said.get("__getattr__"))
    sys.modules.update(found)
    if not any(isinstance(finder, _Refuse) and finder.library == library for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refuse(library))


def withdraw(library: str) -> None:
    """Undo `expose`: the next import of `library` searches again."""
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        if getattr(sys.modules[name], "__fake__", False):
            del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Refuse) and f.library == library)]


def submodules(library: str) -> tuple[str, ...]:
    """Submodules of the real library that its fake offers."""
    known = (part for part in extract.MODULES[library] if part)
    return tuple(part for part in known if importlib.util.find_spec(f"fakes.{library}.{part}"))


def offered(module: str) -> tuple[str, ...]:
    """Public names of the real module ("sgl_kernel.flash_attn") that its fake offers."""
    library = module.partition(".")[0]
    real = extract.load(library, releases.selected(library))["modules"].get(module, {})
    held = vars(sys.modules[f"fakes.{module}"])
    return tuple(name for name in real if name in held and not isinstance(held[name], ModuleType))


class _Refuse(importlib.abc.MetaPathFinder):
    """Refuses submodules that the fake lacks, before Python finds a second copy of its helpers by path."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        library = self.library
        if not fullname.startswith(f"{library}.") or not getattr(sys.modules.get(library), "__fake__", False):
            return None
        asked = sys._getframe(2).f_globals.get("__name__")
        if asked == "importlib.util":  # only asking whether it is there
            return None
        covers = ", ".join(submodules(library))
        release = releases.selected(library)
        raise ModuleNotFoundError(
            f"the fake of {library} {release} has no module {fullname}; it covers {covers}", name=fullname
        )


class _Absent:
    """A module's `__getattr__`: says in one sentence what the fake leaves out and what it covers.

    `from module import name` raises it as ImportError, which Python would word without that sentence. `own`
    is the `__getattr__` that the module brings, for names that it does have.
    """

    def __init__(self, module: str, own: Callable[[str], Any] | None) -> None:
        self.module = module
        self.own = own

    def __call__(self, name: str) -> Any:
        if self.own is not None:
            with suppress(AttributeError):
                return self.own(name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}", name=name)
        real = self.module.removeprefix("fakes.")
        library, _, part = real.partition(".")
        asked = f"{part}.{name}" if part else name
        covers = ", ".join(offered(real))
        message = f"the fake of {library} {releases.selected(library)} has no {asked}; it covers {covers}"
        if imports_from(sys._getframe(1)):
            raise ImportError(message, name=name)
        raise AttributeError(message, name=name)


def imports_from(frame: FrameType) -> bool:
    """Whether this frame is at `from module import name`, which asks for an attribute of the module."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
