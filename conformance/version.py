"""Which release of this harness runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("attention-conformance")
    except PackageNotFoundError:
        return "not installed"
