"""The one place that imports FlashInfer to compile: a process that is told what to do on its command line.

    python -m conformance.jit.child list  '{"names": [...], "limit": 12}'     which modules, and which are ready
    python -m conformance.jit.child build '{"kind": "fa2", ...}'              compile one

It answers with one line of JSON. Which files a module consists of, its name and where it lies is FlashInfer's own
business: we ask the library for the module, and stop it where it would compile.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from backends.libraries import answered, use
from backends.registry import resolve
from conformance.jit.choose import modules_for
from conformance.jit.modules import LIBRARY, Module


class _Stopped(Exception):  # noqa: N818 - no error: we have what we wanted
    """The library was about to build and load `spec`."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec


def spec_of(module: Module) -> Any:
    """FlashInfer's own `JitSpec` of a module.

    Raises:
        RuntimeError: FlashInfer did not get as far as building one.
    """
    import torch

    cascade, decode, prefill, core = (_part(name) for name in ("cascade", "decode", "prefill", "jit.core"))

    def stop(spec: Any) -> None:
        raise _Stopped(spec)

    dtype, kv_dtype = getattr(torch, module.dtype), getattr(torch, module.kv_dtype)
    key = (dtype, kv_dtype, dtype, torch.int32, module.head_dim_qk, module.head_dim_vo)
    flags = (0, module.window, module.soft_cap)  # no rotary embedding
    build_and_load = core.JitSpec.build_and_load
    core.JitSpec.build_and_load = stop
    try:
        if module.kind == "merge":
            cascade.get_cascade_module()
        elif module.kind == "decode":
            decode.get_batch_decode_module(*key, *flags)
        else:
            prefill.get_batch_prefill_module(module.kind, *key, *flags, False)  # no fp16 QK reduction
    except _Stopped as stopped:
        return stopped.spec
    finally:
        core.JitSpec.build_and_load = build_and_load
    raise RuntimeError(f"flashinfer has no module for {module}: nothing was built")


def _part(name: str) -> Any:
    return importlib.import_module(f"{LIBRARY}.{name}")


def list_modules(names: Sequence[str], limit: int) -> dict[str, Any]:
    """What the backends need, and what of it is compiled already."""
    use("real", ())
    modules = modules_for([resolve(name) for name in names], limit)
    if not modules:
        return {"modules": []}
    use("real", [LIBRARY])
    env = _part("jit.env")
    specs = [spec_of(module) for module in modules]
    return {
        "release": answered()[LIBRARY].version,
        "folder": str(env.FLASHINFER_JIT_DIR),
        "arch": env.FLASHINFER_WORKSPACE_DIR.name,
        "modules": [
            {
                "module": module.to_json(),
                "name": spec.name,
                "sources": len(spec.sources),
                "ready": bool(spec.is_aot or spec.is_compiled),
                "file": str(spec.jit_library_path),
            }
            for module, spec in zip(modules, specs, strict=True)
        ],
    }


def build(module: Module) -> dict[str, Any]:
    """Compile one module into FlashInfer's own cache."""
    use("real", [LIBRARY])
    spec = spec_of(module)
    started = time.monotonic()
    spec.build(verbose=False, need_lock=True)
    return {"name": spec.name, "seconds": time.monotonic() - started, "file": str(spec.jit_library_path)}


def main(argv: Sequence[str]) -> int:
    action, text = argv
    told: dict[str, Any] = json.loads(text)
    answer = list_modules(**told) if action == "list" else build(Module(**told))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")  # on a line of its own, whatever the library has printed
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
