"""Whether a GPU answers, found out in another process (this module, run): this one must never touch CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conformance.machine import NoGPU, require_gpu

TIMEOUT = 120
"""Seconds: a driver that hangs is no GPU that answers."""


def require_gpu_elsewhere() -> None:
    """Make sure that a process started from here finds a GPU.

    Raises:
        NoGPU: why it does not, in one sentence.
    """
    import torch

    if torch.version.cuda is None:
        require_gpu()  # touches nothing: torch knows no CUDA
    try:
        done = subprocess.run(
            [sys.executable, "-m", "conformance.gpu"],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoGPU(f"no GPU answers: CUDA did not come up within {TIMEOUT} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        raise NoGPU(lines[-1] if lines[-1].startswith("no GPU answers") else f"no GPU answers: {lines[-1]}")


def main() -> int:
    try:
        require_gpu()
    except NoGPU as error:
        sys.stdout.write(f"{error}\n")
        return 1
    import torch

    torch.zeros(1, device="cuda").item()  # a device that is listed may still be lost
    return 0


if __name__ == "__main__":
    sys.exit(main())
