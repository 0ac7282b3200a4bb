"""Which library calls a graph captured, and what they read when it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from conformance.execution import Mark
from fakes.recorder import Attended, Call, Recorder


@dataclass(slots=True)
class CapturedCall:
    """A library call of a captured layer, as one replay carried it out.

    `attended` is what it read this time, `plan` the plan that it followed. `again`: the call was made again, so that
    its arguments are those of the replay.
    """

    call: Call
    layer: int
    attended: Attended
    plan: Call | None
    again: bool


class Marks:
    """Told by a `GraphRunner` what it is about to call: captured calls are marked by their size; those before a capture
    by none. `doing`: what was told last; `step`: the one that is prepared or replayed."""

    def __init__(self, recorder: Recorder) -> None:
        self.doing = "capture"
        self.step = -1
        self._recorder = recorder
        self._calls_before = 0
        self._read_before: dict[int, Attended | None] = {}

    def __call__(self, what: str, size: int, layer: int) -> None:
        self.doing = what
        if what == "replay":
            self._calls_before = len(self._recorder.calls)
            self._read_before = {c.index: c.attended for c in self.captured(size)}
        if what in ("prepare_for_replay", "replay"):
            self._recorder.at = Mark(self.step, layer)
            return
        self._recorder.at = Mark(_captured_batch(size) if what == "capture" else _BEFORE, layer)

    def captured(self, size: int) -> list[Call]:
        """The attention calls in the graph for batches of this size."""
        batch = _captured_batch(size)
        return [c for c in self._recorder.calls if c.op == "attend" and c.at.batch == batch]

    def carried_out(self, size: int, layer_of: Callable[[torch.Tensor], int]) -> list[CapturedCall]:
        """The calls of the last replay. `layer_of`: the layer whose K a tensor holds, or -1.

        A fake whose launch alone is one device operation reads anew for the captured call; one that is such an
        operation as a whole makes its call again.
        """
        calls = self._recorder.calls
        found: list[CapturedCall] = []
        for c in (*self.captured(size), *calls[self._calls_before :]):
            attended = c.attended
            if c.op != "attend" or attended is None or attended is self._read_before.get(c.index):
                continue
            again = c.index >= self._calls_before
            layer = layer_of(attended.k) if again else c.at.layer
            plan = None if c.plan is None else calls[c.plan]
            found.append(CapturedCall(c, layer, attended, plan, again))
        return found

    def eager_wrappers(self) -> set[int]:
        """Owners of calls that were made for eager use."""
        made = [c for c in self._recorder.calls if c.op == "create"]
        return {c.owner for c in made if c.arguments.get("use_cuda_graph") is False}


_BEFORE = -2


def _captured_batch(size: int) -> int:
    """What stands for the batch in the mark of a captured call."""
    return -2 - size
