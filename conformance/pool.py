"""The engine's paged KV pool, as the harness keeps it: all layers in one tensor each for K and V."""

from __future__ import annotations

import torch

from cases.bits import host_bits
from cases.tensors import CaseTensors
from conformance.execution import Mark
from conformance.machine import Machine
from fakes import cuda
from fakes.recorder import Recorder


@cuda.kernel
def _store(caches: list[torch.Tensor], out_loc: torch.Tensor, rows: list[torch.Tensor], layout: str) -> None:
    slots = out_loc.long()
    for cache, new in zip(caches, rows, strict=True):
        words = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        if layout == "NHD":
            words.flatten(0, 1).index_copy_(0, slots, new)
        else:
            page_size = words.shape[2]
            words.transpose(1, 2)[slots.div(page_size, rounding_mode="floor"), slots % page_size] = new


@cuda.kernel
def _quantised(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (rows.float() / scale).to(dtype).view(torch.uint8)


class Pool:
    """Backs `backends.contract.KVPool`. What it hands out stands on the backend's device.

    k, v: the harness's side, in the KV dtype: `[layers, num_pages, page_size, num_kv_heads, dim]` (HND: heads before
    slots).
    """

    def __init__(self, tensors: CaseTensors, recorder: Recorder, machine: Machine) -> None:
        case = tensors.case
        self._recorder = recorder
        self.stores: dict[Mark, int] = {}
        """Where K and V were stored -> how many library calls had been made when that began."""
        self._tensors = tensors
        self.layout = case.layout
        self.scales = (case.k_scale, case.v_scale)
        dtype = getattr(torch, case.cache_dtype)
        k = machine.adopt(torch.zeros(tensors.pool_shape(case.heads.head_dim_qk), dtype=dtype))
        v = machine.adopt(torch.zeros(tensors.pool_shape(case.heads.head_dim_vo), dtype=dtype))
        self.k, self.v = machine.alias(k), machine.alias(v)
        self._quantised = case.stored_as_fp8
        self._k_layers = list(k.unbind(0))
        self._v_layers = list(v.unbind(0))

    def fill(self, step: int, *, nan: bool) -> None:
        """Before a step: the stored tokens where they belong, poison in every other slot.

        In a session the steps before have stored them: only what comes and goes is written.
        """
        for which, pool in (("k", self.k), ("v", self.v)):
            if step and self._tensors.case.session:
                host = pool.cpu()  # itself, but for a real device
                self._tensors.turn(host_bits(host), step, which, nan=nan)
                pool.copy_(host)
            else:
                pool.copy_(self._tensors.pool(step, which, nan=nan, after=False))

    def k_cache(self, layer_id: int) -> torch.Tensor:
        return self._k_layers[layer_id]

    def v_cache(self, layer_id: int) -> torch.Tensor:
        return self._v_layers[layer_id]

    def stored(self) -> None:
        """Say that this layer's K and V stand in the pool, written by whatever means."""
        self.stores.setdefault(self._recorder.at, len(self._recorder.calls))

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        """Write k, v `[num_tokens, num_kv_heads, dim]` to the slots `out_loc`; fp8 pools divide by their scales."""
        self.stored()
        caches = [self._k_layers[layer_id], self._v_layers[layer_id]]
        rows = [k, v]
        if self._quantised:
            rows = [_quantised(x, scale, caches[0].dtype) for x, scale in zip(rows, self.scales, strict=True)]
        _store(caches, out_loc, rows, self.layout)
