"""SGLang 0.5.23's own `FlashInferAttnBackend` and `FlashAttentionBackend`, unchanged, behind our contract.

SGLang makes all metadata and writes K and V; this file hands it its scheduler objects (`sglang_runner`) and calls what
its runners call: `init_forward_metadata` and `forward`; for graphs `init_cuda_graph_state` and
`init_forward_metadata_out_graph`, on buffers that stay where they are.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext, Refused
from backends.engines.placeholders import placeholders, quiet
from backends.engines.sglang_runner import (
    DEVICE,
    ModelRunner,
    attention_layers,
    forward_batch,
    kv_pool_class,
)
from backends.fa import FA_HEAD_DIMS
from backends.fi import FI_HEAD_DIMS
from backends.refusal import refuse_undeclared
from backends.registry import BackendError
from fakes import cuda, releases
from fakes.cuda.full.triton import interpreted

RELEASE = "0.5.23"
PINNED = {"flashinfer": "0.7.2", "sgl_kernel": "0.4.10"}
"""The kernel libraries that this release of SGLang pins: the fakes stand for these."""

PLACEHOLDERS = (
    "IPython",
    "aiohttp",
    "compressed_tensors",
    "einops",
    "gguf",
    "partial_json_parser",
    "sentencepiece",
    "starlette",
    "torchvision",
    "tvm_ffi",
)
"""Packages that SGLang imports and that its attention backends do not call."""

WHERE = {
    "AttentionArch": "configs.model_config",
    "ForwardBatch": "model_executor.forward_batch_info",
    "ForwardMode": "model_executor.forward_batch_info",
    "KVIndexTranslator": "mem_cache.kv_index_translator",
    "MHATokenToKVPool": "mem_cache.memory_pool",
    "RadixAttention": "layers.radix_attention",
    "ReqToTokenPool": "mem_cache.memory_pool",
    "get_context": "runtime_context",
    "get_is_capture_mode": "model_executor.runner",
}
"""What is used of SGLang, by us or later by itself, and the module of `sglang.srt` that it is imported from."""


class SGLangBackend:
    """What both backends share. A subclass names SGLang's class.

    Raises:
        Refused: what the subclass does not declare, or windows of two sizes.
    """

    capabilities: ClassVar[Capabilities]
    backend_class: ClassVar[tuple[str, str]]
    """Module of `sglang.srt.layers.attention`, and class."""
    attention_backend: ClassVar[str]
    """SGLang's name of it (`--attention-backend`)."""

    @classmethod
    @contextmanager
    def environment(cls) -> Iterator[None]:
        """Import SGLang under the simulated device, with the fakes of the releases that it pins.

        Raises:
            BackendError: it is not installed, or it is another release.
        """
        _require_installed()
        with releases.select(**PINNED), interpreted():
            with cuda.resumed():
                for library in PINNED:
                    importlib.import_module(library)
                with quiet(), placeholders(PLACEHOLDERS, parts_of=tuple(PINNED)):
                    for module in {*WHERE.values(), f"layers.attention.{cls.backend_class[0]}"}:
                        importlib.import_module(f"sglang.srt.{module}")
            yield

    def __init__(self, engine: EngineContext) -> None:
        refuse_undeclared(engine, self.capabilities)
        if len(set(engine.windows) - {None}) > 1:
            raise Refused(f"SGLang has one window, which layers have or have not, got {engine.windows}")
        self.engine = engine
        sg = SimpleNamespace(**{name: _from(module, name) for name, module in WHERE.items()})
        sg.KVPool = kv_pool_class(sg.MHATokenToKVPool)
        context = sg.get_context()
        context.resources.buffers.clear()  # a server has one device; here every case has its own
        if context._server_args is None:  # noqa: SLF001 - the getter raises where there are none
            context.override_server_args(device=DEVICE).install()
            context.parallel.override_permanently(attn_dcp_rank=0, tp_rank=0, attn_tp_rank=0)
        sg.server_args = context.server_args
        self.sg = sg
        # A server captures no size beyond its request pool; our engine may, up to the next power of two, twice.
        max_requests = 4 * max(engine.max_batch, engine.page_table.shape[0])
        self.runner = ModelRunner(sg, engine, self.attention_backend, max_requests)
        module, name = self.backend_class
        # A plan that raises leaves this set, and a server with it; here the next case is another server's.
        flashinfer: Any = importlib.import_module("sglang.srt.layers.attention.flashinfer_backend")
        flashinfer.global_override_indptr_cpu = None
        self.backend = _from(f"layers.attention.{module}", name)(self.runner)
        self.layers = attention_layers(sg, engine)

    def prepare_metadata(self, batch: Batch) -> None:
        batch.attn_metadata = forward_batch(self.sg, self.runner, batch)
        self.backend.init_forward_metadata(batch.attn_metadata)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        out = self.backend.forward(q, k, v, self.layers[layer_id], batch.attn_metadata)
        return out.view(q.shape[0], self.engine.num_qo_heads, self.engine.head_dim_vo)

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        del max_seq_len  # SGLang sizes its buffers by the model's context length
        largest, as_int64 = max(bs_list), {"dtype": torch.int64, "device": DEVICE}
        self.backend.init_cuda_graph_state(largest, largest)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        self.static = SimpleNamespace(
            req_pool_indices=torch.zeros(largest, **as_int64),
            seq_lens=torch.full((largest,), fill, **as_int64),
            seq_lens_cpu=torch.full((largest,), fill, dtype=torch.int64),
            out_cache_loc=torch.zeros(largest, **as_int64),
            positions=torch.zeros(largest, **as_int64),
        )
        """The runner's input buffers, which captured kernels read."""

    def _view(self, batch: Batch) -> Any:
        """The captured batch of this size: a `ForwardBatch` on the static buffers."""
        size = len(batch.padded_reqs)
        fields = {name: buffer[:size] for name, buffer in vars(self.static).items()}
        return self.sg.ForwardBatch(
            forward_mode=self.sg.ForwardMode.DECODE,
            batch_size=size,
            input_ids=torch.zeros_like(fields["positions"]),
            seq_lens_sum=int(fields["seq_lens_cpu"].sum()),
            **fields,
        )

    def _load(self, batch: Batch) -> None:
        """Write a batch into the static buffers."""
        made = forward_batch(self.sg, self.runner, batch)
        for name, buffer in vars(self.static).items():
            buffer[: len(batch.padded_reqs)].copy_(getattr(made, name))

    def prepare_for_capture(self, batch: Batch) -> None:
        self._load(batch)
        view = self._view(batch)
        self.runner.kv_index_translator.bind_runner_slots(view)
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        batch.attn_metadata = view

    def prepare_for_replay(self, batch: Batch) -> None:
        self._load(batch)
        view = self._view(batch)
        slots = view.out_cache_loc
        self.runner.kv_index_translator.bind_own_plan(view)
        view.kv_loc_plan.bind_replay(view, self.runner.kv_index_translator, slots=slots)
        self.backend.init_forward_metadata_out_graph(view)


class FlashInfer(SGLangBackend):
    """`--attention-backend flashinfer`: token locations as pages of one slot; prefill as ragged new tokens merged with
    the cached prefix."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"flashinfer", "sgl_kernel"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        head_dims=FI_HEAD_DIMS,
        window=True,
        layer_windows=True,
        soft_cap=True,
        cuda_graph=True,
    )
    backend_class = ("flashinfer_backend", "FlashInferAttnBackend")
    attention_backend = "flashinfer"


class FlashAttention(SGLangBackend):
    """`--attention-backend fa3`. Its page-table kernel for graphs takes page sizes that are powers of two."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"flashinfer", "sgl_kernel"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128, 256}),
        head_dims=FA_HEAD_DIMS,
        window=True,
        layer_windows=True,
        soft_cap=True,
        reads_unowned_slots=True,  # as backends.fa
        cuda_graph=True,
    )
    backend_class = ("flashattention_backend", "FlashAttentionBackend")
    attention_backend = "fa3"


def _require_installed() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise BackendError(
            "sglang is not installed: make engine installs it, or give its folder with --engine-path"
        )
    version = importlib.import_module("importlib.metadata").version("sglang")
    if version != RELEASE:
        raise BackendError(f"sglang is {version}, this adapter is written for {RELEASE}")


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sglang.srt.{module}"), name)
