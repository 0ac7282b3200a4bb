"""Stand-in for `sgl_kernel` (sglang-kernel 0.4.6): its attention kernels, computed on the CPU."""

from __future__ import annotations

from fakes import releases
from fakes.sgl_kernel import attention, flash_attn, flash_mla
from fakes.sgl_kernel.attention import merge_state_v2

__all__ = ["attention", "flash_attn", "flash_mla", "merge_state_v2"]

__fake__ = True
__version__ = releases.selected("sgl_kernel")
