"""Stand-in for `sgl_kernel` (sglang-kernel; `fakes.releases` says which): its attention kernels, on the CPU."""

from __future__ import annotations

from typing import Any

from fakes import releases
from fakes.sgl_kernel import attention, flash_attn, flash_mla
from fakes.sgl_kernel.attention import merge_state_v2

__all__ = ["attention", "flash_attn", "flash_mla", "merge_state_v2"]

__fake__ = True


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return releases.selected("sgl_kernel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
