"""Plans and the pinned buffer that they are staged in: what is overwritten while its copy is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fakes import flashinfer, recorder
from fakes.cuda.watched import simulated

RULE = "fi.staging-in-flight"


@pytest.fixture(autouse=True, params=["light", "full"])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    for _ in simulated(request.param):
        yield


def _wrapper() -> Any:
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)


def _host(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)


def _plan(wrapper: Any, place: Callable[[torch.Tensor], torch.Tensor] = lambda array: array) -> None:
    indices = torch.arange(3, dtype=torch.int32, device="cuda")
    wrapper.plan(
        place(_host([0, 1, 3])), indices, place(_host([1, 4])), 4, 1, 64, 4, q_data_type=torch.float16
    )


def _run(wrapper: Any) -> torch.Tensor:
    cache = torch.zeros(3, 2, 4, 1, 64, dtype=torch.float16, device="cuda")
    return wrapper.run(torch.zeros(2, 4, 64, dtype=torch.float16, device="cuda"), cache)


def _found(record: recorder.Recorder) -> list[str]:
    return [finding.rule for finding in record.findings]


def test_two_plans_with_nothing_between_them() -> None:
    wrapper = _wrapper()
    with recorder.recording() as record:
        _plan(wrapper)
        first = _run(wrapper)
        _plan(wrapper)
        second = _run(wrapper)
    assert _found(record) == [RULE]
    message = record.findings[0].message
    assert message.count("test_staging.py:") == 2, message
    assert first.isnan().all(), "the first run works by a mixture of two plans"
    assert not second.isnan().any()


def test_the_faithful_fake_is_as_wrong_and_says_nothing() -> None:
    wrapper = _wrapper()
    with recorder.recording("faithful") as record:
        _plan(wrapper)
        first = _run(wrapper)
        _plan(wrapper)
    assert not record.findings
    assert first.isnan().all()


def _event(_: torch.Tensor) -> None:
    torch.cuda.current_stream().record_event().synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(_event, id="event"),
        pytest.param(lambda out: torch.cuda.current_stream().synchronize(), id="stream"),
        pytest.param(lambda out: torch.cuda.synchronize(), id="device"),
        pytest.param(lambda out: out.cpu(), id="result read"),
        pytest.param(lambda out: torch.tensor([1], device="cuda"), id="blocking copy"),
    ],
)
def test_two_plans_with_a_wait_between_them(wait: Callable[[torch.Tensor], object]) -> None:
    wrapper = _wrapper()
    with recorder.recording() as record:
        _plan(wrapper)
        first = _run(wrapper)
        wait(first)
        _plan(wrapper)
    assert not _found(record)
    assert not first.isnan().any()


def test_a_plan_of_device_arrays_waits_by_itself() -> None:
    wrapper = _wrapper()
    with recorder.recording() as record:
        _plan(wrapper)
        _plan(wrapper, lambda array: array.cuda(non_blocking=True))
    assert not _found(record)


def test_an_event_recorded_before_the_plan_covers_nothing() -> None:
    wrapper = _wrapper()
    with recorder.recording() as record:
        event = torch.cuda.current_stream().record_event()
        _plan(wrapper)
        event.synchronize()
        _plan(wrapper)
    assert _found(record) == [RULE]


def test_an_event_of_another_stream_covers_nothing() -> None:
    wrapper = _wrapper()
    with recorder.recording() as record:
        _plan(wrapper)
        torch.cuda.Stream().record_event().synchronize()
        _plan(wrapper)
    assert _found(record) == [RULE]


def test_wrappers_with_buffers_of_their_own_do_not_meet() -> None:
    with recorder.recording() as record:
        for wrapper in (_wrapper(), _wrapper()):
            _plan(wrapper)
            assert not _run(wrapper).isnan().any()
    assert not _found(record)


def test_wrappers_that_share_the_pinned_buffer_meet() -> None:
    a, b = _wrapper(), _wrapper()
    b._pin_memory_int_workspace_buffer = a._pin_memory_int_workspace_buffer
    with recorder.recording() as record:
        _plan(a)
        first = _run(a)
        _plan(b)
    assert _found(record) == [RULE]
    assert first.isnan().all()


@pytest.mark.parametrize("waited", [False, True])
def test_wrappers_that_share_the_int_workspace_overwrite_each_others_plan(waited: bool) -> None:
    a, b = _wrapper(), _wrapper()
    b._int_workspace_buffer = a._int_workspace_buffer
    with recorder.recording() as record:
        _plan(a)
        _plan(b)
        if waited:
            torch.cuda.synchronize()
        assert _run(a).isnan().all()
        assert not _run(b).isnan().any()
    assert _found(record) == ["fi.plan-overwritten"]
