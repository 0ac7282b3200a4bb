"""Whoever is asked for by kind is the one that answers. Each rule runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backends import libraries

ROOT = Path(__file__).parents[1]


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A folder with a tiny `flashinfer` that says nothing of being a fake."""
    package = tmp_path / "installed" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9.8.7'\n")
    (package / "decode.py").write_text("")
    return package.parent


def run(code: str, *path: Path) -> str:
    """Output of `code` in a fresh interpreter with the repository and `path`, but no installed package."""
    prelude = (
        "import sys\n"
        "from backends import libraries\n"
        "from backends.libraries import LibraryError, answered, use\n"
        f"sys.path[1:1] = {[str(p) for p in path]!r}\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", prelude + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(code: str, *path: Path) -> str:
    """The one sentence of the LibraryError that the last line of `code` raises."""
    *before, last = code.rstrip().split("\n")
    guarded = "\n".join([*before, "try:", f"    {last}", "except LibraryError as error:", "    print(error)"])
    out = run(guarded, *path)
    assert out, "nothing was refused"
    assert "\n" not in out
    return out


def test_choice_imports_nothing() -> None:
    assert run("use('fake', ['flashinfer', 'sgl_kernel'])\nprint('flashinfer' in sys.modules)") == "False"
    assert run("use('fake', ['flashinfer'])\nprint(sys.path[0] == str(libraries.SITE))") == "True"


def test_real_library_answers_where_real_is_asked_for(standin: Path) -> None:
    out = run(
        "use('real', ['flashinfer'])\nassert not answered()\n"
        "import flashinfer\nprint(answered()['flashinfer'])",
        standin,
    )
    file = standin / "flashinfer" / "__init__.py"
    assert out == f"Answer(kind='real', version='9.8.7', file={str(file)!r})"


def test_real_clears_the_fakes_from_the_path(standin: Path) -> None:
    out = run(
        "sys.path.insert(0, str(libraries.SITE))\nuse('real', ['flashinfer'])\nimport flashinfer\n"
        "print(answered()['flashinfer'].kind, str(libraries.SITE) in sys.path)",
        standin,
    )
    assert out == "real False"


def test_real_needs_an_installed_library(tmp_path: Path) -> None:
    assert refusal("use('real', ['flashinfer'])") == (
        "real flashinfer was asked for, but it is not installed: pip install flashinfer-python"
    )
    (tmp_path / "sgl_kernel").mkdir()  # a folder of that name is no library
    assert refusal("use('real', ['sgl_kernel'])", tmp_path).endswith("pip install sglang-kernel")


def test_fake_that_answers_for_real_is_an_error(standin: Path) -> None:
    (standin / "flashinfer" / "__init__.py").write_text("__fake__ = True\n")
    wrong = "real flashinfer was asked for, but flashinfer is the fake one, from "
    assert refusal("use('real', ['flashinfer'])\nimport flashinfer\nanswered()", standin).startswith(wrong)
    early = refusal("import flashinfer\nuse('real', ['flashinfer'])", standin)
    assert early.startswith(wrong)
    assert early.endswith("imported before the choice was made")


def test_real_that_answers_for_fake_is_an_error(standin: Path) -> None:
    wrong = "fake flashinfer was asked for, but flashinfer is the real one, from "
    late = "use('fake', ['flashinfer'])\nsys.path.insert(0, sys.path[2])\nimport flashinfer\nanswered()"
    assert refusal(late, standin).startswith(wrong)
    assert refusal("import flashinfer\nuse('fake', [])", standin).startswith(wrong)


def test_half_a_library_of_the_other_kind_is_an_error(standin: Path) -> None:
    (standin / "flashinfer" / "decode.py").write_text("__fake__ = True\n")
    code = "import flashinfer.decode\nanswered()"
    assert refusal(code, standin).startswith("flashinfer is real, but flashinfer.decode is fake, from ")


def test_kind_does_not_change_in_a_process(standin: Path) -> None:
    assert refusal("use('fake', [])\nuse('fake', [])\nuse('real', [])", standin) == (
        "this process runs on fake libraries; real ones need a process of their own"
    )
    assert run("use('real', ['flashinfer'])\nprint(libraries.chosen())", standin) == "real"


def test_refused_choice_is_no_choice() -> None:
    refused = "try: use('real', ['flashinfer'])\nexcept LibraryError: pass\n"
    assert run(f"{refused}use('fake', [])\nprint(libraries.chosen())") == "fake"


def test_unknown_words_are_refused() -> None:
    assert refusal("use('fast', [])") == "library kind is 'fast', expected 'fake' or 'real'"
    assert refusal("use('fake', ['numpy'])") == "unknown library 'numpy'; known are flashinfer, sgl_kernel"


def test_fakes_answer_where_fakes_are_asked_for() -> None:
    code = (
        "from backends.libraries import answered, use\n"
        "use('fake', ['flashinfer', 'sgl_kernel'])\n"
        "from flashinfer import BatchDecodeWithPagedKVCacheWrapper\n"
        "from sgl_kernel.flash_attn import flash_attn_with_kvcache\n"
        "print(*(f'{name} {a.kind} {a.version}' for name, a in answered().items()), sep=',')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "flashinfer fake 0.6.6,sgl_kernel fake 0.4.6"
    assert libraries.SITE.name == "site"
