"""What the real libraries do, rule by rule: `rules()`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fakes.contract.rule import Rule


def rules(library: str | None = None) -> tuple[Rule, ...]:
    """All rules, or those about one library ("flashinfer", "sgl_kernel"), in file order.

    Every module of this package whose name starts with a library's holds a tuple `RULES`.
    """
    found: list[Rule] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if not module.name.startswith(("flashinfer_", "sgl_kernel_")):
            continue
        found.extend(import_module(f"{__name__}.{module.name}").RULES)
    return tuple(rule for rule in found if library in (None, rule.library))
