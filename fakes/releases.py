"""Which release of each library the fakes stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

KNOWN: dict[str, tuple[str, ...]] = {
    "flashinfer": ("0.6.6", "0.7.2", "0.7.4"),
    "sgl_kernel": ("0.4.6", "0.4.10"),
}
"""Releases that the fakes can stand for, the default first."""

UNMEASURED: dict[str, tuple[str, ...]] = {"flashinfer": ("0.7.2",), "sgl_kernel": ("0.4.10",)}
"""Those that no rule of the contract was measured on: `fakes.contract.unmeasured` says what stands in for a
measurement."""

_selected: dict[str, str] = {library: known[0] for library, known in KNOWN.items()}
_versions: dict[str, tuple[int, ...]] = {}


def selected(library: str) -> str:
    """The release that the fake of `library` stands for now."""
    return _selected[library]


def at_least(library: str, release: str) -> bool:
    """Whether the fake of `library` stands for `release` or a later one."""
    return _parsed(_selected[library]) >= _parsed(release)


@contextmanager
def select(**releases: str) -> Iterator[None]:
    """Let the fakes stand for these releases, `select(flashinfer="0.7.4")`, within the block.

    Raises:
        ValueError: a library or release that no fake knows.
    """
    for library, release in releases.items():
        if library not in KNOWN:
            raise ValueError(f"no fake of {library!r}; there are {', '.join(KNOWN)}")
        if release not in KNOWN[library]:
            raise ValueError(f"no fake of {library} {release}; known releases: {', '.join(KNOWN[library])}")
    before = dict(_selected)
    _selected.update(releases)
    try:
        yield
    finally:
        _selected.clear()
        _selected.update(before)


def _parsed(release: str) -> tuple[int, ...]:
    if release not in _versions:
        _versions[release] = tuple(int(part) for part in release.split("."))
    return _versions[release]
