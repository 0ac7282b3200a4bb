"""Compile on a machine that has nvcc and no GPU, into a folder that the machine with the GPU takes as it is.

The folder holds a package `flashinfer_jit_cache`, the name under which FlashInfer looks for kernels that were compiled
ahead of time: with the folder on PYTHONPATH there, none of these kernels is compiled again. The kernels speak to
FlashInfer through TVM's C interface, so that neither Python's nor torch's version matters; CUDA's major version and the
architecture must be those of the GPU's machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from conformance.jit.build import JitError, Listing, prepare
from conformance.jit.choose import DEFAULT_VARIANTS

HOPPER = "9.0a"
PACKAGE = "flashinfer_jit_cache"
_ARCH = re.compile(r"^\d+\.\d[a-z]?$")


def prebuild(
    names: Sequence[str],
    folder: Path,
    *,
    limit: int = DEFAULT_VARIANTS,
    arch: str = HOPPER,
    jobs: int | None = None,
    out: TextIO | None = None,
) -> Listing:
    """Compile what the named backends need into `folder`. What is there already stays; another release adds nothing.

    Args:
        names: backends.
        folder: made if need be; one a release of FlashInfer.
        limit: modules at most.
        arch: compute capability, "9.0a" for an H100 or H200.
        jobs: compilers at a time.
        out: is told the progress.

    Raises:
        LibraryError: a backend or FlashInfer cannot be had. JitError: no toolkit, or a kernel that does not compile.
    """
    if not _ARCH.match(arch):
        raise JitError(f"arch is {arch!r}, expected a compute capability as {HOPPER!r}")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = toolkit(folder / "build") | {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(folder / "build"),
    }
    listing = prepare(names, limit, jobs=jobs, environment=environment, out=out)
    if listing.modules:
        pack(listing, folder, arch)
    return listing


def pack(listing: Listing, folder: Path, arch: str) -> None:
    """Put every module of a listing into the package of a folder.

    Raises:
        JitError: the folder holds kernels of another release or architecture.
    """
    package, target = folder / PACKAGE, f"sm{arch.replace('.', '')}"
    text = _INIT.format(release=listing.release, target=target)
    init = package / "__init__.py"
    if init.is_file() and init.read_text(encoding="utf-8") != text:
        raise JitError(f"{folder} holds kernels of another release or architecture: take a folder for each")
    package.mkdir(exist_ok=True)
    for compiled in listing.modules:
        file = package / "jit_cache" / compiled.name / f"{compiled.name}.so"
        file.parent.mkdir(parents=True, exist_ok=True)
        if compiled.file.is_file():
            shutil.copyfile(compiled.file, file)
        if not file.is_file():
            raise JitError(f"{compiled.module} is said to be compiled, but {compiled.file} is not there")
    init.write_text(text, encoding="utf-8")


_INIT = '''"""Kernels of FlashInfer {release} for {target}, compiled by `conformance jit --prebuild`."""

from pathlib import Path
from types import SimpleNamespace

__version__ = "{release}"
_FOLDER = Path(__file__).resolve().parent / "jit_cache"


def get_jit_cache_dir():
    return str(_FOLDER)


def get_jit_cache_providers():
    modules = [file.parent.name for file in _FOLDER.glob("*/*.so")]
    return [
        SimpleNamespace(
            provider_id="conformance",
            distribution="flashinfer-jit-cache",
            version=__version__,
            jit_cache_dir=str(_FOLDER),
            cuda_architectures=["{target}"],
            modules=modules,
        )
    ]
'''


def toolkit(scratch: Path) -> dict[str, str]:
    """Environment in which FlashInfer compiles here: its CUDA_HOME, headers that the toolkit lacks, a libcuda to link.

    Raises:
        JitError: no nvcc, no C compiler.
    """
    home = cuda_home()
    compile_flags = [f"-isystem {folder}" for folder in _curand(home)]
    stub = _stub_of_libcuda(scratch / "stub")
    return {
        "CUDA_HOME": str(home),
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(compile_flags),
        # The kernels name no symbol of libcuda, and some linkers then drop it: the real one must be loaded.
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub} -L{home}/lib64 -L{home}/lib -Wl,--no-as-needed -lcuda",
    }


def cuda_home() -> Path:
    """The toolkit that `nvcc` belongs to, also where that is a script which calls the real one.

    Raises:
        JitError: there is none.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise JitError("there is no nvcc: install the CUDA toolkit, or put its bin folder on PATH")
    said = subprocess.run(  # noqa: S603 - found on PATH
        [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^#\$ _HERE_=(.+)$", said.stdout + said.stderr, re.MULTILINE)
    if found is None:
        raise JitError(f"{nvcc} does not say where its toolkit is")
    return Path(found[1].strip()).resolve().parent


def _curand(home: Path) -> Iterator[Path]:
    """The folder with cuRAND's headers (package nvidia-curand) where the toolkit has none: fa3 includes them."""
    name = "curand_kernel.h"
    if (home / "include" / name).is_file():
        return
    found = (header for entry in sys.path for header in Path(entry or ".").glob(f"nvidia/*/include/{name}"))
    for header in found:
        yield header.parent
        return


def _stub_of_libcuda(folder: Path) -> Path:
    """A library that stands in for the driver's, which only a machine with a GPU has, while linking."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise JitError("there is no C compiler: install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "empty.c"
    source.write_text("void conformance_stub_of_libcuda(void) {}\n")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    done = subprocess.run(  # noqa: S603 - found on PATH
        [*command, "-o", str(folder / "libcuda.so"), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise JitError(f"a stub of libcuda cannot be linked: {(done.stderr.splitlines() or ['?'])[-1]}")
    return folder
