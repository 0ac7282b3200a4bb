"""What an engine's import is given in place of packages that are not there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.engines.path import look_in
from backends.engines.placeholders import PlaceholderUsed, placeholders
from backends.registry import BackendError
from fakes import releases, shell

ENGINE = """
import importlib.util

import decoder_of_images.codecs as codecs
from decoder_of_images import Format, register
from flashinfer.fp4_quantization import fp4_quantize
from flashinfer import bmm_fp8

try:
    from flashinfer import no_such_name
except ImportError as error:
    no_such_name = str(error)

class Picture(Format.Base):
    kind = codecs.Kind.jpeg

found = importlib.util.find_spec("decoder_of_sound") is not None

def decode():
    return register(Picture)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "some_engine.py").write_text(ENGINE)
    path, modules = list(sys.path), set(sys.modules)
    look_in(str(tmp_path))
    with releases.select(flashinfer="0.7.2"):
        shell.expose("flashinfer")
        yield "some_engine"
        shell.withdraw("flashinfer")
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("some_engine", "decoder_of_images"):
            del sys.modules[name]


def test_an_engine_imports_and_fails_where_it_calls_what_is_not_there(engine: str) -> None:
    before = list(sys.meta_path)
    with placeholders(["decoder_of_images", "decoder_of_sound"], parts_of=["flashinfer"]):
        module = importlib.import_module(engine)
    assert sys.meta_path == before
    assert module.Picture.kind.__name__ == "jpeg"
    assert not module.found
    assert "no_such_name" in module.no_such_name
    for call, name in (
        (module.decode, "decoder_of_images.register"),
        (module.Picture, "decoder_of_images.Format.Base"),
        (module.bmm_fp8, "flashinfer.bmm_fp8"),
        (module.fp4_quantize, "flashinfer.fp4_quantization.fp4_quantize"),
    ):
        with pytest.raises(PlaceholderUsed, match=f"^{name} was called: it is a placeholder"):
            call()


def test_afterwards_nothing_answers(engine: str) -> None:
    with placeholders(["decoder_of_images"], parts_of=["flashinfer"]):
        importlib.import_module(engine)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("decoder_of_images")
    with pytest.raises(ModuleNotFoundError, match=r"has no module flashinfer\.fp4_quantization"):
        importlib.import_module("flashinfer.fp4_quantization")
    with pytest.raises(ImportError, match="has no bmm_fp8"):
        exec("from flashinfer import bmm_fp8")


def test_an_installed_package_comes_first(engine: str) -> None:
    with placeholders(["json", "numpy"]):
        assert importlib.import_module("json.tool").__file__
    assert engine


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"--engine-path .*absent: there is no such folder"):
        look_in(str(tmp_path / "absent"))


def test_a_checkout_is_searched_where_its_packages_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["first"])
    (tmp_path / "python").mkdir()
    look_in(str(tmp_path))
    look_in(str(tmp_path))
    assert sys.path == ["first", str(tmp_path), str(tmp_path / "python")]
