"""What the light device costs per call, beside plain torch: `python -m fakes.cuda.bench`."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch

from fakes import cuda


def measure(number: int = 200, repeat: int = 100) -> dict[str, tuple[float, float]]:
    """Microseconds per call, (plain CPU, in a light simulation), the best of `repeat` runs of `number` calls.

    Set torch to one thread first.
    """
    plain = _time(_calls("cpu"), number, repeat)
    with cuda.simulated_cuda("light"):
        simulated = _time(_calls("cuda"), number, repeat)
    return {name: (plain[name], simulated[name]) for name in plain}


def _calls(device: str) -> dict[str, Callable[[], object]]:
    x = torch.zeros(8, device=device)
    y = torch.ones(8, device=device)
    host_x, host_y = torch.zeros(8), torch.ones(8)

    def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out

    launch = cuda.kernel(nothing)
    return {
        "torch.add": lambda: torch.add(x, y),
        "x + y": lambda: x + y,
        "add_": lambda: x.add_(y),
        "view": lambda: x.view(2, 4),
        "slice": lambda: x[1:3],
        "cat of 4": lambda: torch.cat([x, y, x, y]),
        "sum(dim=0)": lambda: x.sum(dim=0),
        "empty": lambda: torch.empty(8, device=device),
        "to(int32)": lambda: x.to(torch.int32),
        "is_cuda": lambda: x.is_cuda,
        "shape": lambda: x.shape,
        "host tensors x + y": lambda: host_x + host_y,
        "cuda.host": lambda: cuda.host(x),
        "cuda.kernel of 4": lambda: launch(x, x, x, y),
        "cuda.paused": _pause,
    }


def _pause() -> None:
    with cuda.paused():
        pass


def _time(calls: dict[str, Callable[[], object]], number: int, repeat: int) -> dict[str, float]:
    return {
        name: min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6
        for name, call in calls.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'us per call':<22}{'plain':>8}{'light':>8}")  # noqa: T201
    for name, (plain, simulated) in measure().items():
        print(f"{name:<22}{plain:>8.2f}{simulated:>8.2f}")  # noqa: T201
