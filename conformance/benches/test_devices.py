"""The comparison of devices compares answers that are right."""

from __future__ import annotations

import pytest

from conformance.benches import devices
from fakes.cuda.claims import real_gpu

pytestmark = pytest.mark.skipif(real_gpu(), reason="the simulated device stands aside for a real GPU")


@pytest.mark.parametrize("name", devices.BACKENDS)
def test_every_device_is_measured_on_right_answers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(devices, "ROUNDS", 1)
    (cost,) = devices.measure(3, [name])
    assert cost.plain > 0
    assert cost.light > 0
