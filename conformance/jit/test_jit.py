"""Which kernels are chosen, and compiling them with a stand-in for FlashInfer."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backends.libraries import LibraryError
from backends.registry import resolve
from cases.model import Case, Heads, Mask, Request, Step
from cases.wanted import Variant
from conformance.choices import chosen_backends
from conformance.jit import build, prebuild
from conformance.jit.build import JitError, needed, prepare
from conformance.jit.choose import choose, modules_for, narrowed, pairs
from conformance.jit.modules import LARGE_GROUPS, MERGE, SMALL_GROUPS, Module, modules_of, use_of
from conformance.support import unsupported

ROOT = Path(__file__).resolve().parents[2]
SPECS = [resolve(name) for name in chosen_backends([])]


def every_module() -> set[Module]:
    return {
        m for s in SPECS if (use := use_of(s.name, s.capabilities)) for m in modules_of(use, s.capabilities)
    }


def test_the_simplest_of_each_kind_is_there_whatever_the_limit() -> None:
    assert modules_for(SPECS, 1) == [Module("decode"), Module("fa2"), Module("fa3"), MERGE]


@pytest.mark.parametrize(("limit", "at_least"), [(12, 0.95), (20, 1.0)])
def test_pairs_of_settings_are_covered(limit: int, at_least: float) -> None:
    chosen = modules_for(SPECS, limit)
    assert len(chosen) == limit
    assert set(chosen) <= every_module()
    asked = {pair for module in every_module() for pair in pairs(module)}
    covered = {pair for module in chosen for pair in pairs(module)}
    assert len(covered) >= at_least * len(asked)


def test_there_is_nothing_to_compile_for_the_others() -> None:
    assert modules_for([resolve("fa"), resolve("torch"), resolve("kernel:fa-kvcache")]) == []
    assert choose([], [], 12) == []


def test_each_backend_has_a_kernel_that_it_can_run() -> None:
    wide = replace(resolve("fi"), name="wide")
    wide = replace(wide, capabilities=replace(wide.capabilities, head_dims=frozenset({(128, 128)})))
    chosen = modules_for([resolve("fi"), wide], 1)
    assert narrowed(wide, chosen).capabilities.variants == (Variant(head_dims=(128, 128)),)


def test_more_than_there_are() -> None:
    assert modules_for([resolve("kernel:fi-merge")], 99) == [MERGE]


def test_settings_of_an_engine_that_runs_two_kernels() -> None:
    bf16 = Module("decode", "bfloat16", "bfloat16", 128, 128)
    modules = [Module("decode"), Module("fa2"), bf16, Module("fa2", window=True)]
    variants = narrowed(resolve("fi"), modules).capabilities.variants
    wide = Variant(dtype="bfloat16", kv_dtype="bfloat16", head_dims=(128, 128))
    assert variants == (
        Variant(),
        Variant(window=True, group_sizes=SMALL_GROUPS, phases=frozenset({"prefill"})),
        Variant(window=True, group_sizes=LARGE_GROUPS),
        replace(wide, group_sizes=SMALL_GROUPS, phases=frozenset({"decode"})),
    )


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        (
            "fa,fi",
            (
                Variant(group_sizes=SMALL_GROUPS, phases=frozenset({"prefill"})),
                Variant(group_sizes=LARGE_GROUPS),
            ),
        ),
        ("fi,fa", (Variant(),)),
        ("kernel:fi-ragged", (Variant(),)),
        ("kernel:fi-ragged-fa3", ()),
        ("fa", ()),
        ("kernel:fi-merge", ()),
    ],
)
def test_settings_where_only_fa2_is_compiled(name: str, variants: tuple[Variant, ...]) -> None:
    assert narrowed(resolve(name), [Module("fa2")]).capabilities.variants == variants


def test_a_case_of_another_kernel_is_not_asked() -> None:
    spec = narrowed(resolve("fi"), [Module("decode"), Module("fa2")])
    case = Case((Step((Request(3, 1),), phase="decode", kind="decode"),), heads=Heads(2, 1))
    assert unsupported(case, spec.capabilities) is None
    for other in (replace(case, dtype="bfloat16"), replace(case, mask=Mask(window=3))):
        assert unsupported(other, resolve("fi").capabilities) is None
        assert unsupported(other, spec.capabilities) == "settings that no compiled variant has"


CORE = """
import time
from pathlib import Path
from flashinfer.jit import env

class JitSpec:
    is_aot = False
    def __init__(self, name):
        self.name, self.sources = name, [1, 2]
        self.jit_library_path = env.FLASHINFER_JIT_DIR / name / f"{name}.so"
    @property
    def is_compiled(self):
        return self.jit_library_path.exists()
    def build_and_load(self):
        raise SystemExit("nobody asked for that")
    def build(self, verbose, need_lock):
        if "256" in self.name:
            print("kernel.cu:7: error: too wide")
            raise RuntimeError("Ninja build failed.")
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_text("a kernel")
"""
ENV = """
import os
from pathlib import Path
FLASHINFER_WORKSPACE_DIR = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache" / "flashinfer" / "9.9.9" / "90a"
FLASHINFER_JIT_DIR = FLASHINFER_WORKSPACE_DIR / "cached_ops"
"""
DECODE = """
from flashinfer.jit.core import JitSpec
def get_batch_decode_module(q, kv, o, idx, qk, vo, rope, window, cap):
    JitSpec(f"decode_{q}_{kv}_{qk}_{vo}_{window}_{cap}").build_and_load()
"""
PREFILL = """
from flashinfer.jit.core import JitSpec
def get_batch_prefill_module(backend, q, kv, o, idx, qk, vo, rope, window, cap, reduction):
    JitSpec(f"{backend}_{q}_{kv}_{qk}_{vo}_{window}_{cap}").build_and_load()
"""
CASCADE = """
from flashinfer.jit.core import JitSpec
def get_cascade_module():
    JitSpec("cascade").build_and_load()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable flashinfer that compiles text files. Returns its cache."""
    package = tmp_path / "site" / "flashinfer"
    (package / "jit").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.9.9"\n')
    (package / "jit" / "__init__.py").touch()
    for name, text in {
        "jit/core": CORE,
        "jit/env": ENV,
        "decode": DECODE,
        "prefill": PREFILL,
        "cascade": CASCADE,
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.mark.slow
def test_what_is_compiled_once_stays(stand_in: Path) -> None:
    out = io.StringIO()
    names = ["kernel:fi-prefill", "kernel:fi-merge"]
    listing = prepare(names, 2, out=out)
    assert (listing.release, listing.arch) == ("9.9.9", "90a")
    assert [str(c.module) for c in listing.modules] == ["fa2 float16, 64/64", "merge"]
    assert all(c.file.read_text() == "a kernel" and stand_in in c.file.parents for c in listing.modules)
    said = out.getvalue().splitlines()
    assert said[0] == "jit: 2 of 2 kernels of flashinfer 9.9.9 to compile"
    assert [line.split(" after ")[0] for line in said[1:]] == [f"jit: {n} of 2 compiled" for n in (1, 2)]
    again = io.StringIO()
    assert all(c.ready for c in prepare(names, 2, out=again).modules)
    assert again.getvalue() == ""


def test_a_kernel_that_does_not_compile_is_named(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del stand_in
    wide = build.Compiled(
        Module("decode", head_dim_qk=256, head_dim_vo=256), "wide", Path("wide.so"), 2, ready=False
    )

    def listed(*_: object, **__: object) -> build.Listing:
        return build.Listing((wide,), "9.9.9")

    monkeypatch.setattr(build, "needed", listed)
    with pytest.raises(
        JitError, match=r"256/256 does not compile: kernel.cu:7: error: too wide \(all of it: "
    ):
        prepare(["kernel:fi-decode"], 1, out=io.StringIO())


def test_without_flashinfer() -> None:
    with pytest.raises(LibraryError, match=r"^real flashinfer was asked for, but it is not installed"):
        needed(["fi"])


NVCC = """#!/bin/sh
echo '#$ _HERE_={home}/bin' >&2
"""


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit behind a script called nvcc, as some distributions have it."""
    home = tmp_path / "cuda-13.0"
    (home / "bin").mkdir(parents=True)
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(NVCC.format(home=home))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return home


@pytest.mark.slow
def test_prebuilding(stand_in: Path, toolkit: Path, tmp_path: Path) -> None:
    del stand_in
    assert prebuild.cuda_home() == toolkit
    folder = tmp_path / "prebuilt"
    listing = prebuild.prebuild(["kernel:fi-prefill"], folder, limit=1, out=io.StringIO())
    assert listing.arch == "90a"
    code = (
        "import flashinfer_jit_cache as c; (p,) = c.get_jit_cache_providers();"
        "print(c.__version__, p.version, p.cuda_architectures, len(p.modules), c.get_jit_cache_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    cache = folder / "flashinfer_jit_cache" / "jit_cache"
    assert done.stdout.strip() == f"9.9.9 9.9.9 ['sm90a'] 1 {cache}"
    for compiled in listing.modules:
        assert (cache / compiled.name / f"{compiled.name}.so").read_text() == "a kernel"
    with pytest.raises(JitError, match="holds kernels of another release or architecture"):
        prebuild.pack(listing, folder, "10.0a")
    with pytest.raises(JitError, match="expected a compute capability"):
        prebuild.prebuild([], folder, arch="sm_90")


def test_the_stub_stands_for_the_drivers_library(toolkit: Path, tmp_path: Path) -> None:
    found = prebuild.toolkit(tmp_path)
    assert found["CUDA_HOME"] == str(toolkit)
    library = (tmp_path / "stub" / "libcuda.so").read_bytes()
    assert b"libcuda.so.1" in library
    assert "--no-as-needed -lcuda" in found["FLASHINFER_EXTRA_LDFLAGS"]


def test_no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JitError, match=r"^there is no nvcc"):
        prebuild.cuda_home()
