"""A worker that asks the fakes as if they were real: how workers, deaths and surroundings are tried without a GPU.

Where a real library would kill the process, this one kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from importlib import import_module

from conformance.fidelity.call import LibraryCall
from conformance.fidelity.observe import ILLEGAL, ContextLost, ask_real
from conformance.fidelity.verdict import Seen
from conformance.fidelity.worker import serve
from fakes import cuda, recorder, releases
from fakes.contract import rules
from fakes.contract.rule import Lab, Observation, observe

_stack = ExitStack()


def start(wanted: dict[str, str]) -> dict[str, str]:
    _stack.enter_context(cuda.simulated_cuda("light"))
    _stack.enter_context(releases.select(**{name: version for name, version in wanted.items() if version}))
    _stack.enter_context(recorder.recording("faithful"))
    return {name: releases.selected(name) for name in wanted}


def ask(call: LibraryCall) -> Seen:
    seen = ask_real(call, import_module(f"fakes.{call.library}"), "cuda")
    if "SIGFPE" in seen.detail:
        os.kill(os.getpid(), signal.SIGFPE)
    if any(word in seen.detail for word in ILLEGAL):
        raise ContextLost(seen.detail)
    return seen


def probe(name: str) -> tuple[Observation, bool]:
    rule = next(rule for rule in rules() if rule.id == name)
    return observe(rule, Lab(import_module(f"fakes.{rule.library}"), "cuda")), False


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start, ask, probe))
