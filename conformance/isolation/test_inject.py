from __future__ import annotations

from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.isolation import cuda_faults, faults
from conformance.isolation.inject import ON_CPU, ON_GPU, Fault, inject
from conformance.outcome import Outcome

GPU = any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.mark.slow
def test_what_is_not_as_it_must_be_is_told() -> None:
    compiles = next(fault for fault in ON_CPU if fault.name == "Compiles")
    lies = Fault("faults", "Lies", Outcome.CRASHED, "SIGHUP")
    compiled, lied, right = inject(faults=[compiles, lies], deadline=faults.COMPILE_SECONDS / 2)
    assert compiled.wrong == ()
    assert lied.wrong == ("ended mismatch, must end crashed", "does not say 'SIGHUP'")
    assert right.wrong == ()


@pytest.mark.parametrize("module", [faults, cuda_faults])
def test_every_fault_is_injected(module: object) -> None:
    classes = {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and getattr(kind, "__module__", None) == getattr(module, "__name__", None)
        and not name.startswith(("Faulty", "Right"))
    }
    assert classes == {
        f.name for f in (*ON_CPU, *ON_GPU) if getattr(module, "__name__", "").endswith(f".{f.module}")
    }


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU here")
def test_every_fault_on_a_gpu() -> None:
    assert main(["faults", "--library", "real"]) == 0
