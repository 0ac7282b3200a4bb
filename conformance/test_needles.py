"""One key too few, too many or foreign, at any position, is always seen. (`conformance bench` runs 1,000 trials.)"""

from __future__ import annotations

from conformance.benches.needles import measure


def test_every_single_key_fault_is_seen() -> None:
    for sharpness in measure(trials=8):
        assert sharpness.caught == sharpness.trials, str(sharpness)
