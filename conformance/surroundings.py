"""Torch's own settings, which a backend leaves as it found them: the model's next layer runs under them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from conformance.machine import Machine


class Surroundings(NamedTuple):
    """`current_stream` is None on the plain CPU."""

    default_dtype: torch.dtype
    grad_mode: bool
    current_stream: Any

    @classmethod
    def of(cls, machine: Machine) -> Surroundings:
        """As they are now."""
        stream = torch.cuda.current_stream() if machine.device.type == "cuda" else None
        return cls(torch.get_default_dtype(), torch.is_grad_enabled(), stream)

    def restored(self, machine: Machine) -> list[str]:
        """Set what has changed since back; the names of that."""
        now = Surroundings.of(machine)
        if now == self:
            return []
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_mode)
        if self.current_stream is not None:
            torch.cuda.set_stream(self.current_stream)
        return [
            f"{name} of torch" for name, was, is_ in zip(self._fields, self, now, strict=True) if was != is_
        ]
