"""Asking one library one call: the fake, or the real one in two surroundings."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from conformance.fidelity.call import LibraryCall
from conformance.fidelity.catalogue import drafted
from conformance.fidelity.draft import Draft
from conformance.fidelity.perform import Hands, Stage, perform
from conformance.fidelity.surroundings import Guarded, Place, Plain, places
from conformance.fidelity.verdict import BY_LUCK, Seen, differ, judge, refused
from fakes import cuda, modes, recorder, releases
from fakes.contract.rule import Lab, Observation, Rule, observe

ILLEGAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")
"""What CUDA says when a kernel has died and taken its context along."""


@contextmanager
def on_fakes(versions: dict[str, str]) -> Generator[Callable[[LibraryCall], Seen]]:
    """What the fakes of these releases do, faithfully, on the light simulated device."""
    with cuda.simulated_cuda("light"), releases.select(**versions), cuda.paused():
        yield _ask_fake


def _ask_fake(call: LibraryCall) -> Seen:
    seen = _ask_fake_once(call)
    if seen.kind != "undefined" or seen.error or len(call.malformations) < 2:
        return seen
    for one in call.malformations:  # what else is wrong may be refused, whatever the library reads
        alone = _ask_fake_once(replace(call, malformations=(one,)))
        if alone.kind == "refused" and alone.error not in BY_LUCK:
            return replace(seen, error=alone.error)
    return seen


def _ask_fake_once(call: LibraryCall) -> Seen:
    library = import_module(f"fakes.{call.library}")
    draft = drafted(call)
    with recorder.recording("faithful") as record, cuda.resumed():
        stage = Stage()
        hands = Hands(library, Plain("cuda"), stage, partial(setattr, record, "at"))
        try:
            out, lse = perform(draft, hands)
            with cuda.paused():
                seen = judge(draft, cuda.host(out), cuda.host(lse))
        except modes.UndefinedRead as error:
            seen = Seen("undefined", stage=stage.name, detail=str(error))
        except modes.WouldHang as error:
            seen = Seen("hung", stage=stage.name, detail=str(error))
        except modes.WouldCrash as error:
            seen = Seen("crashed", stage=stage.name, detail=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the library raises is what we came to see
            seen = refused(error, stage.name)
            if any(word in seen.detail for word in ILLEGAL):
                seen = Seen("crashed", stage=stage.name, detail=seen.detail)
    if record.foreign and seen.kind != "undefined":
        error = seen.error if seen.error not in BY_LUCK else ""
        return Seen("undefined", error, stage=stage.name, detail=record.foreign[0])
    return seen


def probe_fake(rule: Rule) -> Observation:
    """What the fake does with a rule's probe, faithfully. To be called with a device simulated and not paused."""
    with recorder.recording("faithful") as record:
        lab = Lab(import_module(f"fakes.{rule.library}"), "cuda", partial(setattr, record, "at"))
        return observe(rule, lab)


class ContextLost(RuntimeError):  # noqa: N818 - an outcome
    """The CUDA context of this process is dead; the message is what killed it."""


def ask_real(call: LibraryCall, library: Any, device: str) -> Seen:
    """What the real library does, called once in each of two surroundings.

    Raises:
        ContextLost: the call killed the CUDA context: this process can ask no more.
    """
    draft = drafted(call)
    seen = [_ask_once(draft, library, place) for place in places(device, guarded=True)]
    return combine(*seen)


def combine(first: Seen, second: Seen) -> Seen:
    """One verdict of two: undefined where the surroundings decide."""
    if (first.kind, first.error) != (second.kind, second.error):
        return Seen("undefined", stage=first.stage, detail=f"{first} | {second}")
    if gap := differ(first.numbers, second.numbers):
        return Seen("undefined", stage=first.stage, detail=f"{first} | {second}; {gap}")
    return first


def _ask_once(draft: Draft, library: Any, place: Place) -> Seen:
    stage = Stage()
    try:
        if isinstance(place, Guarded):
            place.heap()
        out, lse = perform(draft, Hands(library, place, stage))
        stage.name = "run"
        _synchronize()
        return judge(draft, out.cpu(), lse.cpu())
    except Exception as error:  # noqa: BLE001 - whatever the library raises is what we came to see
        _require_context(error)
        return refused(error, stage.name)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _require_context(error: Exception) -> None:
    """Whether CUDA still answers.

    Raises:
        ContextLost: it does not.
    """
    if lost():
        raise ContextLost(" ".join(str(error).split())[:200]) from error


def lost() -> str:
    """What killed the CUDA context, or "".

    Asked twice: a launch that was refused is reported once more by whatever comes next, and then forgotten.
    """
    if not torch.cuda.is_available():
        return ""
    said = ""
    for _ in range(2):
        try:
            torch.zeros(8, device="cuda").add_(1).cpu()
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = " ".join(str(error).split())[:200]
        else:
            return ""
    return said
