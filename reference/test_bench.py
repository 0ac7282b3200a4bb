from __future__ import annotations

from reference.bench import measure


def test_it_measures_both_and_they_agree() -> None:
    cost = measure(num_requests=3, kv_len=50, repeats=1)
    assert all(seconds > 0 for seconds in cost[:6])
    assert cost.ratio == cost.layer_s / cost.sdpa_s
    assert cost.largest_difference < 1
