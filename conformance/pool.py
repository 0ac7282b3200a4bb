"""The engine's paged KV pool, as the harness keeps it: all layers in one tensor each for K and V."""

from __future__ import annotations

import torch

from cases.tensors import CaseTensors
from conformance.execution import Mark
from fakes import cuda
from fakes.recorder import Recorder


@cuda.kernel
def _store(bits: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, page_size: int) -> None:
    page = slots.long()
    offset = page % page_size
    bits[page.div(page_size, rounding_mode="floor"), offset] = rows


class Pool:
    """Backs `backends.contract.KVPool`. Host tensors inside; what it hands out stands on the backend's device.

    k, v: `[layers, num_pages, page_size, num_kv_heads, dim]` (HND: heads before slots) in the KV dtype.
    """

    def __init__(self, tensors: CaseTensors, recorder: Recorder, *, adopt: bool) -> None:
        case = tensors.case
        self._recorder = recorder
        self.stores: dict[Mark, int] = {}
        """Where K and V were stored -> how many library calls had been made by then."""
        self._tensors = tensors
        self.page_size = case.page_size
        self.layout = case.layout
        self.scales = (case.k_scale, case.v_scale)
        self.k = tensors.empty_pool(case.heads.head_dim_qk, 0.0)
        self.v = tensors.empty_pool(case.heads.head_dim_vo, 0.0)
        if adopt:
            cuda.adopt(self.k)
            cuda.adopt(self.v)
        self._k_layers = list(self.k.unbind(0))
        self._v_layers = list(self.v.unbind(0))

    def fill(self, step: int, *, nan: bool) -> None:
        """Before a step: the stored tokens where they belong, poison in every other slot."""
        self.k.copy_(self._tensors.pool(step, "k", nan=nan, after=False))
        self.v.copy_(self._tensors.pool(step, "v", nan=nan, after=False))

    def k_cache(self, layer_id: int) -> torch.Tensor:
        return self._k_layers[layer_id]

    def v_cache(self, layer_id: int) -> torch.Tensor:
        return self._v_layers[layer_id]

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        """Write k, v `[num_tokens, num_kv_heads, dim]` to the slots `out_loc`; fp8 pools divide by their scales."""
        self.stores[self._recorder.at] = len(self._recorder.calls)
        for pool, rows, scale in ((self._k_layers, k, self.scales[0]), (self._v_layers, v, self.scales[1])):
            target = pool[layer_id]
            if target.element_size() == 1:
                _store_fp8(target, out_loc, rows, self.page_size, self.layout, scale)
            else:
                _store(_slot_major(target, self.layout), out_loc, rows, self.page_size)


@cuda.kernel
def _store_fp8(
    target: torch.Tensor, out_loc: torch.Tensor, rows: torch.Tensor, page_size: int, layout: str, scale: float
) -> None:
    quantised = (rows.float() / scale).to(target.dtype).view(torch.uint8)
    bits = _slot_major(target.view(torch.uint8), layout)
    page = out_loc.long()
    bits[page.div(page_size, rounding_mode="floor"), page % page_size] = quantised


def _slot_major(pool: torch.Tensor, layout: str) -> torch.Tensor:
    return pool.transpose(1, 2) if layout == "HND" else pool
