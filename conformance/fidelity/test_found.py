"""Calls that the comparison found the fakes to answer otherwise than the libraries do, one a fault."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.fidelity.call import from_json
from conformance.fidelity.observe import on_fakes

pytestmark = pytest.mark.cpu

PREFILL = '{"custom_mask":true,"entry":"fi.prefill.fa2","page_size":16,'

FOUND_ZEROS = (
    '{"entry":"fi.prefill.fa2","kv_lens":[40],"malformations":["heads:half"],"num_qo_heads":8,"qo_lens":[20]}'
)

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
    # offsets of a custom mask are computed where the index arrays are, and used on the device
    (PREFILL + '"host_metadata":true,"kv_lens":[9]}', "0.6.6", "refused RuntimeError"),
    (PREFILL + '"host_metadata":true,"kv_lens":[9]}', "0.7.4", "right"),
    (PREFILL + '"kv_lens":[9],"malformations":["host:kv_indptr"]}', "0.6.6", "refused RuntimeError"),
    # a request without pages counts as -page_size keys of a custom mask
    (PREFILL + '"kv_lens":[9,0,20],"qo_lens":[3,2,4]}', "0.6.6", "undefined"),
    # planners see a contiguous copy of a strided device array, kernels its memory
    ('{"entry":"fi.prefill.fa2","kv_lens":[9],"malformations":["strided:qo_indptr"]}', "0.6.6", "wrong"),
    ('{"entry":"fi.prefill.fa3","kv_lens":[9],"malformations":["strided:qo_indptr"]}', "0.6.6", "right"),
    # merges check where their states are, their shapes and dtypes
    ('{"entry":"fi.merge_state","malformations":["host:v_a"]}', "0.6.6", "refused RuntimeError"),
    (
        '{"entry":"fi.merge_state","malformations":["states:s_b"],"qo_lens":[2]}',
        "0.6.6",
        "refused RuntimeError",
    ),
    ('{"entry":"fi.merge_states","malformations":["float32:all"]}', "0.6.6", "refused RuntimeError"),
    ('{"entry":"fi.merge_state","malformations":["dtype:v_b"]}', "0.6.6", "wrong"),
    ('{"entry":"fi.merge_state","malformations":["dtype:s_b"]}', "0.6.6", "right"),
    # copies that FlashAttention makes are on the device
    ('{"entry":"sgl.kvcache","kv_lens":[9],"malformations":["strided:page_table"]}', "0.6.6", "right"),
    ('{"entry":"sgl.merge_state_v2","malformations":["dtype:s_a"]}', "0.6.6", "right"),
    # what lies next to the pool is read, what lies far away is not there
    ('{"entry":"fi.decode.cuda_core","malformations":["page:before"]}', "0.6.6", "undefined"),
    ('{"entry":"fi.decode.cuda_core","malformations":["far_page:far"]}', "0.6.6", "crashed"),
    ('{"entry":"sgl.kvcache","malformations":["page:behind"]}', "0.6.6", "undefined"),
    ('{"entry":"sgl.kvcache","malformations":["far_page:far"]}', "0.6.6", "crashed"),
    # past the end of ragged keys fa2 reads on, loads of the others find zeros
    ('{"entry":"fi.ragged.fa2","kv_lens":[5],"malformations":["keys:fewer"]}', "0.6.6", "undefined"),
    ('{"entry":"fi.ragged.fa3","kv_lens":[5],"malformations":["keys:fewer"]}', "0.6.6", "wrong"),
    ('{"entry":"sgl.varlen","kv_lens":[5],"malformations":["keys:fewer"]}', "0.6.6", "wrong"),
    # paged prefill leaves zeros in rows that no tile computes; split ones are merged from the workspace
    (FOUND_ZEROS, "0.6.6", "wrong"),
    (
        '{"entry":"fi.prefill.fa2","kv_lens":[300],"malformations":["heads:half"],"num_qo_heads":8,"qo_lens":[20]}',
        "0.6.6",
        "undefined",
    ),
    # two requests that write the same rows race
    (
        '{"entry":"sgl.varlen","kv_lens":[4,4,4],"malformations":["falls:cu_seqlens_q"],"qo_lens":[3,3,3],"seed":1}',
        "0.6.6",
        "undefined",
    ),
    # CUDA-core decode takes the end of the page ids from the entry that q's rows point at
    ('{"entry":"fi.decode.cuda_core","malformations":["rows:more"]}', "0.6.6", "undefined"),
]


def test_rows_that_no_tile_computes_hold_zeros() -> None:
    with on_fakes({}) as ask:
        seen = ask(from_json(FOUND_ZEROS))
    assert seen.numbers is not None
    blank = np.isnan(seen.numbers[..., -1])
    assert blank.any()
    assert (seen.numbers[blank][:, :-1] == 0).all()


@pytest.mark.parametrize(("call", "release", "kind"), FOUND, ids=[str(n) for n in range(len(FOUND))])
def test_fake_does_as_the_library_does(call: str, release: str, kind: str) -> None:
    with on_fakes({"flashinfer": release}) as ask:
        seen = ask(from_json(call))
    assert f"{seen.kind} {seen.error}".strip() == kind, seen
