"""The fakes against the committed surfaces of the real releases, and how surfaces are extracted."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import extract, releases, shell

LEFT_OUT = {
    "sgl_kernel.attention": {"cutlass_mla_decode", "cutlass_mla_get_workspace_size"},
    "sgl_kernel.flash_attn": set(),
    "sgl_kernel.flash_mla": {"flash_mla_sparse_fwd"},
    "flashinfer.cascade": {
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "get_cascade_module",
    },
    "flashinfer.decode": {
        "BatchDecodeMlaWithPagedKVCacheWrapper",
        "TrtllmGenDecodeModule",
        "get_batch_decode_jit_module",
        "get_batch_decode_mla_module",
        "get_batch_decode_module",
        "get_single_decode_module",
        "get_trtllm_gen_decode_module",
        "get_trtllm_gen_fmha_module",
        "single_decode_with_kv_cache_with_jit_module",
        "xqa_batch_decode_with_kv_cache",
    },
    "flashinfer.mla": {
        "MLAHeadDimensions",
        "MLALayerDimensions",
        "get_batch_mla_module",
        "get_mla_module",
        "get_trtllm_gen_fmha_module",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    },
    "flashinfer.page": {"get_page_module"},
    "flashinfer.prefill": {
        "fmha_v2_prefill_deepseek",
        "fmha_varlen",
        "fmha_varlen_plan",
        "get_batch_prefill_jit_module",
        "get_batch_prefill_module",
        "get_customize_batch_prefill_module",
        "get_fmha_module",
        "get_single_prefill_module",
        "get_trtllm_gen_fmha_module",
        "get_trtllm_gen_prefill_module",
        "make_hashable_cache",
        "single_prefill_with_kv_cache_with_jit_module",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
    },
    "flashinfer.quantization": {"get_quantization_module"},
}
"""Public names that a module's fake leaves out, in the default release. Other modules are left out whole."""

LIBRARIES = shell.LIBRARIES


def described(library: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Dotted name, surface entry and fake object of everything that a fake offers."""
    surface = extract.load(library, releases.selected(library))
    for part in ("", *shell.submodules(library)):
        module = f"{library}.{part}".rstrip(".")
        fake = importlib.import_module(f"fakes.{module}")
        for name in shell.offered(module):
            entry = surface["modules"][module][name]
            if "from" in entry:
                entry = surface["modules"].get(entry["from"], {}).get(entry.get("name", name))
            if entry is not None:
                yield f"{module}.{name}", entry, vars(fake)[name]


OFFERED = [pytest.param(*found, id=found[0]) for library in LIBRARIES for found in described(library)]


def parameters(lines: list[str]) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter of a surface's list."""
    tree = ast.parse(f"def f({', '.join(lines)}): ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    names = {"torch": torch, "inspect": inspect}
    found = eval(  # the real library's own defaults
        compile(ast.fix_missing_locations(ast.Expression(_lambda(tree.args))), "surface", "eval"), names
    )
    return seen(found)


def _lambda(arguments: ast.arguments) -> ast.Lambda:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.Lambda(arguments, ast.Constant(None))


def seen(function: Any) -> list[tuple[str, str, Any]]:
    return [(p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("name", "entry", "fake"), OFFERED)
def test_signatures_are_those_of_the_release(name: str, entry: dict[str, Any], fake: Any) -> None:
    if "parameters" in entry:
        assert seen(fake) == parameters(entry["parameters"]), name
        return
    if "partial_of" in entry:
        assert callable(fake)
        return
    for member, real in entry["members"].items():
        assert hasattr(fake, member) or "field" in real or "members" in real, f"{name}.{member} is missing"
        found = inspect.getattr_static(fake, member, None)
        if "property" in real:
            assert isinstance(found, property), f"{name}.{member}"
        elif "parameters" in real:
            assert seen(getattr(fake, member)) == parameters(real["parameters"]), f"{name}.{member}"
        elif "same_as" in real:
            assert seen(getattr(fake, member)) == seen(getattr(fake, real["same_as"])), f"{name}.{member}"
        elif "field" in real:
            assert member in fake.__dataclass_fields__, f"{name}.{member}"
        else:
            assert found is not None, f"{name}.{member}"


@pytest.mark.parametrize(("name", "entry", "fake"), OFFERED)
def test_unknown_keywords_are_refused(name: str, entry: dict[str, Any], fake: Any) -> None:
    called = [fake] if "members" not in entry else [getattr(fake, m) for m in _methods(entry)]
    for function in called:
        bound = functools.partial(function, object()) if "members" in entry else function
        with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_argument'"):
            bound(no_such_argument=1)


def _methods(entry: dict[str, Any]) -> list[str]:
    return [name for name, member in entry["members"].items() if "parameters" in member]


def test_keywords_of_a_later_release_are_refused() -> None:
    from fakes.flashinfer import prefill

    later = extract.load("flashinfer", "0.7.4")["modules"]["flashinfer.prefill"]
    run = later["BatchPrefillWithPagedKVCacheWrapper"]["members"]["run"]["parameters"]
    assert any(line.startswith("lse_base") for line in run)
    with pytest.raises(TypeError, match="lse_base"):
        prefill.BatchPrefillWithPagedKVCacheWrapper.run(
            object(),
            torch.empty(1),
            torch.empty(1),
            lse_base="ln",  # pyright: ignore[reportArgumentType, reportCallIssue]
        )


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_fake_leaves_out_is_listed(library: str) -> None:
    surface = extract.load(library, releases.selected(library))
    found = {
        module: set(names) - set(shell.offered(module))
        for module, names in surface["modules"].items()
        if module != library and module.partition(".")[2] in shell.submodules(library)
    }
    assert found == {module: left for module, left in LEFT_OUT.items() if module.startswith(f"{library}.")}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_top_level_exports_what_the_submodules_offer(library: str) -> None:
    surface = extract.load(library, releases.selected(library))["modules"]
    expected = {
        name
        for name, entry in surface[library].items()
        if entry.get("from", "").removeprefix(f"{library}.") in shell.submodules(library)
        and name in shell.offered(entry["from"])
    }
    assert set(shell.offered(library)) == expected


def test_every_release_that_a_fake_knows_has_a_surface() -> None:
    for library, known in releases.KNOWN.items():
        assert set(known) <= set(extract.releases(library))


def test_unknown_release_is_refused_in_one_sentence() -> None:
    with pytest.raises(LookupError, match=r"no surface of sgl_kernel 9\.9 \(committed: 0\.4\.6, 0\.4\.10\)"):
        extract.load("sgl_kernel", "9.9")


def test_surfaces_are_canonical() -> None:
    for path in extract.SURFACES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        surface = json.loads(text)
        assert text == extract.dump(surface)
        assert path.stem == f"{surface['library']}-{surface['release']}"


SOURCE = '''
import functools
from typing import overload
from .helpers import helper
from .kernels import *

@overload
def attend(q: int) -> int: ...
@overload
def attend(q: str) -> str: ...
@functools.cache
def attend(q, /, k: int = 3, *rest, scale: float | None = None, **more) -> int:
    return 1

def _private(): ...

attend_lse = functools.partial(attend, scale=1.0)

class Wrapper(Base):
    """A wrapper."""

    limit: int = 7

    def __init__(self, buffer, *, backend="auto"): ...

    @property
    def size(self): ...

    @staticmethod
    def new(): ...

    def plan(self, *args, **kwargs): ...

    def _plan_impl(self, window=-1): ...

    begin_forward = plan
    run_return_lse = functools.partialmethod(plan, return_lse=True)
'''


@pytest.fixture(params=["wheel", "folder"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    files = {
        "flashinfer/__init__.py": "from .decode import attend\nfrom .gemm import mm\nimport torch\n",
        "flashinfer/gemm.py": "def mm(a): ...\n",
        "flashinfer/helpers.py": "def helper(): ...\n",
        "flashinfer/kernels.py": "def launched(): ...\n",
        "flashinfer/decode.py": SOURCE,
        "flashinfer_python-1.2.dist-info/METADATA": "Name: flashinfer-python\nVersion: 1.2\n",
    }
    path = tmp_path / "source"
    if request.param == "wheel":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


def test_extraction_reads_without_importing(library: Path) -> None:
    pytest.importorskip("griffe")
    surface = extract.extract(library)
    assert (surface["library"], surface["distribution"], surface["release"]) == (
        "flashinfer",
        "flashinfer-python",
        "1.2",
    )
    assert surface["modules"]["flashinfer"] == {
        "attend": {"from": "flashinfer.decode"},
        "mm": {"from": "flashinfer.gemm"},
    }
    names = surface["modules"]["flashinfer.decode"]
    assert names.keys() == {"attend", "attend_lse", "launched", "Wrapper"}
    assert names["attend"] == {
        "parameters": ["q", "/", "k: int = 3", "*rest", "scale: float | None = None", "**more"],
        "returns": "int",
    }
    assert names["attend_lse"] == {"partial_of": "attend", "with": "scale=1.0"}
    members = names["Wrapper"]["members"]
    assert names["Wrapper"]["bases"] == ["Base"]
    assert members["__init__"]["parameters"] == ["self", "buffer", "*", "backend='auto'"]
    assert members["limit"] == {"field": "int = 7"}
    assert members["size"] == {"property": True}
    assert members["new"] == {"parameters": [], "staticmethod": True}
    assert members["plan"]["forwards_to"] == ["self", "window=-1"]
    assert members["begin_forward"] == {"same_as": "plan"}
    assert members["run_return_lse"] == {"partial_of": "plan", "with": "return_lse=True"}
    assert "_plan_impl" not in members


def test_command_line_writes_a_surface_and_reports_bad_input(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("griffe")
    out = tmp_path / "surface.json"
    assert extract.main([str(library), str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["release"] == "1.2"
    assert extract.main([str(tmp_path / "absent"), str(out)]) == 2
    assert "does not hold flashinfer or sgl_kernel" in capsys.readouterr().err
    assert extract.main([]) == 2


def test_parameters_of_a_surface_are_read_as_python_reads_them() -> None:
    assert parameters(["a", "/", "b: int = 1", "*", "c: str = 'x'"]) == [
        ("a", "POSITIONAL_ONLY", inspect.Parameter.empty),
        ("b", "POSITIONAL_OR_KEYWORD", 1),
        ("c", "KEYWORD_ONLY", "x"),
    ]
