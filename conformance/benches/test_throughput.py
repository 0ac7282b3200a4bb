from __future__ import annotations

import pytest

from conformance.benches.throughput import PARTS, Pace, measure, pace


def test_shares_of_a_few_cases() -> None:
    (result,) = measure(["kernel:fa-kvcache"], 4, device_sim="light")
    assert (result.backend, result.cases) == ("kernel:fa-kvcache", 4)
    assert tuple(result.shares) == PARTS
    assert sum(result.shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in result.shares.values())
    assert str(result).startswith(f"kernel:fa-kvcache  {result.per_second:6.0f} cases/s   draw")


def test_pace_of_this_machine() -> None:
    now = pace()
    assert now.steps > 0
    assert now.seconds > 0
    assert str(Pace(58_460_000, 0.908e-6)) == "58.5 million loop steps/s, 0.91 us a small torch addition"
