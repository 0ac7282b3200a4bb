"""API surfaces of the real libraries: extracted from a wheel without importing it, committed, and read back.

A surface is plain JSON: `modules` maps each module to its public names. A name is a function (`parameters`,
one string each as in source, with the bare `*` and `/`; `returns`), a class (`bases`, `members`), a partial
(`partial_of`, `with`), another name (`same_as`) or, at the top level, a re-export (`from`). Decorators are
looked through, overloads give way to their implementation.

    python -m fakes.extract WHEEL_OR_FOLDER OUT.json
"""

from __future__ import annotations

import functools
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import griffe

SURFACES = Path(__file__).parent / "surface"

MODULES = {
    "flashinfer": ("", "cascade", "decode", "mla", "page", "prefill", "quantization"),
    "sgl_kernel": ("", "attention", "flash_attn", "flash_mla"),
}
"""Submodules whose definitions are extracted; "" is the top level."""

DISTRIBUTIONS = {"flashinfer": ("flashinfer-python",), "sgl_kernel": ("sglang-kernel", "sgl-kernel")}
"""Distributions that install each library."""

_DUNDERS = ("__init__", "__call__")


def releases(library: str) -> tuple[str, ...]:
    """Releases of `library` ("flashinfer", "sgl_kernel") whose surface is committed, oldest first."""
    found = (path.stem.removeprefix(f"{library}-") for path in SURFACES.glob(f"{library}-*.json"))
    return tuple(sorted(found, key=lambda release: [int(part) for part in re.findall(r"\d+", release)]))


@functools.cache
def load(library: str, release: str) -> dict[str, Any]:
    """The committed surface of one release. Shared between callers: read it, do not change it.

    Raises:
        LookupError: no such surface; the message lists those that are committed.
    """
    path = SURFACES / f"{library}-{release}.json"
    if not path.is_file():
        known = ", ".join(releases(library)) or "none"
        raise LookupError(f"there is no surface of {library} {release} (committed: {known})")
    return json.loads(path.read_text(encoding="utf-8"))


def extract(source: str | Path, library: str | None = None) -> dict[str, Any]:
    """The surface of a wheel, or of a folder that a wheel was unpacked or installed into.

    Args:
        source: the wheel or folder. Only its Python files and METADATA are read; nothing is imported.
        library: import name ("flashinfer", "sgl_kernel"); by default whichever of them `source` holds.

    Raises:
        LookupError: `source` holds no known library, or no metadata of it.
    """
    files = _Files(Path(source))
    held = [name for name in MODULES if f"{name}/__init__.py" in files.names]
    if library is None:
        library = held[0] if held else None
    if library is None or library not in held:
        raise LookupError(f"{source} does not hold {library or ' or '.join(MODULES)}")
    metadata = files.metadata(library)
    package = _Package(files, library)
    return {
        "library": library,
        "distribution": metadata["Name"],
        "release": metadata["Version"],
        "modules": {
            name: package.names(name)
            for part in MODULES[library]
            if package.file(name := f"{library}.{part}" if part else library)
        },
    }


def dump(surface: dict[str, Any]) -> str:
    """Canonical text of a surface: sorted, one parameter a line, so that two releases compare with `diff`."""
    return json.dumps(surface, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


class _Files:
    """Text files of a wheel or folder by their relative path."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.zip = zipfile.ZipFile(source) if source.is_file() else None
        if self.zip is not None:
            self.names = set(self.zip.namelist())
        else:
            pattern = (*(f"{name}/**/*.py" for name in MODULES), "*.dist-info/METADATA")
            self.names = {p.relative_to(source).as_posix() for glob in pattern for p in source.glob(glob)}

    def read(self, name: str) -> str:
        if self.zip is not None:
            return self.zip.read(name).decode()
        return (self.source / name).read_text(encoding="utf-8")

    def metadata(self, library: str) -> Any:
        for name in sorted(self.names):
            if name.endswith(".dist-info/METADATA"):
                found = Parser().parsestr(self.read(name), headersonly=True)
                if found["Name"].lower().replace("_", "-") in DISTRIBUTIONS[library]:
                    return found
        raise LookupError(f"{self.source} holds no .dist-info/METADATA of {library}")


class _Package:
    """One library's modules, parsed on demand."""

    def __init__(self, files: _Files, library: str) -> None:
        self.files = files
        self.library = library
        self.module = functools.cache(self._parse)

    def file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((n for n in (f"{stem}.py", f"{stem}/__init__.py") if n in self.files.names), None)

    def _parse(self, module: str) -> griffe.Module:
        import griffe

        name = self.file(module)
        if name is None:
            raise LookupError(f"{self.files.source} has no module {module}")
        *packages, last = module.split(".")
        parent = None
        for depth, part in enumerate(packages, 1):  # relative imports are resolved through parents
            folder = Path(*packages[:depth])
            parent = griffe.Module(part, filepath=folder / "__init__.py", parent=parent)
        return griffe.visit(last, filepath=Path(name), code=self.files.read(name), parent=parent)

    def names(self, module: str) -> dict[str, Any]:
        """Public names of one module: its definitions, and at the top level its re-exports."""
        found: dict[str, Any] = {}
        for name, origin, value in self._members(module):
            if name.startswith("_"):
                continue
            if module != self.library:
                described = self._inlined(module, value) if value.is_alias else _member(value)
            elif value.is_alias:
                described = self._reexport(value)
            else:
                described = {"from": origin} if origin != module else _member(value)
            if described is not None:
                found[name] = described
        return found

    def _members(self, module: str) -> Iterator[tuple[str, str, Any]]:
        """Name, defining or importing module, object; wildcard imports are followed."""
        members: dict[str, Any] = self.module(module).members
        for name, value in members.items():
            if value.is_alias and value.wildcard:
                yield from self._members(value.target_path.removesuffix(".*"))
            else:
                yield name, module, value

    def _reexport(self, alias: griffe.Alias) -> dict[str, Any] | None:
        origin, _, name = alias.target_path.rpartition(".")
        if not origin.startswith(self.library) or self.file(alias.target_path):
            return None
        return {"from": origin} if name == alias.name else {"from": origin, "name": name}

    def _inlined(self, module: str, alias: griffe.Alias) -> dict[str, Any] | None:
        """A package's own definition that lives in one of its submodules."""
        origin, _, name = alias.target_path.rpartition(".")
        if not origin.startswith(f"{module}.") or not self.file(origin):
            return None
        value: Any = self.module(origin).members.get(name)
        if value is None:
            return None
        return self._inlined(module, value) if value.is_alias else _member(value)


def _function(function: griffe.Function) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": _parameters(function)}
    if function.returns is not None:
        found["returns"] = str(function.returns)
    for label in ("staticmethod", "classmethod"):
        if label in function.labels:
            found[label] = True
    return found


def _parameters(function: griffe.Function) -> list[str]:
    lines: list[str] = []
    kinds = [parameter.kind.value if parameter.kind else "" for parameter in function.parameters]
    for index, parameter in enumerate(function.parameters):
        kind = kinds[index]
        if kind == "keyword-only" and not set(kinds[:index]) & {"keyword-only", "variadic positional"}:
            lines.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        line = stars + parameter.name
        if parameter.annotation is not None:
            line += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            line += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        lines.append(line)
        if kind == "positional-only" and kinds[index + 1 : index + 2] != ["positional-only"]:
            lines.append("/")
    return lines


def _class(found: griffe.Class) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in found.members.items():
        if value.is_alias or (name.startswith("_") and name not in _DUNDERS):
            continue
        described = _member(value)
        if described is None:
            continue
        # The public method may take **kwargs for a private one that names them.
        behind = found.members.get(f"_{name}_impl")
        if behind is not None and behind.is_function and "variadic keyword" in _kinds(value):
            described["forwards_to"] = _function(behind)["parameters"]  # pyright: ignore[reportArgumentType]
        members[name] = described
    return {"bases": [str(base) for base in found.bases], "members": members}


def _kinds(function: Any) -> set[str]:
    return {p.kind.value for p in function.parameters} if function.is_function else set()


def _member(value: Any) -> dict[str, Any] | None:
    if value.is_function:
        return _function(value)
    if value.is_class:
        return _class(value)
    if "property" in value.labels:
        return {"property": True}
    text = str(value.value or "")
    if partial := re.fullmatch(r"(?:functools\.)?partial(?:method)?\((\w+), (.*)\)", text):
        return {"partial_of": partial[1], "with": partial[2]}
    if value.annotation is None:
        return {"same_as": text} if text.isidentifier() and text not in ("None", "True", "False") else None
    return {"field": f"{value.annotation} = {text}" if text else str(value.annotation)}


def main(arguments: list[str]) -> int:
    """Write the surface of a wheel to a file; 2 on wrong usage."""
    if len(arguments) != 2:
        print("usage: python -m fakes.extract WHEEL_OR_FOLDER OUT.json", file=sys.stderr)  # noqa: T201
        return 2
    try:
        surface = extract(arguments[0])
    except (LookupError, OSError, zipfile.BadZipFile) as error:
        print(f"cannot extract {arguments[0]}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    Path(arguments[1]).write_text(dump(surface), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
