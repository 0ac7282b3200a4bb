"""Every operator that torch tests itself with, put through the full device: `python -m fakes.cuda.full.opinfo`.

An operator is right when its results on the device equal those on the CPU and stand on the device, and when a captured
graph, replayed over other values, gives what it gives eagerly. Otherwise it was refused, with the reason, or is listed
in `EXPECTED` with one. Exit status 1 where an operator is neither.
"""

from __future__ import annotations

import collections
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from fakes import cuda

SAMPLES = 3
"""Sample inputs of each operator that are tried."""

UNFILLED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_as_",
)
"""Operators whose results hold anything."""

EXPECTED = {
    "as_strided.partial_views": "its samples read memory beyond their tensors, which a copy to a device does not have",
}
"""Operators that are not right, and why that is not the device's fault."""


@dataclass(frozen=True)
class Outcome:
    """What became of one operator, eagerly and replayed: "right", or "refused", "not comparable" or "WRONG" and why."""

    name: str
    eager: str
    replayed: str

    @property
    def good(self) -> bool:
        """Right, refused or not comparable; wrong where that is expected, and only there."""
        wrong = any(said.startswith("WRONG") for said in (self.eager, self.replayed))
        return wrong == (self.name in EXPECTED)


def operators() -> list[Any]:
    """OpInfo records of operators on float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if torch.float32 in op.dtypes]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def examine(op: Any) -> Outcome:
    """Put one operator through the device that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Outcome(name_of(op), _tried(op, _eager), _tried(op, _replayed))


_SEED = 42
"""What some of torch's own wrappers of random operators set before each call; a replay calls no wrapper."""

_REFUSALS = ("when stream is capturing", "same device", "to be on cpu", "from the 'Sparse")
"""CUDA's own words for what it does not take, and torch's for a kind of tensor without kernels."""


def _tried(op: Any, check: Callable[[Any, Any], str | None]) -> str:
    said: list[str] = []
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
        try:
            torch.manual_seed(0)
            said.append(check(op, sample) or "right")
        except cuda.NotSimulated as error:
            said.append(f"refused: {_first_line(error)}")
        except Exception as error:  # noqa: BLE001
            line = _first_line(error)
            refused = any(words in line for words in _REFUSALS)
            said.append(f"{'refused' if refused else 'WRONG'}: {type(error).__name__}: {line}")
    worst = [s for s in said if s.startswith("WRONG")] or [s for s in said if s != "right"] or said
    return worst[0] if worst else "not comparable: no samples"


def _first_line(error: BaseException) -> str:
    text = str(error.__context__ if "previous error" in str(error) and error.__context__ else error)
    return " ".join(text.split())[:160]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _to_device(value: Any) -> Any:
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().cuda() if leaf.layout == torch.strided else leaf.cuda()
        if isinstance(leaf, torch.device) or leaf == "cpu":
            return torch.device("cuda")
        return leaf

    return pytree.tree_map(moved, value)


def _call(op: Any, given: Any) -> Any:
    return op(given[0], *given[1], **given[2])


def _on_cpu(op: Any, sample: Any) -> list[torch.Tensor] | str:
    torch.manual_seed(0)
    try:
        return _tensors(_call(op, (sample.input, sample.args, sample.kwargs)))
    except Exception as error:  # noqa: BLE001 - a sample that the CPU refuses says nothing of the device
        return f"not comparable: the CPU refuses it ({_first_line(error)[:60]})"


def _eager(op: Any, sample: Any) -> str | None:
    right = _on_cpu(op, sample)
    if isinstance(right, str):
        return right
    torch.manual_seed(0)  # one generator serves host and device
    got = _tensors(_call(op, _to_device((sample.input, sample.args, sample.kwargs))))
    if len(got) != len(right):
        return f"WRONG: {len(got)} results, not {len(right)}"
    for mine, wanted in zip(got, right, strict=True):
        if not mine.is_cuda:
            return f"WRONG: a result on {mine.device}"
        if op.name not in UNFILLED:
            torch.testing.assert_close(
                mine.cpu(), wanted.detach(), rtol=1e-5, atol=1e-5, equal_nan=True, check_stride=False
            )
    return None


def _replayed(op: Any, sample: Any) -> str | None:
    """Capture, put other values into the inputs, replay: the same as eagerly on those values."""
    refused = _on_cpu(op, sample)
    if isinstance(refused, str):
        return refused
    if op.name in UNFILLED:
        return "not comparable: unfilled"
    with torch.inference_mode():
        given = _to_device((sample.input, sample.args, sample.kwargs))
        floating = [t for t in _tensors(given) if t.is_floating_point() and t.layout == torch.strided]
        before = [t.clone() for t in floating]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = _call(op, given)
        for change in (_flipped, _halved):

            def fill(change: Callable[[torch.Tensor], torch.Tensor] = change) -> None:
                torch.manual_seed(_SEED)
                for tensor, values in zip(floating, before, strict=True):
                    tensor.copy_(change(values))

            fill()
            try:
                wanted = [t.clone() for t in _tensors(_call(op, given))]
            except RuntimeError:
                if change is _flipped:
                    continue  # a property is lost that the operator needs, such as being positive definite
                raise
            fill()
            graph.replay()
            for mine, right in zip(_tensors(results), wanted, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5, equal_nan=True)
            return None
    return None


def _flipped(values: torch.Tensor) -> torch.Tensor:
    return (values.flip(0) if values.dim() else values) * 0.5 + values * 0.25


def _halved(values: torch.Tensor) -> torch.Tensor:
    return values * 0.5


def outcomes(names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Of all operators, or of those named."""
    chosen = [op for op in operators() if not names or name_of(op) in names]
    with cuda.simulated_cuda("full"):
        for op in chosen:
            yield examine(op)


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    found = list(outcomes(names))
    lines: list[str] = []
    for kind in ("eager", "replayed"):
        said = {outcome.name: str(getattr(outcome, kind)) for outcome in found}
        counts = collections.Counter(text.partition(":")[0] for text in said.values())
        lines.append(f"{kind}: {len(found)} operators, {dict(counts)}")
        lines += [f"  {name:45} {text}" for name, text in said.items() if text != "right"]
    print("\n".join(lines))  # noqa: T201
    return int(any(not outcome.good for outcome in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
