"""Calls that the comparison found the fakes to answer otherwise than the libraries do, one a fault."""

from __future__ import annotations

import pytest

from conformance.fidelity.call import from_json
from conformance.fidelity.observe import on_fakes

pytestmark = pytest.mark.cpu

FOUND = [
    # a custom mask does not switch the compiled window off
    (
        '{"custom_mask":true,"entry":"fi.ragged.fa2","kv_lens":[2],"variant":"window","window_left":0}',
        "0.6.6",
        "right",
    ),
    # a windowed tile's chunks begin at its first visible key
    (
        '{"entry":"fi.graph_decode.tensor_core","kv_lens":[129],"variant":"window","window_left":0}',
        "0.6.6",
        "right",
    ),
]


@pytest.mark.parametrize(("call", "release", "kind"), FOUND, ids=[str(n) for n in range(len(FOUND))])
def test_fake_does_as_the_library_does(call: str, release: str, kind: str) -> None:
    with on_fakes({"flashinfer": release}) as ask:
        seen = ask(from_json(call))
    assert f"{seen.kind} {seen.error}".strip() == kind, seen
