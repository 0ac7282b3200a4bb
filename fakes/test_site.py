"""The fakes under the real libraries' names."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fakes
from fakes import releases, shell

ROOT = Path(fakes.__file__).parents[1]
SITE = ROOT / "fakes" / "site"

PARTS = [
    ("flashinfer", "decode", "BatchDecodeWithPagedKVCacheWrapper"),
    ("flashinfer", "cascade", "merge_state"),
    ("sgl_kernel", "flash_attn", "flash_attn_with_kvcache"),
    ("sgl_kernel", "attention", "merge_state_v2"),
]
ORDERS = {
    "package first": ["import {lib}", "import {lib}.{part}", "import fakes.{lib}.{part}"],
    "submodule first": ["import {lib}.{part}", "import fakes.{lib}", "import {lib}"],
    "fake first": ["import fakes.{lib}.{part}", "import {lib}.{part}", "import {lib}"],
    "by name": [
        "import importlib",
        "importlib.import_module('{lib}.{part}')",
        "importlib.import_module('fakes.{lib}')",
    ],
    "from": ["from {lib}.{part} import {name}", "from {lib} import {part}", "import fakes.{lib}"],
    "renamed": ["import {lib}.{part} as other", "import fakes.{lib}.{part} as mine", "assert other is mine"],
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The site on the path, and neither library imported yet under any name."""
    kept = {name: sys.modules[name] for name in sys.modules if _of_a_library(name)}
    attributes = {name: getattr(fakes, name) for name in shell.LIBRARIES if hasattr(fakes, name)}
    finders = list(sys.meta_path)
    for name in kept:
        del sys.modules[name]
    for library in shell.LIBRARIES:
        shell.withdraw(library)
    monkeypatch.syspath_prepend(SITE)
    yield
    for name in [name for name in sys.modules if _of_a_library(name)]:
        del sys.modules[name]
    sys.modules.update(kept)
    sys.meta_path[:] = finders
    for name, value in attributes.items():
        setattr(fakes, name, value)


def _of_a_library(name: str) -> bool:
    return name.removeprefix("fakes.").split(".")[0] in shell.LIBRARIES


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("library", "part", "name"), PARTS)
def test_one_module_object_whichever_name_imports_it(library: str, part: str, name: str, order: str) -> None:
    exec("\n".join(ORDERS[order]).format(lib=library, part=part, name=name), {})
    package, module = sys.modules[library], sys.modules[f"{library}.{part}"]
    assert package is sys.modules[f"fakes.{library}"]
    assert module is sys.modules[f"fakes.{library}.{part}"] is getattr(package, part)
    assert (package.__name__, module.__name__) == (f"fakes.{library}", f"fakes.{library}.{part}")
    assert getattr(module, name).__module__.startswith(f"fakes.{library}")


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("library", shell.LIBRARIES)
def test_a_fake_says_that_it_is_one(library: str) -> None:
    package = importlib.import_module(library)
    assert package.__fake__ is True
    assert package.__version__ == releases.selected(library)
    parts = shell.submodules(library)
    assert len(parts) >= 3
    assert all(sys.modules[f"{library}.{part}"].__fake__ is True for part in parts)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("library", shell.LIBRARIES)
def test_withdrawn_fakes_are_searched_again(library: str) -> None:
    importlib.import_module(library)
    shell.withdraw(library)
    assert not [name for name in sys.modules if name.split(".")[0] == library]
    sys.path.remove(str(SITE))
    importlib.invalidate_caches()
    if importlib.util.find_spec(library) is None:
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{library}'"):
            importlib.import_module(library)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("absent", "sentence"),
    [
        (
            "flashinfer.gemm",
            "the fake of flashinfer 0.6.6 has no module flashinfer.gemm; it covers cascade, ",
        ),
        ("flashinfer.arrays", "the fake of flashinfer 0.6.6 has no module flashinfer.arrays; it covers "),
        (
            "sgl_kernel.moe",
            "the fake of sgl_kernel 0.4.6 has no module sgl_kernel.moe; it covers attention, ",
        ),
        ("sgl_kernel.checks", "the fake of sgl_kernel 0.4.6 has no module sgl_kernel.checks; it covers "),
    ],
)
def test_absent_submodules_are_refused_in_one_sentence(absent: str, sentence: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(absent)
    assert caught.value.name == absent
    assert str(caught.value).startswith(sentence)


@pytest.mark.usefixtures("site")
def test_asking_whether_a_submodule_is_there_is_no_error() -> None:
    assert importlib.util.find_spec("sgl_kernel") is not None
    assert importlib.util.find_spec("sgl_kernel.moe") is None
    assert importlib.util.find_spec("sgl_kernel.flash_attn") is not None


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flashinfer", "gelu_and_mul"),
        ("flashinfer.decode", "get_batch_decode_module"),
        ("sgl_kernel", "rmsnorm"),
        ("sgl_kernel.attention", "cutlass_mla_decode"),
    ],
)
def test_absent_names_are_refused_in_one_sentence(module: str, name: str) -> None:
    library, _, part = module.partition(".")
    asked = f"{part}.{name}".lstrip(".")
    sentence = f"the fake of {library} {releases.selected(library)} has no {asked}; it covers "
    imported = importlib.import_module(module)
    assert not hasattr(imported, name)
    with pytest.raises(AttributeError) as missing:
        getattr(imported, name)
    with pytest.raises(ImportError) as refused:
        exec(f"from {module} import {name}", {})
    assert str(missing.value).startswith(sentence)
    assert str(refused.value).startswith(sentence)


def test_importing_is_quick_and_touches_no_device() -> None:
    program = [
        f"import sys; sys.path[:0] = [{str(SITE)!r}, {str(ROOT)!r}]",
        "import torch, time",
        "start = time.process_time()",
        "import flashinfer, sgl_kernel",
        "assert flashinfer.__fake__ and sgl_kernel.__fake__",
        "assert not torch.cuda.is_initialized()",
        "assert 'griffe' not in sys.modules",
        "print(time.process_time() - start)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0
