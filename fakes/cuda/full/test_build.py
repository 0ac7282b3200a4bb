"""Where the full device cannot be had, it says why in one sentence, and the light one serves."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from fakes import cuda
from fakes.cuda.claims import real_gpu
from fakes.cuda.full import build

pytestmark = pytest.mark.skipif(real_gpu(), reason="a CUDA device is not simulated beside a real one")


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setattr(build, "_loaded", [])
    monkeypatch.setenv("ATTENTION_CONFORMANCE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", ["2.11.0+cpu", "2.12.1", "2.13.0+cpu", "2.14.0a0+git1234"])
def test_supported_releases(version: str) -> None:
    build.require_torch(version)


@pytest.mark.parametrize("version", ["2.10.2+cpu", "2.15.0", "3.0.0", "nightly"])
def test_unknown_releases_are_refused(version: str) -> None:
    with pytest.raises(
        cuda.DeviceUnavailable, match=f"internals of torch 2.11 to 2.14; this is torch {version[:4]}"
    ):
        build.require_torch(version)


def test_a_gpu_build_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with pytest.raises(cuda.DeviceUnavailable, match="needs a CPU build of torch"):
        build.require_torch("2.13.0+cu130")
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(cuda.DeviceUnavailable, match="needs a CPU build of torch"):
        build.require_torch("2.13.0+rocm6.0")


def test_no_compiler(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cuda.DeviceUnavailable, match="there is no 'no-such-compiler' here"):
        build.extension()
    with cuda.simulated_cuda("auto") as simulation:
        assert simulation.kind == "light"


def test_no_ninja(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ninja_folder", lambda: None)
    with pytest.raises(cuda.DeviceUnavailable, match="pip install ninja"):
        build.extension()


def test_no_headers(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(nothing_built)})
    with pytest.raises(cuda.DeviceUnavailable, match="Python's headers"):
        build.extension()


def test_no_place_to_build_in(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nothing_built / "simulated-cuda").write_text("a file is in the way")
    with pytest.raises(cuda.DeviceUnavailable, match="set ATTENTION_CONFORMANCE_CACHE"):
        build.extension()


def test_a_compiler_that_fails(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = nothing_built / "csrc"
    sources.mkdir()
    (sources / "module.cpp").write_text("#error no such internals\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    with pytest.raises(cuda.DeviceUnavailable, match=r"does not compile against torch .*no such internals"):
        build.extension()
    assert [path.name for path in (nothing_built / "simulated-cuda").iterdir() if path.is_dir()] == []


def test_the_cache_knows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.cache_folder()
    assert torch.__version__ in before.name
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in build._SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build.cache_folder() == before
    (sources / "module.cpp").write_text("// another")
    assert build.cache_folder() != before


def test_a_process_that_waits_for_another_builder_loads_what_it_built(
    full: cuda.Simulation, tmp_path: Path
) -> None:
    """The lock is held while the library appears."""
    del full
    folder = tmp_path / "built"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with build._one_builder(folder):
            waiting = pool.apply_async(_load, (folder,))
            folder.mkdir()
            build._library(folder).write_bytes(build._library(build.cache_folder()).read_bytes())
        assert waiting.get(timeout=60) == ""


def _load(folder: Path) -> str:
    return build._load_or_build(folder).why_not()
