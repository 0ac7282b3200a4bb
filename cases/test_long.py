from __future__ import annotations

import numpy as np
import pytest

from cases.long import LONG, LONG_CASES, long_cases
from cases.tensors import materialise


def test_both_levels_reach_the_limit() -> None:
    for level in ("engine", "kernel"):
        longest = max(max(step.kv_lens) for case in long_cases(level) for step in case.steps)
        assert longest == LONG
    assert len(long_cases("engine")) + len(long_cases("kernel")) == len(LONG_CASES)
    assert all(why.endswith(".") for _, why in LONG_CASES.values())


@pytest.mark.parametrize("name", LONG_CASES)
def test_tensors_are_made_in_place(name: str) -> None:
    case, _ = LONG_CASES[name]
    tensors = materialise(case)
    (step,) = tensors.steps
    assert step.k_all.shape[1] == sum(case.steps[0].kv_lens)
    assert step.q.isfinite().all()
    assert len(np.unique(step.slots)) == len(step.slots)
