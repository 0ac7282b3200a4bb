"""A worker that asks the fakes: for machines where torch finds a GPU, which no process that may see it can simulate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from conformance.fidelity.call import LibraryCall
from conformance.fidelity.observe import on_fakes, probe_fake
from conformance.fidelity.verdict import Seen
from conformance.fidelity.worker import serve
from fakes import cuda, releases
from fakes.contract import rules
from fakes.contract.rule import Observation

_stack = ExitStack()
_asked: list[Callable[[LibraryCall], Seen]] = []


def start(wanted: dict[str, str]) -> dict[str, str]:
    chosen = {name: version or releases.selected(name) for name, version in wanted.items()}
    _asked.append(_stack.enter_context(on_fakes(chosen)))
    return chosen


def ask(call: LibraryCall) -> Seen:
    return _asked[0](call)


def probe(name: str) -> tuple[Observation, bool]:
    with cuda.resumed():
        return probe_fake(next(rule for rule in rules() if rule.id == name)), False


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start, ask, probe))
