"""Calls that the comparison found the fakes to answer otherwise than the libraries do, one a fault."""

from __future__ import annotations

import pytest

from conformance.fidelity.call import from_json
from conformance.fidelity.observe import on_fakes

pytestmark = pytest.mark.cpu

PREFILL = '{"custom_mask":true,"entry":"fi.prefill.fa2","page_size":16,'

FOUND_ZEROS = (
    '{"entry":"fi.prefill.fa2","kv_lens":[40],"malformations":["heads:half"],"num_qo_heads":8,"qo_lens":[20]}'
)

FALLS = '{"entry":"fi.decode.cuda_core","kv_lens":[9,8],"malformations":["falls:kv_indptr"],"qo_lens":[1,1]}'
BLINDED = (
    '{"entry":"fi.graph_decode.cuda_core","kv_lens":[200],"malformations":["page_size:half"],"page_size":16,'
    '"variant":"window","window_left":4}'
)
PAGES_HALVED = (
    '{"entry":"fi.prefill.fa2","kv_lens":[390],"malformations":["page_size:half"],"page_size":2,'
    '"qo_lens":[40]}'
)
FAR_BEFORE_WINDOW = (
    '{"entry":"fi.decode.tensor_core","kv_lens":[40],"malformations":["far_page:far"],"variant":"window",'
    '"window_left":2}'
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
    # ... so that its end is no end of the mask: what an earlier request lacks is read behind it
    (
        '{"custom_mask":true,"entry":"fi.prefill.fa2","kv_lens":[5,41,0],"malformations":["mask:short"],"page_size":3,'
        '"qo_lens":[4,29,2]}',
        "0.6.6",
        "undefined",
    ),
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
    # CUDA-core decode is built for some group sizes: plan looks at the planned heads, run at those of q and the cache
    (
        '{"entry":"fi.decode.cuda_core","malformations":["heads:kv"],"num_qo_heads":5}',
        "0.6.6",
        "refused RuntimeError",
    ),
    (
        '{"entry":"fi.decode.cuda_core","malformations":["heads:kv"],"num_qo_heads":5}',
        "0.7.4",
        "refused RuntimeError",
    ),
    # its planner gives a request with less than no pages no block, and launches one all the same
    (FALLS, "0.6.6", "undefined"),
    (FALLS.replace("fi.decode", "fi.graph_decode"), "0.7.4", "undefined"),
    # a chunk that begins behind the last key is of 2**32 keys, or of none if a single step covers the rest
    (
        '{"entry":"fi.decode.cuda_core","kv_lens":[90],"malformations":["page_size:double"],"page_size":16}',
        "0.6.6",
        "hung",
    ),
    (
        '{"entry":"fi.decode.cuda_core","kv_lens":[126],"malformations":["page_size:double"],"page_size":16}',
        "0.6.6",
        "right",
    ),
    # where its chunks end before the window begins, all keys that they reach count alike
    (BLINDED, "0.6.6", "wrong"),
    # the address of no rows is null
    ('{"entry":"fi.graph_decode.cuda_core","malformations":["rows:fewer"]}', "0.6.6", "crashed"),
    ('{"entry":"fi.prefill.fa2","kv_lens":[3],"malformations":["rows:fewer"]}', "0.6.6", "crashed"),
    ('{"entry":"fi.prefill.fa3","kv_lens":[3],"malformations":["rows:fewer"]}', "0.6.6", "crashed"),
    (
        '{"entry":"fi.prefill.fa3","kv_lens":[3],"malformations":["rows:fewer"]}',
        "0.7.4",
        "refused ValueError",
    ),
    ('{"entry":"fi.ragged.fa3","kv_lens":[2],"malformations":["keys:fewer"]}', "0.6.6", "crashed"),
    # fa3's work is made for the planned heads: those that q lacks land on the next rows
    ('{"entry":"fi.prefill.fa3","kv_lens":[9],"malformations":["heads:double"]}', "0.6.6", "undefined"),
    ('{"entry":"fi.ragged.fa3","kv_lens":[9],"malformations":["heads:double"]}', "0.7.4", "undefined"),
    # fa2 reads rows where qo_indptr says, also behind q, and writes them at its own count of rows
    (
        '{"entry":"fi.prefill.fa2","kv_lens":[9],"malformations":["offset:qo_indptr"],"qo_lens":[3]}',
        "0.6.6",
        "undefined",
    ),
    # where planner and kernel count other chunks of several rows, partial results are not where they are merged
    (PAGES_HALVED, "0.6.6", "undefined"),
    (PAGES_HALVED.replace("[40]", "[1]"), "0.6.6", "wrong"),
    (
        '{"entry":"fi.prefill.fa2","kv_lens":[300],"malformations":["late:window_left"],"page_size":16,"qo_lens":[40]}',
        "0.6.6",
        "undefined",
    ),
    # lengths that fall on the device alone wrap
    (
        '{"entry":"fi.ragged.fa2","kv_lens":[5,6,7],"malformations":["strided:kv_indptr"],"qo_lens":[1,1,1]}',
        "0.6.6",
        "undefined",
    ),
    # the packed mask was made for shorter pages than the cache has
    (
        '{"custom_mask":true,"entry":"fi.prefill.fa2","kv_lens":[60],"malformations":["page_size:half"],"page_size":16,'
        '"qo_lens":[9]}',
        "0.6.6",
        "undefined",
    ),
    # buffers of 64-bit numbers have as many entries as others
    (
        '{"entry":"fi.graph_decode.tensor_core","kv_lens":[5,9],"malformations":["int64_buffers:buffers"],"page_size":16,'
        '"qo_lens":[1,1]}',
        "0.6.6",
        "wrong",
    ),
    # a request without rows and keys before a window are not read
    (
        '{"entry":"fi.prefill.fa2","kv_lens":[5,6],"malformations":["shorter:indices"],"qo_lens":[1,0]}',
        "0.6.6",
        "right",
    ),
    (FAR_BEFORE_WINDOW, "0.6.6", "right"),
    (FAR_BEFORE_WINDOW.replace("fi.decode.tensor_core", "fi.decode.cuda_core"), "0.6.6", "crashed"),
    # a single row goes through the merge kernel for many states, also if it has one state
    (
        '{"empty_states":true,"entry":"fi.merge_states","num_states":1,"seed":13633}',
        "0.6.6",
        "wrong",
    ),
    ('{"empty_states":true,"entry":"fi.merge_states","num_states":1,"seed":13633}', "0.7.4", "right"),
    # rows that the planner did not see are merged by what lies behind merge_indptr
    (
        '{"entry":"fi.ragged.fa2","kv_lens":[64,301],"malformations":["int64:qo_indptr"],"num_qo_heads":4,'
        '"qo_lens":[41,43],"seed":61292}',
        "0.6.6",
        "undefined",
    ),
    (
        '{"causal":true,"entry":"fi.prefill.fa2","kv_lens":[318,48,33],"malformations":["headless:qo_indptr"],'
        '"num_kv_heads":2,"num_qo_heads":6,"page_size":16,"poisoned":true,"qo_lens":[41,36,3],"seed":65025,'
        '"soft_cap":30.0,"strided_q":true,"variant":"cap"}',
        "0.6.6",
        "undefined",
    ),
    # whatever is refused is refused before a kernel reads host memory
    (
        '{"entry":"fi.graph_decode.cuda_core","kv_lens":[3],"malformations":["host:q","int64_buffers:buffers"]}',
        "0.6.6",
        "refused RuntimeError",
    ),
    # offsets of a custom mask come before lengths are looked at
    (
        PREFILL + '"kv_lens":[9],"malformations":["shorter:last_page_len"]}',
        "0.6.6",
        "refused RuntimeError",
    ),
    # a tile that begins behind the last key has no steps, or 2^32 keys
    (
        '{"entry":"fi.prefill.fa2","host_metadata":true,"kv_lens":[47,43],"malformations":["heads:kv"],'
        '"num_kv_heads":4,"num_qo_heads":4,"page_size":16,"qo_lens":[1,38],"seed":12089,"variant":"window",'
        '"window_left":4}',
        "0.6.6",
        "hung",
    ),
    (
        '{"entry":"fi.ragged.fa2","kv_lens":[16,61,64],"malformations":["heads:double"],"num_kv_heads":2,'
        '"num_qo_heads":6,"qo_lens":[4,37,1],"seed":3154,"variant":"window","window_left":1}',
        "0.6.6",
        "right",
    ),
    # a request without pages lets a custom mask be read before its first element
    (
        '{"causal":true,"custom_mask":true,"entry":"fi.prefill.fa2","kv_lens":[0,48],"page_size":2,'
        '"qo_lens":[1,1]}',
        "0.6.6",
        "undefined",
    ),
    # nothing to merge is no launch
    (
        '{"entry":"fi.merge_states","malformations":["states:s","states:v"],"num_states":3}',
        "0.6.6",
        "refused RuntimeError",
    ),
    # of rows behind out, those of merged results
    (
        '{"entry":"fi.graph_decode.tensor_core","kv_lens":[21,54],"malformations":["int64_buffers:buffers",'
        '"rows:fewer"],"num_kv_heads":2,"num_qo_heads":8,"page_size":3,"qo_lens":[1,1],"seed":45060}',
        "0.6.6",
        "undefined",
    ),
    # and those that a plan places behind it
    (
        '{"entry":"fi.prefill.fa2","kv_lens":[10,4],"layout":"HND","malformations":["strided:qo_indptr"],"num_qo_heads":4,'
        '"page_size":3,"poisoned":true,"qo_lens":[8,2],"seed":4408}',
        "0.6.6",
        "undefined",
    ),
    # pages before a window are not loaded
    (
        '{"causal":true,"entry":"sgl.kvcache","kv_lens":[56,52,20,4],"malformations":["far_page:far"],"num_qo_heads":4,'
        '"page_size":3,"qo_lens":[1,1,1,1],"seed":56091,"variant":"window","window_left":4}',
        "0.6.6",
        "right",
    ),
    # less than no tiles of rows
    (
        '{"entry":"sgl.kvcache","kv_lens":[22,29,40],"malformations":["falls:cu_seqlens_q"],"num_qo_heads":7,'
        '"num_splits":2,"qo_lens":[2,9,20],"seed":11}',
        "0.6.6",
        "crashed",
    ),
    (
        '{"entry":"sgl.kvcache","kv_lens":[22,29,31],"malformations":["falls:cu_seqlens_q"],"num_qo_heads":7,'
        '"num_splits":2,"qo_lens":[2,9,11],"seed":11}',
        "0.6.6",
        "wrong",
    ),
    # CUDA-core decode takes the end of the page ids from the entry that q's rows point at
    ('{"entry":"fi.decode.cuda_core","malformations":["rows:more"]}', "0.6.6", "undefined"),
]


@pytest.mark.parametrize(("call", "release", "kind"), FOUND, ids=[str(n) for n in range(len(FOUND))])
def test_fake_does_as_the_library_does(call: str, release: str, kind: str) -> None:
    with on_fakes({"flashinfer": release}) as ask:
        seen = ask(from_json(call))
    assert f"{seen.kind} {seen.error}".strip() == kind, seen
