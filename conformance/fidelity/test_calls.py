from __future__ import annotations

from collections import Counter

import pytest
import torch

from conformance.fidelity.call import ENTRIES, LibraryCall, from_json, to_json
from conformance.fidelity.catalogue import drafted, known_to, malformation
from conformance.fidelity.draft import Draft, ints
from conformance.fidelity.generate import VARIANTS, calls
from conformance.fidelity.run import variants
from conformance.fidelity.sound import sound

pytestmark = pytest.mark.cpu

MANY = calls(1200, 5)


def test_a_call_survives_json() -> None:
    assert [from_json(to_json(call)) for call in MANY] == MANY


def test_json_of_a_call_names_only_what_is_not_the_default() -> None:
    assert to_json(LibraryCall(entry="sgl.varlen")) == '{"entry":"sgl.varlen"}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"entry":"sgl.varlen","pages":3}', "no 'pages'"),
        ('{"entry":"nothing"}', "entry is 'nothing'"),
        ('{"entry":"sgl.varlen","variant":"wide"}', "variant is 'wide'"),
        ('{"entry":"sgl.varlen","qo_lens":[1,2]}', "qo_lens has 2 entries and kv_lens 1"),
        ('{"entry":"sgl.varlen","num_qo_heads":3,"num_kv_heads":2}', "3 query heads"),
    ],
)
def test_what_is_no_call_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(text)


def test_half_of_the_calls_are_malformed_and_more_calls_begin_with_the_same() -> None:
    assert sum(not call.valid for call in MANY) == len(MANY) // 2
    assert calls(200, 5) == MANY[:200]
    assert calls(200, 6) != MANY[:200]


def test_every_malformation_of_every_entry_point_is_drawn() -> None:
    drawn = {(call.entry, call.malformations[0]) for call in calls(4400, 0) if call.malformations}
    assert drawn == {(entry, name) for entry in ENTRIES for name in known_to(entry)}


def test_every_entry_point_is_asked_sound_calls() -> None:
    counts = Counter(call.entry for call in MANY if call.valid)
    assert set(counts) == set(ENTRIES)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_malformation_changes_what_is_handed_over_and_not_what_is_meant() -> None:
    for call in MANY[:84]:
        plain, spoilt = sound(call), drafted(call)
        assert all((a == b).all() for a, b in zip(plain.expected, spoilt.expected, strict=True))
    draft = drafted(
        LibraryCall(entry="fi.prefill.fa2", malformations=("int64:qo_indptr", "offset:kv_indptr"))
    )
    assert str(draft.arrays["qo_indptr"].dtype) == "torch.int64"
    assert draft.arrays["kv_indptr"].numpy().tolist() == [1, 2]


def test_a_malformation_of_another_entry_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sgl.varlen knows no malformation 'page:before'"):
        drafted(LibraryCall(entry="sgl.varlen", malformations=("page:before",)))


def _same(a: Draft, b: Draft) -> bool:
    tensors = [(x.tensors | x.arrays) for x in (a, b)]
    return (
        all(
            tensors[0][name].dtype == other.dtype
            and tensors[0][name].shape == other.shape
            and tensors[0][name].equal(other)
            for name, other in tensors[1].items()
            if name in tensors[0]
        )
        and tensors[0].keys() == tensors[1].keys()
        and all(
            getattr(a, name) == getattr(b, name)
            for name in (
                "options",
                "late",
                "on_host",
                "strided",
                "planned",
                "workspace_bytes",
                "graph_batch",
                "graph_indices",
                "buffer_dtype",
            )
        )
        and (a.earlier is None) == (b.earlier is None)
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_malformation_is_idle(entry: str) -> None:
    lens = {"qo_lens": (1, 1, 1) if "decode" in entry else (3, 1, 5), "kv_lens": (20, 7, 40)}
    for name in known_to(entry):
        window = {"variant": "window", "window_left": 8} if malformation(name).variant == "window" else {}
        call = LibraryCall(
            entry=entry,
            **lens,  # pyright: ignore[reportArgumentType]
            **window,  # pyright: ignore[reportArgumentType]
            num_qo_heads=8,
            num_kv_heads=2,
            page_size=16,
            malformations=(name,),
        )
        assert not _same(sound(call), drafted(call)), name


def test_few_kernel_variants_are_needed() -> None:
    listed = variants(("flashinfer", "sgl_kernel"))
    assert len(listed) == 11
    assert not variants(("sgl_kernel",))
    for call in MANY:
        assert call.variant in VARIANTS.get(call.kernel, ("plain", "window", "cap"))
        for name in call.malformations:
            assert malformation(name).variant in (None, call.variant)


def test_a_store_means_that_its_tokens_lie_where_their_requests_have_them() -> None:
    call = LibraryCall(entry="fi.append", qo_lens=(2, 1), kv_lens=(3, 1), page_size=2)
    draft = sound(call)
    assert draft.arrays["batch_indices"].equal(ints([0, 0, 1]))
    assert draft.arrays["positions"].equal(ints([1, 2, 0]))
    ids, (_, second, _) = draft.arrays["indices"], draft.arrays["kv_indptr"]
    slots = torch.stack((ids[0] * 2 + 1, ids[1] * 2, ids[second] * 2))
    keys, values = draft.expected[0].chunk(2)
    assert keys[slots].equal(draft.tensors["append_key"].double())
    assert values[slots].equal(draft.tensors["append_value"].double())
    changed = (draft.tensors["k"].flatten(0, 1).double() != keys).flatten(1).any(dim=1)
    assert changed.sum() == 3
    assert changed[slots].all()


@pytest.mark.parametrize(
    ("qo_lens", "words"), [((2,), r"\(2,\) tokens are stored of \(1,\)"), ((0,), "no token is stored")]
)
def test_what_is_no_store_is_refused(qo_lens: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LibraryCall(entry="fi.append", qo_lens=qo_lens, kv_lens=(1,))
