"""Where a fault is planted: in what a backend prepares, in what an adapter asks or answers, in the fake behind it."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import fakes.attend
from conformance.mutants.mutant import with_patches


def attended(cls: type[Any], make: Any) -> type[Any]:
    """The fakes' computation replaced: `make(original)` wherever a fake looks it up."""

    def patches() -> list[Any]:
        original = fakes.attend.attend
        return [
            (module, name, make)
            for module_name, module in list(sys.modules.items())
            if module_name.startswith("fakes.") and not module_name.startswith("fakes.cuda")
            for name, value in list(vars(module).items())
            if value is original
        ]

    return with_patches(cls, patches)


def answers(cls: type[Any], change: Any) -> type[Any]:
    """A subclass whose result is `change(self, call, attention)`."""

    class Answers(cls):
        def attend(self, call: Any) -> Any:
            return change(self, call, super().attend(call))

    return Answers


def asks(cls: type[Any], change: Any) -> type[Any]:
    """A subclass that makes another call: `change(self, call)`."""

    class Asks(cls):
        def attend(self, call: Any) -> Any:
            return super().attend(change(self, call))

    return Asks


def prepares(cls: type[Any], name: str, change: Any) -> type[Any]:
    """A subclass whose `prepare_metadata` is followed by `change(self, batch, metadata)`."""

    class Changed(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            changed = change(self, batch, batch.attn_metadata)
            if changed is not None:
                batch.attn_metadata = changed

    Changed.__name__ = name
    return Changed


def fa_fields(**fields: Any) -> Any:
    """Replace fields of `FAMetadata`; each value is a function of (backend, batch, metadata)."""

    def change(self: Any, batch: Any, metadata: Any) -> Any:
        return replace(metadata, **{k: make(self, batch, metadata) for k, make in fields.items()})

    return change


def fi_fields(**fields: Any) -> Any:
    """Set fields of `FIMetadata`."""

    def change(self: Any, batch: Any, metadata: Any) -> None:
        for key, make in fields.items():
            setattr(metadata, key, make(self, batch, metadata))

    return change
