"""Names of backends: built-in, announced by an entry point, hybrid, or given as `pkg.mod:Class`.

Nothing is imported before it is asked for, and nothing falls back: a name that leads to no complete backend
is a `BackendError`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from backends.contract import Capabilities, EngineContext
from backends.declaration import undeclarable, without_any
from backends.waivers import Waiver, WaiverError, waivers_of

ENTRY_POINTS = "conformance.backends"
"""Entry-point group under which an installed package announces its backends."""

BUILT_IN = {
    "torch": "backends.torch_sdpa:TorchBackend",
    "fi": "backends.fi:FlashInferBackend",
    "fi-paged": "backends.fi_paged:FlashInferPagedBackend",
    "fa": "backends.fa:FlashAttentionBackend",
    "kernel:fi-decode": "backends.kernels.fi_decode:FlashInferDecode",
    "kernel:fi-decode-tc": "backends.kernels.fi_decode:FlashInferTensorCoreDecode",
    "kernel:fi-prefill": "backends.kernels.fi_prefill:FlashInferPrefill",
    "kernel:fi-prefill-fa3": "backends.kernels.fi_prefill:FlashInferPrefillFA3",
    "kernel:fi-ragged": "backends.kernels.fi_ragged:FlashInferRagged",
    "kernel:fi-ragged-fa3": "backends.kernels.fi_ragged:FlashInferRaggedFA3",
    "kernel:fi-merge": "backends.kernels.fi_merge:FlashInferMerge",
    "kernel:fa-kvcache": "backends.kernels.fa_kvcache:FlashAttentionKVCache",
    "kernel:fa-varlen": "backends.kernels.fa_varlen:FlashAttentionVarlen",
    "kernel:fa-merge": "backends.kernels.fa_merge:FlashAttentionMerge",
}

METHODS = {"engine": ("prepare_metadata", "forward"), "kernel": ("attend",)}
"""What a class of each level must define."""
GRAPH_METHODS = ("init_capture_graph", "prepare_for_capture", "prepare_for_replay")
"""What an engine-level class must define beside these where it declares `cuda_graph`."""


class BackendError(ValueError):
    """A name that leads to no complete backend. The message is one sentence for the user."""


@dataclass(frozen=True)
class BackendSpec:
    """A backend that can be made: call `factory` with the engine's context."""

    name: str
    factory: Callable[[EngineContext], Any]
    capabilities: Capabilities
    refuses: bool = False
    waivers: tuple[Waiver, ...] = ()
    """Its known failures, of all releases."""

    @property
    def level(self) -> Literal["engine", "kernel"]:
        return self.capabilities.level


def names() -> list[str]:
    """Every name that `resolve` knows without being told a module; hybrids of them come on top."""
    return [*BUILT_IN, *sorted(_announced().keys() - BUILT_IN.keys())]


def resolve(name: str) -> BackendSpec:
    """Find the backend called `name`, import its module (and no other) and check that it is complete.

    `"a,b"` is the hybrid that prefills with `a` and decodes with `b`.

    Raises:
        BackendError: unknown name, module that does not import, missing attribute or method, bad declaration.
    """
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 2 or not all(parts):
        raise BackendError(f"backend {name!r} is neither one name nor a pair 'prefill,decode'")
    specs = [_resolve_one(part) for part in dict.fromkeys(parts)]
    return specs[0] if len(specs) == 1 else _hybrid(*specs)


def spec_of(cls: type[Any]) -> BackendSpec:
    """A backend given as a class; its name is `pkg.mod:Class`.

    Raises:
        BackendError: it is not complete.
    """
    return _check(f"{cls.__module__}:{cls.__qualname__}", cls)


def describe(name: str) -> str:
    """What a backend declares, in one line.

    Raises:
        BackendError: as `resolve` does.
    """
    caps = resolve(name).capabilities
    flags = (
        "non_causal",
        "window",
        "layer_windows",
        "soft_cap",
        "custom_mask",
        "rows_without_keys",
        "empty_requests",
        "cuda_graph",
    )
    words = [
        caps.level,
        "+".join(sorted(caps.phases)),
        "needs " + "+".join(sorted(caps.library)) if caps.library else "needs no library",
        "dtypes " + " ".join(sorted(caps.dtypes | caps.kv_dtypes)),
        "page sizes " + _listed(caps.page_sizes),
        "layouts " + " ".join(sorted(caps.layouts)),
        "head dims " + _listed(caps.head_dims),
        "groups " + _listed(caps.group_sizes),
        *(flag.replace("_", " ") for flag in flags if getattr(caps, flag)),
        *(["lse base " + caps.lse] if caps.lse else []),
    ]
    return ", ".join(words)


def capabilities_of(cls: type) -> Capabilities:
    """The declaration of a backend class, or the default one.

    Raises:
        BackendError: `capabilities` is no `Capabilities`, or a field of it is none that it may be.
    """
    caps = getattr(cls, "capabilities", Capabilities())
    where = f"{cls.__module__}:{cls.__qualname__}.capabilities"
    if not isinstance(caps, Capabilities):
        raise BackendError(f"{where} is a {type(caps).__name__}, expected a backends.contract.Capabilities")
    if wrong := undeclarable(caps):
        raise BackendError(f"{where}.{wrong}")
    return caps


def _resolve_one(name: str) -> BackendSpec:
    targets = ([BUILT_IN[name]] if name in BUILT_IN else []) + _announced().get(name, [])
    if len(targets) > 1:
        raise BackendError(f"backend {name!r} is ambiguous: {' and '.join(targets)} both have that name")
    if targets:
        return _load(name, targets[0])
    if ":" in name and not name.startswith("kernel:"):
        return _load(name, name)
    known = names()
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise BackendError(f"unknown backend {name!r}{hint} (known: {', '.join(known)}, or pkg.mod:Class)")


def _announced() -> dict[str, list[str]]:
    """Name -> every "module:Class" that an installed package announces under it."""
    found: dict[str, list[str]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        targets = found.setdefault(point.name, [])
        target = point.value.partition("[")[0].strip()
        if target not in targets:
            targets.append(target)
    return found


def _load(name: str, target: str) -> BackendSpec:
    """Import "module:Class" and check it."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise BackendError(f"backend {name!r} is not of the form pkg.mod:Class")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a main guard may exit, a test module may skip
        reason = (str(error).splitlines() or [""])[0]
        raise BackendError(
            f"backend {name!r}: module {module_name} does not import: {type(error).__name__}: {reason}"
        ) from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise BackendError(f"backend {name!r}: module {module_name} has no attribute {attribute}")
        found = getattr(found, step)
    return _check(name, found)


def _check(name: str, cls: Any) -> BackendSpec:
    if not isinstance(cls, type):
        raise BackendError(f"backend {name!r} is a {type(cls).__name__}, expected a class")
    caps = capabilities_of(cls)
    for method in METHODS[caps.level]:
        if not callable(getattr(cls, method, None)):
            raise BackendError(
                f"backend {name!r}: class {cls.__qualname__} lacks the method {method} (level {caps.level})"
            )
    if caps.level == "engine" and caps.lse and not callable(getattr(cls, "forward_return_lse", None)):
        raise BackendError(
            f"backend {name!r}: class {cls.__qualname__} declares an LSE (base {caps.lse}) "
            "but lacks the method forward_return_lse"
        )
    for method in GRAPH_METHODS if caps.cuda_graph else ():
        if not callable(getattr(cls, method, None)):
            raise BackendError(
                f"backend {name!r}: class {cls.__qualname__} declares cuda_graph but lacks the method {method}"
            )
    try:
        inspect.signature(cls).bind(object())
    except (TypeError, ValueError) as error:  # ValueError: a class that is no Python code's
        raise BackendError(
            f"backend {name!r}: class {cls.__qualname__} cannot be made from one EngineContext: {error}"
        ) from error
    if not callable(getattr(cls, "environment", dict)):
        raise BackendError(f"backend {name!r}: {cls.__qualname__}.environment is not callable")
    refuses = getattr(cls, "refuses", False)
    if not isinstance(refuses, bool):
        raise BackendError(f"backend {name!r}: {cls.__qualname__}.refuses is {refuses!r}, expected a bool")
    try:
        waivers = waivers_of(name, getattr(sys.modules.get(cls.__module__), "__file__", None))
    except WaiverError as error:
        raise BackendError(f"backend {name!r}: {error}") from None
    return BackendSpec(name, cls, caps, refuses, waivers)


def _hybrid(prefill: BackendSpec, decode: BackendSpec) -> BackendSpec:
    from backends.hybrid import HybridBackend, meet

    for part in (prefill, decode):
        if part.level != "engine":
            raise BackendError(f"backend {part.name!r} is a kernel adapter and cannot be part of a hybrid")

    def factory(engine: EngineContext) -> HybridBackend:
        return HybridBackend(prefill.factory(engine), decode.factory(engine))

    name, both = f"{prefill.name},{decode.name}", meet(prefill.capabilities, decode.capabilities)
    if missing := without_any(both):
        raise BackendError(f"backend {name!r}: its parts declare no {missing} in common")
    return BackendSpec(
        name,
        factory,
        both,
        prefill.refuses and decode.refuses,
        prefill.waivers + decode.waivers,
    )


def _listed(values: frozenset[Any] | None) -> str:
    if values is None:
        return "any"
    return " ".join("/".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in sorted(values))
