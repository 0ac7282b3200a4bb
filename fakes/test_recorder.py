"""The record: what is copied, what is found, and which unrounded values stand behind a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes import recorder
from fakes.cuda import watch
from fakes.recorder import Recorder, TensorRecord, recording, resumed


def kept(record: Recorder, exact: np.ndarray, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    result = torch.from_numpy(exact).to(dtype)
    record.keep_exact(result, exact)
    return result


EXACT = np.arange(24, dtype=np.float64).reshape(3, 4, 2) / 7


def test_exact_values_of_a_result_and_its_views() -> None:
    record = Recorder()
    result = kept(record, EXACT)
    for tensor, want in (
        (result, EXACT),
        (result[1:], EXACT[1:]),
        (result[:, 2], EXACT[:, 2]),
        (result.transpose(0, 1), EXACT.transpose(1, 0, 2)),
        (result.view(12, 2), EXACT.reshape(12, 2)),
        (result.clone()[:0], None),
    ):
        found = record.exact_of(tensor)
        if want is None or found is None:
            assert found is want
        else:
            assert np.array_equal(found, want)


def test_a_changed_or_foreign_tensor_has_no_exact_values() -> None:
    record = Recorder()
    result = kept(record, EXACT)
    assert record.exact_of(result.clone()) is None
    assert record.exact_of(result.view(torch.int16)) is None
    result[2, 0, 0] += 1
    assert record.exact_of(result) is None
    assert record.exact_of(result[:2]) is not None


def test_nan_stands_for_nan() -> None:
    record = Recorder()
    exact = np.array([[np.nan, 1.0]])
    found = record.exact_of(kept(record, exact))
    assert found is not None
    assert np.isnan(found[0, 0])


def test_arguments_are_copied_when_the_call_is_made() -> None:
    record = Recorder()
    indptr, cache = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(2, 2)
    call = record.call(
        "flashinfer", "plan", "plan", 1, {"indptr": indptr, "cache": cache, "page_size": 4, "out": None}
    )
    indptr[1] = 9
    given = call.arguments["indptr"]
    assert isinstance(given, TensorRecord)
    assert given.values is not None
    assert given.values.tolist() == [0, 3]
    assert call.arguments["cache"].values is None
    assert call.arguments["page_size"] == 4
    assert "out" not in call.arguments


@pytest.mark.parametrize(
    ("mode", "muted", "count"), [("strict", False, 1), ("strict", True, 0), ("faithful", False, 0)]
)
def test_findings_are_for_strict_mode(mode: recorder.Mode, muted: bool, count: int) -> None:
    record = Recorder(mode=mode, muted=muted)
    record.find("fi.rule", "arrays", "indptr", "indptr is wrong")
    assert len(record.findings) == count
    assert record.extended == (mode == "strict")


def test_a_muted_record_still_numbers_calls() -> None:
    record = Recorder(muted=True)
    call = record.call("flashinfer", "plan", "plan", 1, {"indptr": torch.zeros(2)})
    assert (call.index, call.arguments) == (0, {})


def test_records_nest() -> None:
    assert recorder.current() is None
    with recording() as outer:
        with recording("faithful") as inner:
            assert recorder.current() is inner
            with resumed(outer):
                assert recorder.current() is outer
        assert recorder.current() is outer
    assert recorder.current() is None


def test_what_a_device_notices_is_recorded_where_it_happens() -> None:
    with recorder.recording() as record:
        record.at = "layer 1"
        watch.hazard("cuda.early-read", "pinned memory", "too early")
        watch.host_waits("item")
        record.muted = True
        assert not watch.hazards_wanted()
        watch.hazard("cuda.early-read", "pinned memory", "unheard")
        watch.host_waits("unheard")
    watch.host_waits("unheard")
    (found,) = record.findings
    assert (found.rule, found.kind, found.message, found.at) == (
        "cuda.early-read",
        "order",
        "too early",
        "layer 1",
    )
    (wait,) = record.waits
    assert (wait.what, wait.at) == ("item", "layer 1")
    assert "in test_what_a_device_notices" in wait.where


def test_a_faithful_recorder_keeps_waits_and_no_hazards() -> None:
    with recorder.recording("faithful") as record:
        watch.hazard("cuda.early-read", "pinned memory", "unheard")
        watch.host_waits("item")
    assert not record.findings
    assert [wait.what for wait in record.waits] == ["item"]
