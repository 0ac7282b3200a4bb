"""Faults that only a GPU has, set off as those of `conformance.isolation.faults` are.

Two need no kernel library: a few lines of PTX, which the driver itself compiles.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from backends.contract import Batch, Capabilities
from backends.fi import FlashInferBackend
from conformance.isolation.faults import TRIGGER, Faulty

_PTX = """.version 6.3
.target sm_75
.address_size 64
.visible .entry stray() {{
    .reg .u64 %address;
    .reg .u32 %one;
{body}
    ret;
}}
"""
_WRITE_ASTRAY = _PTX.format(
    body="    mov.u64 %address, 16;\n    mov.u32 %one, 1;\n    st.global.u32 [%address], %one;"
)
_FOREVER = _PTX.format(body="again:\n    bra.uni again;")


def launch(ptx: str) -> None:
    """Start the kernel `stray` of a module once, in torch's context, and do not wait for it.

    Raises:
        RuntimeError: the driver refuses a step, with its number.
    """
    torch.cuda.current_stream().synchronize()  # makes the context current on this thread
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    ones = (ctypes.c_uint * 6)(1, 1, 1, 1, 1, 1)
    for status in (
        cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode()),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"stray"),
        cuda.cuLaunchKernel(function, *ones, ctypes.c_uint(0), stream, None, None),
    ):
        if status:
            raise RuntimeError(f"the CUDA driver answers {status}")


class FaultyOnGPU(Faulty):
    """Right on a GPU, where real libraries are asked for, but for the trigger."""

    capabilities: ClassVar[Capabilities] = Capabilities(dtypes=frozenset({"float16", "bfloat16"}))


class WritesAstray(FaultyOnGPU):
    """An illegal memory access: error 700, and the context is lost."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        launch(_WRITE_ASTRAY)
        return out


class AssertsOnDevice(FaultyOnGPU):
    """A failed assertion in a kernel: error 710, and the context is lost."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out[torch.full((1,), 1 << 30, device=out.device)]


class HangsOnDevice(FaultyOnGPU):
    """A kernel that never ends: whoever waits for the device hangs."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        launch(_FOREVER)
        return out


class OutOfDeviceMemory(FaultyOnGPU):
    """Asks for more than the device has; torch's own exception says so."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out + torch.empty(1 << 50, dtype=torch.uint8, device=out.device)[0]


class HoardsDeviceMemory(FaultyOnGPU):
    """Takes what the device has and keeps it: the next one that asks, the harness, gets none."""

    kept: ClassVar[list[torch.Tensor]] = []

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        size = 1 << 36
        while size >= 512:
            try:
                self.kept.append(torch.empty(size, dtype=torch.uint8, device=out.device))
            except torch.OutOfMemoryError:
                size //= 2
        return out


class ReadsAstray(FlashInferBackend):
    """FlashInfer with a page id far outside of the pool: an illegal access in a kernel of the library itself."""

    def prepare_metadata(self, batch: Batch) -> None:
        if not any(r.extend_len == TRIGGER for r in batch.reqs):
            super().prepare_metadata(batch)
            return
        table = self.page_table
        self.page_table = torch.full_like(table, 10**9)
        try:
            super().prepare_metadata(batch)
        finally:
            self.page_table = table


class RightOnGPU(FaultyOnGPU):
    """The neighbour that suffers from none of them."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out
