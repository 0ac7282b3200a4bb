"""The full device in processes of their own: beside faulthandler, in spawned workers, after autograd, in crashes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cuda
from fakes.cuda.claims import real_gpu, row, there

pytestmark = pytest.mark.skipif(real_gpu(), reason="a CUDA device is not simulated beside a real one")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def can_be_had() -> None:
    try:
        with cuda.simulated_cuda("full"):
            pass
    except cuda.DeviceUnavailable as reason:
        pytest.skip(str(reason))


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script after lines that import torch and install the device."""
    opened = (
        "import torch\nfrom fakes import cuda\ndevice = cuda.simulated_cuda('full')\ndevice.__enter__()\n"
    )
    return subprocess.run(
        [sys.executable, *options, "-c", opened + code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_trapped_writes_beside_faulthandler() -> None:
    """Enabled before and after the device was installed, in the main thread and in another."""
    ran = run(
        """
import faulthandler, threading
from fakes.cuda.watched import watched
def guilty():
    host.add_(1)
for in_thread in (False, True):
    with watched() as seen:
        host = torch.arange(4.0, pin_memory=True)
        there = host.to('cuda', non_blocking=True)
        if in_thread:
            thread = threading.Thread(target=guilty); thread.start(); thread.join()
        else:
            guilty()
        torch.cuda.synchronize()
    print([hazard.rule for hazard in seen.hazards], 'in guilty' in seen.hazards[0].message, host.tolist())
    faulthandler.enable()
""",
        "-X",
        "faulthandler",
    )
    assert ran.stdout == "['cuda.pinned-in-flight'] True [1.0, 2.0, 3.0, 4.0]\n" * 2, ran.stderr
    assert ran.returncode == 0
    assert "Fatal" not in ran.stderr


@pytest.mark.parametrize("left", [False, True], ids=["inside", "after"])
def test_real_crashes_still_crash_and_are_told(left: bool) -> None:
    leave = "device.__exit__(None, None, None)\n" if left else ""
    ran = run(f"{leave}import ctypes; ctypes.string_at(8)", "-X", "faulthandler")
    assert ran.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ran.stderr


def test_autograd_and_an_end_with_everything_open() -> None:
    ran = run(
        """
p = torch.nn.Parameter(torch.arange(6.0, device='cuda'))
(p * p).sum().backward()
print(p.grad.device, p.grad.tolist())
device.__exit__(None, None, None)
q = torch.ones(2, requires_grad=True); (q * 3).sum().backward(); print(q.grad.tolist())
device = cuda.simulated_cuda('full'); device.__enter__()
host = torch.arange(4.0, pin_memory=True); x = torch.ones(3, device='cuda'); x.copy_(host[:3], non_blocking=True)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = cuda.kernel(lambda a: cuda.host(a) + 1)(x)
torch.cuda.CUDAGraph().capture_begin()
print('done')
"""
    )
    assert ran.stdout == "cuda:0 [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n[3.0, 3.0]\ndone\n", ran.stderr
    assert ran.returncode == 0, ran.stderr


def test_autograd_that_counted_devices_before_is_refused() -> None:
    ran = run(
        """
device.__exit__(None, None, None)
q = torch.ones(2, requires_grad=True); (q * 3).sum().backward()
with cuda.simulated_cuda('full'):
    p = torch.nn.Parameter(torch.ones(2, device='cuda'))
    try:
        p.sum().backward()
    except cuda.NotSimulated as error:
        print(error)
q.sum().backward()
"""
    )
    assert ran.stdout.startswith("autograd does not know the simulated CUDA device"), ran.stderr
    assert ran.returncode == 0


def _work(count: int) -> tuple[bool, list[float]]:
    with cuda.simulated_cuda("full"):
        x = row(count)
        return there(x, x + 1), (x + 1).tolist()


def test_spawned_workers() -> None:
    with cuda.simulated_cuda("full"), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_work, [2, 3]) == [(True, [1.0, 2.0]), (True, [1.0, 2.0, 3.0])]
