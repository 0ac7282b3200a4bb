"""Triton kernels on the simulated device, where Triton is installed.

They have a Python process of their own: Triton decides at its import whether kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra: triton)"
)

BEGIN = """
import torch
from fakes import cuda
from fakes.cuda.full.triton import interpreted
from fakes.cuda.watched import watched

with cuda.simulated_cuda("full"), interpreted(), watched() as seen:
    from kernel import kv_indices

    table = torch.arange(4 * 64, dtype=torch.int32, device="cuda").view(4, 64)
    rows = torch.tensor([2, 0, 3], device="cuda")
    lens = torch.tensor([5, 40, 1], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 5, 45], dtype=torch.int32, device="cuda")
    out = torch.zeros(64, dtype=torch.int32, device="cuda")

    def gather(into, table=table):
        kv_indices[(3,)](table, rows, lens, starts, into, table.stride(0), BLOCK=16)

    def wanted(lens):
        return torch.cat([table[r, :n] for r, n in zip((2, 0, 3), lens)]).tolist()
"""

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kv_indices(table, rows, lens, starts, out, stride: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    row, count, start = tl.load(rows + request), tl.load(lens + request), tl.load(starts + request)
    for block in range(tl.cdiv(count, BLOCK)):
        offset = tl.arange(0, BLOCK) + block * BLOCK
        mask = offset < count
        tl.store(out + start + offset, tl.load(table + row * stride + offset, mask=mask), mask=mask)
"""


def _run(folder: Path, body: str, begin: str = BEGIN) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "main.py").write_text(begin + body)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, str(folder / "main.py")],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@needs_triton
def test_launches(tmp_path: Path) -> None:
    """On device memory, nothing read back; one node of a graph that reads its arguments again; no host memory unless
    it is pinned; everything restored."""
    done = _run(
        tmp_path,
        """
    seen.waits.clear()
    gather(out)
    assert not seen.waits, seen.waits
    assert out[:46].tolist() == wanted((5, 40, 1))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(out)
        twice = out * 2
    out.zero_()
    lens.copy_(torch.tensor([3, 2, 4], dtype=torch.int32))
    starts.copy_(torch.tensor([0, 3, 5], dtype=torch.int32))
    graph.replay()
    assert out[:9].tolist() == wanted((3, 2, 4))
    assert twice[:9].tolist() == [2 * x for x in wanted((3, 2, 4))]

    try:
        gather(out, table.cpu())
    except ValueError as error:
        assert "cpu tensor?" in str(error)
    else:
        raise AssertionError("a CPU tensor was accepted")
    out.zero_()
    gather(out, table.cpu().pin_memory())
    assert out[:9].tolist() == wanted((3, 2, 4))

    from triton.runtime.interpreter import GridExecutor
    ours = GridExecutor.__call__
import os
assert GridExecutor.__call__ is not ours
assert "TRITON_INTERPRET" not in os.environ
""",
    )
    if "DeviceUnavailable" in done.stderr and "simulated CUDA device" in done.stderr:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
    assert done.returncode == 0, done.stderr


@needs_triton
def test_triton_imported_too_early_is_said(tmp_path: Path) -> None:
    done = _run(tmp_path, "", "import triton\n" + BEGIN)
    assert done.returncode != 0
    assert "Triton was imported before TRITON_INTERPRET=1 was set" in done.stderr


def test_without_triton_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fakes.cuda import DeviceUnavailable
    from fakes.cuda.full.triton import interpreted

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match="install the package triton"), interpreted():
        pass
