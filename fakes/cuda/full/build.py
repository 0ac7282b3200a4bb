"""Builds the extension once per torch build, Python and source, and keeps it in a per-user cache.

`ATTENTION_CONFORMANCE_CACHE` names another folder than `~/.cache/attention-conformance`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fakes.cuda.interface import DeviceUnavailable

SUPPORTED = ((2, 11), (2, 14))
"""First and last torch release whose internals the extension is written for."""
_NAME = "simulated_cuda"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O1", "-g0"]
_loaded: list[ModuleType] = []


def extension() -> ModuleType:
    """The compiled extension, built first where that has not been done.

    Raises:
        DeviceUnavailable: this torch is not a supported CPU build, or there is nothing to compile with.
    """
    if not _loaded:
        require_torch(torch.__version__)
        _loaded.append(_load_or_build(cache_folder()))
    return _loaded[0]


def require_torch(version: str) -> None:
    """Refuse what the extension was not written for.

    Raises:
        DeviceUnavailable: in one sentence.
    """
    first, last = (".".join(map(str, release)) for release in SUPPORTED)
    if torch.backends.cuda.is_built() or torch.version.hip is not None:
        raise DeviceUnavailable(
            f"the full simulated CUDA device needs a CPU build of torch; torch {version} has a GPU backend of its own"
        )
    try:
        release = tuple(int(part) for part in version.partition("+")[0].split(".")[:2])
    except ValueError:
        release = (0, 0)
    if not SUPPORTED[0] <= release <= SUPPORTED[1]:
        raise DeviceUnavailable(
            f"the full simulated CUDA device relies on internals of torch {first} to {last}; this is torch {version}"
        )


def cache_folder() -> Path:
    """Where the built extension lies: one folder for each torch, Python and source."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    root = os.environ.get("ATTENTION_CONFORMANCE_CACHE")
    base = Path(root) if root else Path.home() / ".cache" / "attention-conformance"
    tag = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    return base / "simulated-cuda" / tag


def is_built() -> bool:
    """Whether the extension for this torch and source lies in the cache."""
    return _library(cache_folder()).exists()


def _library(folder: Path) -> Path:
    return folder / f"{_NAME}.so"


def _load_or_build(folder: Path) -> ModuleType:
    library = _library(folder)
    if not library.exists():
        _require_compiler()
        with _one_builder(folder):
            if not library.exists():
                return _build(folder)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Processes that start at the same time wait for the first of them."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise DeviceUnavailable(
            f"the full simulated CUDA device cannot be built in {folder.parent}: {error}; set "
            "ATTENTION_CONFORMANCE_CACHE to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise DeviceUnavailable(
            f"the full simulated CUDA device needs a C++ compiler, and there is no {compiler!r} here: install g++, or "
            "name one in CXX"
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise DeviceUnavailable(
            "the full simulated CUDA device needs Python's headers (Python.h), which are not installed here"
        )
    if _ninja_folder() is None:
        raise DeviceUnavailable(
            "the full simulated CUDA device needs ninja, which torch builds extensions with: `pip install ninja`"
        )


def _ninja_folder() -> str | None:
    """Where the program is: on the path, or beside this interpreter, where pip puts it."""
    beside = Path(sys.executable).parent
    found = shutil.which("ninja") or shutil.which("ninja", path=str(beside))
    return None if found is None else str(Path(found).parent)


def _build(folder: Path) -> ModuleType:
    """Build and load in a folder of its own, and give it its name when it is whole."""
    try:
        from torch.utils.cpp_extension import load
    except ImportError as error:
        raise DeviceUnavailable(
            f"the full simulated CUDA device is built with torch.utils.cpp_extension, which says: {error}"
        ) from error
    for broken_off in folder.parent.glob(f"{folder.name}.*[0-9]"):
        shutil.rmtree(broken_off, ignore_errors=True)
    working = folder.with_name(f"{folder.name}.{os.getpid()}")
    working.mkdir()
    path = os.environ.get("PATH", "")
    ninja = _ninja_folder()
    try:
        os.environ["PATH"] = f"{ninja}{os.pathsep}{path}"
        said = f"building the simulated CUDA device for torch {torch.__version__}: once, about a minute"
        print(said, file=sys.stderr, flush=True)  # noqa: T201
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = load(
                _NAME,
                [str(_SOURCES / "module.cpp")],
                extra_cflags=_FLAGS,
                build_directory=str(working),
            )
        working.rename(folder)
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"the full simulated CUDA device does not compile against torch {torch.__version__}: {_reason(error)}"
        ) from error
    finally:
        os.environ["PATH"] = path
        shutil.rmtree(working, ignore_errors=True)
    return module


def _reason(error: RuntimeError) -> str:
    """The compiler's first error line, of all that it wrote."""
    lines = str(error).splitlines() or ["no reason given"]
    return next((line.strip() for line in lines if "error:" in line), lines[0])
