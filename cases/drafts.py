"""Steps in the making, for `cases.simplify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cases.model import AnyRequest, Kind, Phase, Step


class Draft(NamedTuple):
    """A step that may break a rule."""

    requests: Sequence[AnyRequest]
    phase: Phase
    kind: Kind
    finished: Sequence[int] = ()

    def step(self) -> Step:
        """The step itself.

        Raises:
            ValueError: a rule is broken.
        """
        return Step(tuple(self.requests), self.phase, self.kind, tuple(self.finished))


Changes = Iterator[tuple[Sequence[Draft], dict[str, Any]]]
"""Other steps, and settings of the case that change with them."""
