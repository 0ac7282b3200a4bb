from __future__ import annotations

from collections import Counter

import pytest

from conformance.fidelity.call import ENTRIES, LibraryCall, from_json, to_json
from conformance.fidelity.catalogue import drafted, known_to, malformation
from conformance.fidelity.draft import Draft, sound
from conformance.fidelity.generate import VARIANTS, calls
from conformance.fidelity.run import variants

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
    drawn = {(call.entry, call.malformations[0]) for call in calls(4000, 0) if call.malformations}
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
    assert len(listed) == 10
    assert not variants(("sgl_kernel",))
    for call in MANY:
        assert call.variant in VARIANTS.get(call.kernel, ("plain", "window", "cap"))
        for name in call.malformations:
            assert malformation(name).variant in (None, call.variant)
