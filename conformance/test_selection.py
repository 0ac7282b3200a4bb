"""Declared is tested: each head dim of each built-in backend is asked by name in every phase, and drawn."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from backends.registry import BUILT_IN, resolve
from cases.mix import default_mix
from cases.settings import Settings
from conformance.selection import named_cases
from conformance.support import unsupported
from conformance.wanted import wanted_by

DECLARING = [name for name in BUILT_IN if resolve(name).capabilities.head_dims]


@pytest.mark.parametrize("backend", DECLARING)
def test_declared_head_dims_are_asked_by_name(backend: str) -> None:
    capabilities = resolve(backend).capabilities
    asked = {
        ((case.heads.head_dim_qk, case.heads.head_dim_vo), step.phase)
        for case in named_cases(capabilities.level)
        if unsupported(case, capabilities) is None
        for step in case.steps
    }
    assert asked >= {(dims, phase) for dims in capabilities.head_dims or () for phase in capabilities.phases}


@pytest.mark.parametrize("backend", DECLARING)
def test_declared_head_dims_are_drawn(backend: str) -> None:
    capabilities, rng = resolve(backend).capabilities, random.Random(3)
    mix = default_mix().engine if capabilities.level == "engine" else default_mix().kernel
    settings = Settings(mix, wanted_by(capabilities))
    drawn = Counter(settings.read(rng.randbytes(settings.num_bytes))["head_dims"] for _ in range(4000))
    assert drawn.keys() == capabilities.head_dims
    assert min(drawn.values()) >= 0.0125 * drawn.total()
