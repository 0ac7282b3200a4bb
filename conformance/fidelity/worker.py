"""The worker process: `python -m conformance.fidelity.worker FD LIBRARY=VERSION ...` asks the real libraries.

Tasks come as JSON lines on stdin, answers go to the file descriptor FD, so that nothing that a library prints gets
among them. The first answer says which versions were found, or what was missing.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.utils import deterministic

from backends import libraries
from conformance.fidelity.call import LibraryCall, from_json
from conformance.fidelity.observe import ContextLost, ask_real, lost
from conformance.fidelity.verdict import Seen
from fakes.contract import rules
from fakes.contract.rule import Lab, Observation, observe


def serve(
    argv: Sequence[str],
    start: Callable[[dict[str, str]], dict[str, str]],
    ask: Callable[[LibraryCall], Seen],
    probe: Callable[[str], tuple[Observation, bool]],
) -> int:
    """Answer tasks until there are no more, or until a call has spoilt this process.

    Args:
        argv: the file descriptor of the answers, then `library=version` words; no version means any.
        start: imports these libraries; returns the versions found.
        ask: answers a call, or raises `ContextLost`.
        probe: runs a contract rule's probe; also says whether it has spoilt this process.
    """
    with os.fdopen(int(argv[0]), "w") as answers:

        def answer(what: dict[str, Any]) -> None:
            answers.write(json.dumps(what, separators=(",", ":")) + "\n")
            answers.flush()

        try:
            answer({"versions": start(dict(word.split("=") for word in argv[1:]))})
        except Exception as error:  # noqa: BLE001 - said to the parent, which stops
            answer({"error": f"{type(error).__name__}: {error}"})
            return 1
        for line in sys.stdin:
            task = json.loads(line)
            if "rule" in task:
                observed, last = probe(task["rule"])
                answer({"seen": [observed.kind, observed.detail, *observed.errors], "last": last})
            else:
                last = False
                try:
                    seen = ask(from_json(task["call"]))
                except ContextLost as error:
                    seen, last = Seen("crashed", detail=str(error)), True
                answer({"seen": seen.to_json(), "last": last})
            if last:
                return 0
    return 0


def start_real(wanted: dict[str, str]) -> dict[str, str]:
    """Import the real libraries; their versions.

    Raises:
        LibraryError, RuntimeError: one is not there or of another version, or no GPU answers.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU answers")
    libraries.use("real", wanted)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What a library allocates and does not write is NaN, whoever looks.
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    setattr(deterministic, "fill_uninitialized_memory", True)  # noqa: B010 - torch makes it a property of the module
    versions: dict[str, str] = {}
    for name, version in wanted.items():
        import_module(name)
        versions[name] = libraries.answered()[name].version
        if version and versions[name] != version:
            raise RuntimeError(f"{name} is {versions[name]}, {version} was asked for")
    torch.zeros(1, device="cuda").cpu()
    return versions


def ask_call(call: LibraryCall) -> Seen:
    return ask_real(call, import_module(call.library), "cuda")


def ask_rule(name: str) -> tuple[Observation, bool]:
    rule = next(rule for rule in rules() if rule.id == name)
    observed = observe(rule, Lab(import_module(rule.library), "cuda"))
    dead = lost()
    if dead and observed.kind != "refused":
        observed = Observation("crashes", dead)
    return observed, bool(dead)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start_real, ask_call, ask_rule))
