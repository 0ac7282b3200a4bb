"""A named fault: a few lines over a correct backend or fake, and the check that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

from backends.contract import Capabilities, EngineContext
from backends.registry import BackendSpec


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault.

    `base` is the backend it is planted in; `check` the check that claims it; `issue` a public report of its kind, or
    the seed. `plant` makes the faulty backend's class out of the correct one. `requests` and `tokens` are the size of
    the smallest case that shows it (requests over all steps, and the sum of their kv_lens; at most).
    `modes`: where it can be shown at all ("faithful" sees no rule of the contract).
    """

    name: str
    base: str
    check: str
    why: str
    plant: Callable[[type[Any]], type[Any]]
    requests: int = 1
    tokens: int = 2
    issue: str | None = None
    alone: bool = False
    """Whether no other check fails on the smallest case: this mutant is why the check exists."""
    raises: bool = False
    """Whether it shows as an exception: any other that raises has broken down, and shows nothing."""
    modes: tuple[str, ...] = ("strict", "faithful")
    declares: dict[str, Any] | None = None
    """Changes to what the correct backend declares."""
    device: Literal["auto", "full"] = "auto"
    """The simulated device that it needs: "full" for what shows in captured graphs alone."""

    def spec(self, correct: BackendSpec) -> BackendSpec:
        """The faulty backend, under the mutant's name."""
        faulty = self.plant(correct.factory)  # type: ignore[arg-type]  # built-in factories are classes
        capabilities: Capabilities = correct.capabilities
        if self.declares:
            capabilities = replace(capabilities, **self.declares)
        return BackendSpec(self.name, faulty, capabilities, correct.refuses or self.check == "refusals")


MUTANTS: dict[str, Mutant] = {}
"""Every mutant by name."""


def mutant(
    name: str, *, base: str, check: str, why: str, **rest: Any
) -> Callable[[Callable[[type[Any]], type[Any]]], Callable[[type[Any]], type[Any]]]:
    """Register the decorated `plant` function."""

    def register(plant: Callable[[type[Any]], type[Any]]) -> Callable[[type[Any]], type[Any]]:
        if name in MUTANTS:
            raise ValueError(f"mutant {name!r} is registered twice")
        MUTANTS[name] = Mutant(name=name, base=base, check=check, why=why, plant=plant, **rest)
        return plant

    return register


Patch = tuple[Any, str, Callable[[Any], Any]]


def with_patches(cls: type[Any], patches: Callable[[], Sequence[Patch]]) -> type[Any]:
    """A class whose every method runs while attributes of the fakes are replaced.

    `patches()` gives (module, attribute, make): make takes the original and returns what stands in for it.
    """

    class Patched:
        def __init__(self, engine: EngineContext) -> None:
            with self._planted():
                self._inner = cls(engine)

        def _planted(self) -> ExitStack:
            stack = ExitStack()
            for module, attribute, make in patches():
                original = getattr(module, attribute)
                stack.enter_context(patch.object(module, attribute, make(original)))
            return stack

        def __getattr__(self, name: str) -> Any:
            inner = getattr(self._inner, name)
            if not callable(inner):
                return inner

            def call(*args: Any, **kwargs: Any) -> Any:
                with self._planted():
                    return inner(*args, **kwargs)

            return call

    return Patched
