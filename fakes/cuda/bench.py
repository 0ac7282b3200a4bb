"""What the simulated devices cost per call, beside plain torch: `python -m fakes.cuda.bench`."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch

from fakes import cuda


def measure(number: int = 200, repeat: int = 100) -> dict[str, dict[str, float]]:
    """Microseconds per call: "plain" CPU, "light", and "full" where it can be had. The best of `repeat` runs of
    `number` calls.

    Set torch to one thread first.
    """
    spent = {"plain": _time(_calls("cpu"), number, repeat)}
    for kind in ("light", "full"):
        try:
            with cuda.simulated_cuda(kind):
                spent[kind] = _time(_calls("cuda"), number, repeat)
        except cuda.DeviceUnavailable:
            continue
    return {name: {kind: costs[name] for kind, costs in spent.items()} for name in spent["plain"]}


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
    for name, costs in measure().items():
        print(f"{name:<20}", *(f"{kind} {us:6.2f} us" for kind, us in costs.items()), sep="   ")  # noqa: T201
