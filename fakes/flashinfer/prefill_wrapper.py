"""What both batch prefill wrappers share: rows and masks of graph mode, and the options of the older `forward`."""

from __future__ import annotations

from typing import Any

import torch

from fakes import cuda
from fakes.flashinfer import paged_run
from fakes.flashinfer.wrapper import Until, Wrapper, check_positions


class PrefillWrapper(Wrapper):
    """Base of the batch prefill wrappers. In graph mode the first plan bounds the rows of later ones."""

    _max_total_num_rows: int | None
    _custom_mask_buf: Any
    _mask_indptr_buf: Any

    def _bound_rows(self, total_rows: int) -> None:
        if self._max_total_num_rows is None:
            self._max_total_num_rows = total_rows
        elif total_rows > self._max_total_num_rows:
            raise ValueError(
                f"The total number of rows in qo_indptr {total_rows} in cuda graph mode cannot exceed "
                f"the number of rows set during initialization {self._max_total_num_rows}."
            )

    def _copy_mask(self, mask: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write a packed mask and its indptr into the buffers of graph mode."""
        for name in ("custom_mask_buf", "mask_indptr_buf"):
            if not torch.is_tensor(getattr(self, f"_{name}")):
                raise ValueError(
                    f"{name} must be initialized with a torch.Tensor in cuda graph mode if we use "
                    "custom mask in attention computation."
                )
        self._custom_mask_buf[: len(mask[0])].copy_(mask[0])
        self._mask_indptr_buf.copy_(mask[1])

    def _adopt_mask(self, mask: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep a packed mask and its indptr as they are."""
        with cuda.paused():
            self._custom_mask_buf, self._mask_indptr_buf = cuda.adopt(mask[0].clone()), cuda.adopt(mask[1])

    def _set_late(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope: tuple[float | None, float | None],
    ) -> None:
        """What the older `forward` sets replaces the plan's values, too late for what is compiled in."""
        check_positions(pos_encoding_mode)
        self._causal = causal
        self._late = paged_run.set_late(self, window_left, logits_soft_cap, sm_scale)
        self._rope_scale, self._rope_theta = rope

    def _end_forward(self) -> None:
        """Has no effect."""

    _end_forward.__name__ = "end_forward"
    end_forward = Until("0.7.2", _end_forward)
