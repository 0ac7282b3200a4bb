"""The numbers of calls that the comparison found the fakes to answer otherwise than the libraries do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.fidelity.call import LibraryCall, from_json
from conformance.fidelity.catalogue import drafted
from conformance.fidelity.compare import disagreement
from conformance.fidelity.draft import LN2
from conformance.fidelity.observe import on_fakes
from conformance.fidelity.test_found import BLINDED, FOUND_ZEROS
from conformance.fidelity.verdict import Seen, differ, sketch
from fakes.contract.check import dense
from fakes.flashinfer.kernels import SENTINEL

pytestmark = pytest.mark.cpu

BEHIND = (
    '{"entry":"fi.graph_decode.tensor_core","kv_lens":[6,22],"malformations":["last_page:above"],"num_qo_heads":2,'
    '"page_size":16,"qo_lens":[1,1],"seed":39954,"variant":"window","window_left":4}'
)

SPOILT = (
    '{"causal":true,"entry":"fi.prefill.fa2","kv_lens":[200],"malformations":["last_page:above"],"num_qo_heads":8,'
    '"page_size":16,"poisoned":true,"qo_lens":[40]}'
)

NAN_IN_A_CHUNK = (
    '{"entry":"fi.decode.tensor_core","host_metadata":true,"kv_lens":[9,3,49,6,0,339],"layout":"HND","malformations":'
    '["int64:indices"],"num_kv_heads":2,"num_qo_heads":14,"page_size":3,"poisoned":true,"qo_lens":[1,1,1,1,1,1],'
    '"seed":62261,"stacked_cache":true,"strided_q":true}'
)

AMONG_HEADS = (
    '{"entry":"fi.prefill.fa2","kv_lens":[332,56,35,47],"malformations":["late:window_left"],"num_kv_heads":2,'
    '"num_qo_heads":6,"page_size":1,"qo_lens":[1,1,13,1],"seed":59407}'
)


def numbers_of(call: LibraryCall, release: str = "0.6.6") -> np.ndarray:
    with on_fakes({"flashinfer": release}) as ask:
        seen = ask(call)
    assert seen.numbers is not None
    return seen.numbers


def test_rows_that_the_plan_places_elsewhere_hold_zeros() -> None:
    call = from_json(
        '{"entry":"fi.prefill.fa2","kv_lens":[9,8],"malformations":["strided:qo_indptr"],"qo_lens":[5,0]}'
    )
    numbers = numbers_of(call)
    assert (numbers[..., :-1] == 0).all()
    assert np.isnan(numbers[..., -1]).all()


def test_rows_that_no_tile_computes_hold_zeros() -> None:
    numbers = numbers_of(from_json(FOUND_ZEROS))
    blank = np.isnan(numbers[..., -1])
    assert blank.any()
    assert (numbers[blank][:, :-1] == 0).all()


def test_keys_behind_the_last_page_are_loads_from_the_address_of_the_pool() -> None:
    call = from_json(BEHIND)
    draft = drafted(call)
    kv_len = int(draft.arrays["last_page_len"][1]) + 16  # of two pages
    assert kv_len > 32
    q, k, v = (draft.tensors[name] for name in ("q", "k", "v"))
    keys, values = (t[0, 0, 0, :8].repeat(8)[None, None].expand(5, 1, 64) for t in (k, v))
    out, lse = dense(q[1:], keys, values)
    numbers = numbers_of(call)
    expected = sketch(out.numpy(), lse.numpy() / LN2)
    assert differ(numbers[1:], expected) == ""


def test_a_decode_block_that_sees_no_key_weighs_all_that_it_takes() -> None:
    call = from_json(BLINDED)
    draft = drafted(call)
    v = draft.tensors["v"].double()
    pages = draft.arrays["indices"].long()
    values = v[pages].reshape(-1, 1, 64)[:128]  # one chunk, a multiple of the 64 keys that a block takes
    numbers = numbers_of(call)
    expected = sketch(values.mean(dim=0)[None].numpy(), np.full((1, 1), SENTINEL))
    assert differ(numbers, expected) == ""


def test_nan_spoils_the_rows_whose_tile_loads_it() -> None:
    call = from_json(SPOILT)
    draft = drafted(call)
    q, k, v = (draft.tensors[name] for name in ("q", "k", "v"))
    pages = draft.arrays["indices"].long()
    keys, values = (t[pages].reshape(-1, 1, 128)[:192] for t in (k, v))
    out, lse = dense(q[:16], keys, values, causal=True)  # of 200 + 16 keys the first tile's 16 rows see 192
    numbers = numbers_of(call)
    assert differ(numbers[:16], sketch(out.numpy(), lse.numpy() / LN2)) == ""
    assert np.isnan(numbers[16:, :, :-1]).all()
    assert np.isfinite(numbers[16:24, :, -1]).all()  # loaded, and not seen


def test_a_tile_may_begin_among_the_heads_of_a_row() -> None:
    call = from_json(AMONG_HEADS)
    draft = drafted(call)
    q, k, v = (draft.tensors[name] for name in ("q", "k", "v"))
    slots = draft.arrays["indices"].long()[332 + 56 :][:35]
    numbers = numbers_of(call)
    for head, first in (
        (0, 18),
        (1, 23),
    ):  # packed rows 15 and 16 of tiles of 16: each begins 4 keys before its own
        keys, values = (t[slots[first:], 0, 0][:, None] for t in (k, v))
        out, lse = dense(q[7:8, head : head + 1], keys, values)
        assert differ(numbers[7:8, head : head + 1], sketch(out.numpy(), lse.numpy() / LN2)) == ""


def test_fa3_has_no_lse_where_a_key_is_nan() -> None:
    call = from_json(
        '{"entry":"sgl.kvcache","malformations":["cache_lens:more"],"poisoned":true,"seed":11869}'
    )
    numbers = numbers_of(call)
    assert np.isnan(numbers[..., :-1]).all()
    assert np.isneginf(numbers[..., -1]).all()


def test_a_chunk_with_nan_leaves_the_lse_to_the_others_from_0_7_2_on() -> None:
    call = from_json(NAN_IN_A_CHUNK)
    for release, has_lse in (("0.6.6", False), ("0.7.4", True)):
        numbers = numbers_of(call, release)
        assert np.isnan(numbers[5, :, :-1]).all()
        assert np.isfinite(numbers[5, :, -1]).all() == has_lse
        if has_lse:
            assert numbers[5, 0, -1] == pytest.approx(7.80669, abs=2e-3)  # as measured


def test_a_projection_that_is_small_by_chance_makes_no_difference() -> None:
    random = np.random.default_rng(0)
    exact = random.normal(size=(4000, 1, 128))
    lse = np.zeros((4000, 1))
    assert (
        differ(sketch(exact, lse), sketch(exact * (1 + random.normal(size=exact.shape) * 0.0025), lse)) == ""
    )


def test_what_else_is_wrong_may_be_refused_whatever_is_read() -> None:
    call = from_json(
        '{"entry":"fi.decode.cuda_core","malformations":["shorter:indices","dtype:q"],"kv_lens":[2]}'
    )
    with on_fakes({}) as ask:
        assert ask(call).error == "ValueError"
        first = replace(call, malformations=("shorter:kv_indptr", "dtype:q"), qo_lens=(1, 1), kv_lens=(2, 2))
        seen = ask(first)
    assert (seen.kind, seen.error) == ("undefined", "ValueError")
    assert disagreement(first, seen, Seen("refused", "ValueError"), real=True) is None
    assert disagreement(first, seen, Seen("refused", "KeyError"), real=True) is not None
