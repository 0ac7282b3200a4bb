"""The one device that is simulated: cuda:0, an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns: those of an H200, memory in bytes."""

    name: str = "NVIDIA H200 (simulated)"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int = 139 << 30
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    L2_cache_size: int = 60 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


def ordinal(device: Any) -> int:
    """Index of a CUDA device given in any of torch's forms; None is the current one.

    Raises:
        ValueError: Not a CUDA device, in torch's words.
        RuntimeError: There is one device, number 0.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = device.index
    if device not in (None, 0, -1):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal (asked for cuda:{device}, the simulation has cuda:0 only)"
        )
    return 0
