"""torch's own sample inputs through the full device. All operators: `python -m fakes.cuda.full.opinfo`."""

from __future__ import annotations

import pytest

from fakes import cuda
from fakes.cuda.full import opinfo

pytest.importorskip("expecttest", reason="torch's sample inputs need the package expecttest")

STEP = 80
"""Every so manieth operator is asked here."""
ALWAYS = (
    *("fft.fft", "fft.irfft2", "view_as_real", "real", "imag", "resolve_conj", "linalg.eig", "svd", "unique"),
    *(
        "index_put",
        "masked_fill",
        "__getitem__",
        "scatter_reduce.sum",
        "cat",
        "split",
        "topk",
        "sort",
        "cumsum",
    ),
    *(
        "nn.functional.scaled_dot_product_attention",
        "nn.functional.conv2d",
        "bmm",
        "resize_",
        "squeeze",
        "item",
    ),
)
"""And these: lazy bits, several results, in-place changes of shape, host reads, attention."""


@pytest.mark.slow
def test_operators(full: cuda.Simulation) -> None:
    del full
    chosen = [op for i, op in enumerate(opinfo.operators()) if i % STEP == 0 or opinfo.name_of(op) in ALWAYS]
    found = [opinfo.examine(op) for op in chosen]
    assert [outcome for outcome in found if not outcome.good] == []
    right = sum(outcome.eager == "right" for outcome in found)
    assert right > len(found) * 0.9
    by_name = {outcome.name: outcome for outcome in found}
    assert by_name["item"].eager == "right"
    assert "when stream is capturing" in by_name["item"].replayed
    assert by_name["bmm"].replayed == "right"


def test_what_is_wrong_is_found(full: cuda.Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    del full
    (op,) = (op for op in opinfo.operators() if opinfo.name_of(op) == "sin")
    assert opinfo.examine(op) == opinfo.Outcome("sin", "right", "right")
    results = iter(range(1000))
    monkeypatch.setattr(opinfo, "_call", lambda op, given: given[0].sin() + next(results))
    wrong = opinfo.examine(op)
    assert wrong.eager.startswith("WRONG")
    assert wrong.replayed.startswith("WRONG")
    assert not wrong.good
