"""Named faults that prove the checks: each is a few lines over a correct backend or fake, and names its check.

To add one: decorate a function with `mutant(...)` in the file of its kind.
"""

from conformance.mutants import (
    capacity,
    engines,
    graphs,
    kernel_states,
    kernels,
    lifecycles,
    numerics,
    page_tables,
    sessions,
    stores,
    streams,
)
from conformance.mutants.mutant import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "capacity",
    "engines",
    "graphs",
    "kernel_states",
    "kernels",
    "lifecycles",
    "numerics",
    "page_tables",
    "sessions",
    "stores",
    "streams",
]
