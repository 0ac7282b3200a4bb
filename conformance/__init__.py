"""`check(backend)` for a test of one's own, and the names that a backend is written with.

Nothing is imported before it is asked for: importing this package costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.contract import (
        Attention,
        Backend,
        Batch,
        Capabilities,
        EngineContext,
        KernelAdapter,
        KernelCall,
        KVPool,
        Refused,
        Req,
    )
    from cases.model import Case
    from conformance.api import check

__all__ = [
    "Attention",
    "Backend",
    "Batch",
    "Capabilities",
    "Case",
    "EngineContext",
    "KVPool",
    "KernelAdapter",
    "KernelCall",
    "Refused",
    "Req",
    "check",
]

_ELSEWHERE = {"Case": "cases.model", "check": "conformance.api"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'conformance' has no attribute {name!r}")
    found = getattr(importlib.import_module(_ELSEWHERE.get(name, "backends.contract")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
