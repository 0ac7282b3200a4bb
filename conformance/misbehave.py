"""Backends that misbehave, for the harness's own tests: each must get a verdict, and the run goes on."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext, Refused
from backends.torch_sdpa import TorchBackend


class _Misbehaves(TorchBackend):
    """Answers rightly, then spoils the answer."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self.spoil(super().forward(q, k, v, layer_id, batch))

    def spoil(self, out: torch.Tensor) -> Any:
        raise NotImplementedError


class Raises(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        raise RuntimeError(f"no kernel for {tuple(out.shape)}")


class RaisesAtOnce(_Misbehaves):
    def __init__(self, engine: EngineContext) -> None:
        raise RuntimeError(f"no memory for {engine.num_pages} pages")


class Refuses(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        raise Refused(f"{tuple(out.shape)} is not for this backend")


class Exits(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        del out
        sys.exit("the engine has had enough")


class ReturnsNone(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        del out


class ReturnsPair(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out, out


class WrongShape(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out.flatten(1)


class OneRowLess(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out[1:]


class Scalar(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out.sum()


class WrongDtype(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out.double()


class Booleans(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out > 0


class WrongDevice(_Misbehaves):
    """Runs on the simulated device, as its declaration asks for, and answers from the CPU."""

    capabilities: ClassVar[Capabilities] = Capabilities(library=frozenset({"flashinfer"}))

    def spoil(self, out: torch.Tensor) -> Any:
        return out.cpu()


class OnMeta(_Misbehaves):
    """Answers without any values."""

    def spoil(self, out: torch.Tensor) -> Any:
        return torch.empty(out.shape, dtype=out.dtype, device="meta")


class NotFinite(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return torch.full_like(out, float("nan"))


class TracksGradients(_Misbehaves):
    """Right but for a graph that hangs on the answer."""

    def spoil(self, out: torch.Tensor) -> Any:
        return out.clone().requires_grad_()


class Sparse(_Misbehaves):
    def spoil(self, out: torch.Tensor) -> Any:
        return out.to_sparse()
