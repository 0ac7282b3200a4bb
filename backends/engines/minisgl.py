"""mini-sglang's own `FlashInferBackend` and `FlashAttentionBackend`, from a checkout (`--engine-path DIR`).

Our contract follows mini-sglang's protocol, so little stands between: its `Context`, its `Batch`, and a model
configuration of three numbers. Its KV pool stores with a kernel of its own that needs a GPU; ours stands in.
Interface: `minisgl/core.py` and `minisgl/attention/` of the repository sgl-project/mini-sglang.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext, Refused
from backends.engines.placeholders import placeholders, quiet
from backends.fa import FA_HEAD_DIMS
from backends.fi import FI_HEAD_DIMS
from backends.refusal import refuse_undeclared
from backends.registry import BackendError
from fakes import cuda

LIBRARIES = ("flashinfer", "sgl_kernel")
PLACEHOLDERS = ("accelerate", "huggingface_hub", "modelscope", "msgpack", "pynvml", "safetensors", "tqdm")
PLACEHOLDERS += ("transformers", "tvm_ffi", "zmq")
"""Packages that mini-sglang imports and that its attention backends do not call."""


@dataclass(frozen=True)
class KVPool:
    """The engine's pool, as mini-sglang's backends see theirs."""

    pool: Any
    device: torch.device
    dtype: torch.dtype

    def k_cache(self, index: int) -> torch.Tensor:
        return self.pool.k_cache(index)

    def v_cache(self, index: int) -> torch.Tensor:
        return self.pool.v_cache(index)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        self.pool.store_kv(k, v, out_loc, layer_id)


class MiniSGLBackend:
    """What both backends share. A subclass names mini-sglang's class.

    Raises:
        Refused: what the subclass does not declare, or another scale than head_dim ** -0.5 where mini-sglang's
            `forward` takes none.
    """

    capabilities: ClassVar[Capabilities]
    backend_class: ClassVar[tuple[str, str]]
    """Module of `minisgl.attention`, and class."""

    @classmethod
    @contextmanager
    def environment(cls) -> Iterator[None]:
        """Import mini-sglang under the simulated device.

        Raises:
            BackendError: it is nowhere.
        """
        if importlib.util.find_spec("minisgl") is None:
            raise BackendError("minisgl is not installed: give a checkout of mini-sglang with --engine-path")
        with cuda.resumed():
            for library in LIBRARIES:
                importlib.import_module(library)
            with quiet(), placeholders(PLACEHOLDERS, parts_of=LIBRARIES):
                for module in ("core", "distributed", f"attention.{cls.backend_class[0]}"):
                    importlib.import_module(f"minisgl.{module}")
        with suppress(RuntimeError, AssertionError):  # it is set once in a process
            importlib.import_module("minisgl.distributed").set_tp_info(0, 1)
        yield

    def __init__(self, engine: EngineContext) -> None:
        refuse_undeclared(engine, self.capabilities)
        module, name = self.backend_class
        backend_class = getattr(importlib.import_module(f"minisgl.attention.{module}"), name)
        self._options: dict[str, Any] = {}
        if engine.scale != engine.head_dim_qk**-0.5:
            if "softmax_scale" not in inspect.signature(backend_class.forward).parameters:
                raise Refused(
                    f"mini-sglang's {name} computes with scale head_dim ** -0.5, asked is {engine.scale}"
                )
            self._options["softmax_scale"] = engine.scale
        self._core: Any = importlib.import_module("minisgl.core")
        context = self._core.Context(page_size=engine.page_size)
        context.kv_cache = KVPool(engine.kv_pool, engine.page_table.device, engine.kv_dtype)
        context.page_table = engine.page_table
        self._core._GLOBAL_CTX = None  # noqa: SLF001 - a server sets it once, we once a case
        self._core.set_global_ctx(context)
        self.backend = backend_class(
            SimpleNamespace(
                head_dim=engine.head_dim_qk,
                num_qo_heads=engine.num_qo_heads,
                num_kv_heads=engine.num_kv_heads,
            )
        )

    def _batch(self, batch: Batch) -> Any:
        made = self._core.Batch(reqs=batch.reqs, phase=batch.phase)
        made.padded_reqs, made.out_loc, made.positions = batch.padded_reqs, batch.out_loc, batch.positions
        batch.attn_metadata = made
        return made

    def prepare_metadata(self, batch: Batch) -> None:
        self.backend.prepare_metadata(self._batch(batch))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self.backend.forward(q, k, v, layer_id, batch.attn_metadata, **self._options)

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        self.backend.init_capture_graph(max_seq_len, bs_list)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.backend.prepare_for_capture(self._batch(batch))

    def prepare_for_replay(self, batch: Batch) -> None:
        self.backend.prepare_for_replay(batch.attn_metadata)


class FlashInfer(MiniSGLBackend):
    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"flashinfer"}), head_dims=FI_HEAD_DIMS, cuda_graph=True
    )
    backend_class = ("fi", "FlashInferBackend")


class FlashAttention(MiniSGLBackend):
    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"sgl_kernel"}),
        head_dims=frozenset(dims for dims in FA_HEAD_DIMS if dims[0] == dims[1]),
        reads_unowned_slots=True,  # as backends.fa
        cuda_graph=True,
    )
    backend_class = ("fa", "FlashAttentionBackend")
