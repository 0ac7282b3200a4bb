"""torch.cuda: queries, streams and events.

Claims about CUDA: where there is a real GPU, they are tested on that.
"""

from __future__ import annotations

import pytest
import torch

from fakes.cuda.claims import here, row, there

pytestmark = pytest.mark.usefixtures("cuda_device")


def test_capability_queries() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() >= 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability("cuda:0") == (9, 0)
    assert "H200" in torch.cuda.get_device_name(0)
    properties = torch.cuda.get_device_properties(torch.device("cuda"))
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert torch.cuda.memory_allocated() >= 0
    assert torch.version.cuda is not None
    assert torch.cuda.is_bf16_supported()
    torch.cuda.empty_cache()
    torch.cuda.set_device(0)
    with torch.cuda.device(0):
        assert there(row())
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.cuda.synchronize("cpu")


def test_profiler_ranges() -> None:
    with torch.cuda.nvtx.range("attention"):
        torch.cuda.nvtx.mark("plan")


def test_streams_and_events() -> None:
    main = torch.cuda.current_stream()
    assert main == torch.cuda.default_stream()
    side = torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        x = row().to("cpu", non_blocking=True)
        done = side.record_event()
    with side:
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == main
    assert isinstance(main.cuda_stream, int)
    done.wait()
    main.wait_event(done)
    done.synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    assert done.query()
    assert side.query()
    assert here(x)
    row().record_stream(side)
    assert not torch.cuda.is_current_stream_capturing()


def test_event_times() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises((ValueError, RuntimeError), match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.Event().query()
    with pytest.raises((ValueError, RuntimeError), match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)
