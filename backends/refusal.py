"""Refuse at construction what a backend does not declare: one sentence instead of a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator

from backends.contract import Capabilities, EngineContext, Refused


def refuse_undeclared(engine: EngineContext, capabilities: Capabilities) -> None:
    """Hold an engine against what a backend declares.

    Raises:
        Refused: the first thing that is not declared, and what is.
    """
    for what in _undeclared(engine, capabilities):
        raise Refused(f"{what}; this backend does not support that")


def _undeclared(engine: EngineContext, c: Capabilities) -> Iterator[str]:
    dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (engine.dtype, engine.kv_dtype))
    dims = (engine.head_dim_qk, engine.head_dim_vo)
    group = engine.num_qo_heads // engine.num_kv_heads
    if dtype not in c.dtypes:
        yield f"the engine computes in {dtype}"
    if kv_dtype not in (dtype, *c.kv_dtypes):
        yield f"the KV cache holds {kv_dtype}"
    if c.page_sizes is not None and engine.page_size not in c.page_sizes:
        yield f"the page size is {engine.page_size}"
    if engine.layout not in c.layouts:
        yield f"the KV cache has layout {engine.layout}"
    if c.head_dims is not None and dims not in c.head_dims:
        yield f"the head dims are {dims[0]} and {dims[1]}"
    if c.group_sizes is not None and group not in c.group_sizes:
        yield f"{group} query heads share a KV head"
    if not c.window and any(window is not None for window in engine.windows):
        yield "a layer has a sliding window"
    if not c.layer_windows and len(set(engine.windows)) > 1:
        yield f"the layers' windows differ: {', '.join(map(str, engine.windows))}"
    if not c.soft_cap and engine.soft_cap is not None:
        yield f"scores are capped at {engine.soft_cap}"
