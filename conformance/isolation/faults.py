"""Backends that do to their process what no exception can undo, each on cases that hold a certain request.

They show that isolation holds: `conformance.isolation.inject` puts them to cases and looks at the outcomes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import ClassVar

import torch

from backends.contract import Batch, Capabilities
from backends.torch_sdpa import TorchBackend

TRIGGER = 3
"""`extend_len` of the request that sets a fault off: other cases are answered rightly."""
COMPILE_SECONDS = 4


class Faulty(TorchBackend):
    """Right, but for batches with a request of `TRIGGER` new tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        return self.fault(out) if any(r.extend_len == TRIGGER for r in batch.reqs) else out

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Aborts(Faulty):
    """What a failed C++ assertion does."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        del out
        os.write(2, b"terminate called after throwing an instance of 'std::logic_error'\n")
        os.abort()


class Segfaults(Faulty):
    def fault(self, out: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(16)
        return out


class DividesByZero(Faulty):
    """A division by zero in native code, as decode on CUDA cores does without the leading 0 of `indptr`."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), 8)
        return out


class Leaves(Faulty):
    """Ends the process as if all were well."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        del out
        os._exit(0)


class Hangs(Faulty):
    def fault(self, out: torch.Tensor) -> torch.Tensor:
        del out
        while True:
            time.sleep(1)


class HangsWithGil(Faulty):
    """In native code that keeps the GIL: no other thread of the process, and no handler in Python, runs again."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        del out
        while True:
            ctypes.PyDLL(None).sleep(3600)


class OutOfMemory(Faulty):
    """Asks for more than there is; its own exception says so."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out + bytearray(1 << 60)[0]


class Killed(Faulty):
    """Another process kills this one, as the system does for want of memory."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        subprocess.run(["/bin/kill", "-KILL", str(os.getpid())], check=True)  # noqa: S603
        time.sleep(60)
        return out


class ClosesEverything(Faulty):
    """Closes the descriptors of others, as careless daemons do, and goes on."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        os.closerange(3, 256)
        return out


class Compiles(Faulty):
    """Waits for a compiler, another process that is busy: no fault, however long it takes."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        busy = f"import time; end = time.time() + {COMPILE_SECONDS}\nwhile time.time() < end: pass"
        subprocess.run([sys.executable, "-c", busy], check=True)  # noqa: S603
        return out


class Lies(Faulty):
    """Lives on with a wrong answer."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out + 1


class Right(Faulty):
    """The neighbour that suffers from none of them."""

    def fault(self, out: torch.Tensor) -> torch.Tensor:
        return out
