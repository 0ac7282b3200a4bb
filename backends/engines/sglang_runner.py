"""What SGLang's attention backends want of their model runner: a stand-in, around real SGLang pools.

Real: `ReqToTokenPool` (over the harness's page table), `MHATokenToKVPool` (over the harness's pages; it writes K and V
itself), `KVIndexTranslator`, `RadixAttention`, `ForwardBatch`, the published server arguments. Stood in for: the model
runner, the model's configuration and the allocator, of which a backend reads a few fields.
Field names: `sglang.srt.model_executor.model_runner` and `sglang.srt.configs.model_config` of 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from backends.contract import Batch, EngineContext, window_left

DEVICE = "cuda"


@dataclass
class ModelConfig:
    """A decoder of one kind of attention. Lengths in tokens."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    context_len: int
    attention_arch: Any
    soft_cap: float | None
    is_multimodal: bool = False
    is_encoder_decoder: bool = False
    is_local_attention_model: bool = False
    hf_config: Any = field(default_factory=lambda: SimpleNamespace(architectures=["LlamaForCausalLM"]))

    @property
    def hf_text_config(self) -> Any:
        return SimpleNamespace(
            num_attention_heads=self.num_attention_heads, attn_logit_softcapping=self.soft_cap
        )

    def get_num_kv_heads(self, *parallel_sizes: int) -> int:
        """KV heads of one rank; there is one."""
        assert all(size == 1 for size in parallel_sizes)
        return self.num_key_value_heads

    def get_max_num_attention_heads(self) -> int:
        return self.num_attention_heads


class ModelRunner:
    """The fields of SGLang's model runner that its attention backends read.

    Args:
        sg: SGLang's modules, see `backends.engines.sglang.Modules`.
        attention_backend: SGLang's name of the backend, for the published server arguments.
        max_requests: rows of the request pool, which bound the captured batch sizes.
    """

    def __init__(self, sg: Any, engine: EngineContext, attention_backend: str, max_requests: int) -> None:
        windows = {window for window in engine.windows if window is not None}
        self.device = DEVICE
        self.gpu_id = 0
        self.dtype, self.kv_cache_dtype = engine.dtype, engine.kv_dtype
        self.kv_cache_dtype_str = "auto"
        self.page_size = engine.page_size
        self.is_draft_worker = False
        self.spec_algorithm = None
        self.prefill_attention_backend_str = self.decode_attention_backend_str = attention_backend
        self.sliding_window_size = window_left(windows.pop()) if windows else None
        self.attention_chunk_size = None
        self.server_args = sg.server_args
        self.model_config = ModelConfig(
            num_attention_heads=engine.num_qo_heads,
            num_key_value_heads=engine.num_kv_heads,
            head_dim=engine.head_dim_qk,
            v_head_dim=engine.head_dim_vo,
            context_len=engine.max_seq_len,
            attention_arch=sg.AttentionArch.MHA,
            soft_cap=engine.soft_cap,
        )
        self.req_to_token_pool = sg.ReqToTokenPool(max_requests, engine.max_seq_len, DEVICE, False)
        self.req_to_token_pool.req_to_token = engine.page_table
        self.token_to_kv_pool = sg.KVPool(engine)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            get_kvcache=lambda: self.token_to_kv_pool, page_size=engine.page_size
        )
        self.kv_index_translator = sg.KVIndexTranslator(
            req_to_token=engine.page_table,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            token_to_kv_pool=self.token_to_kv_pool,
            page_size=engine.page_size,
            device=DEVICE,
        )


def kv_pool_class(base: type[Any]) -> type[Any]:
    """SGLang's `MHATokenToKVPool`, `base`, over the pages of an `EngineContext` instead of memory of its own."""

    class KVPool(base):
        def __init__(self, engine: EngineContext) -> None:
            self._engine = engine
            super().__init__(
                (engine.num_pages - 1) * engine.page_size,  # it counts a padding page on top
                engine.page_size,
                engine.kv_dtype,
                engine.num_kv_heads,
                engine.head_dim_qk,
                engine.num_layers,
                DEVICE,
                False,
                v_head_dim=engine.head_dim_vo,
            )

        def _create_buffers_normal(self) -> None:
            pool, layers = self._engine.kv_pool, range(self._engine.num_layers)
            self.k_buffer = [pool.k_cache(layer).flatten(0, 1) for layer in layers]
            self.v_buffer = [pool.v_cache(layer).flatten(0, 1) for layer in layers]

        def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
            super().set_kv_buffer(*args, **kwargs)
            self._engine.kv_pool.stored()

    return KVPool


def attention_layers(sg: Any, engine: EngineContext) -> list[Any]:
    """A real `RadixAttention` per layer."""
    return [
        sg.RadixAttention(
            engine.num_qo_heads,
            engine.head_dim_qk,
            engine.scale,
            engine.num_kv_heads,
            layer,
            logit_cap=engine.soft_cap or 0.0,
            v_head_dim=engine.head_dim_vo,
            sliding_window_size=window_left(window),
        )
        for layer, window in enumerate(engine.windows)
    ]


def forward_batch(sg: Any, runner: ModelRunner, batch: Batch) -> Any:
    """A real `ForwardBatch` of a batch's requests, padding included, as the scheduler would make it."""
    reqs = batch.padded_reqs
    cached = [req.cached_len for req in reqs]
    extend = [req.extend_len for req in reqs]
    seq_lens_cpu = torch.tensor([req.device_len for req in reqs], dtype=torch.int64)
    made = sg.ForwardBatch(
        forward_mode=_mode(sg, batch),
        batch_size=len(reqs),
        input_ids=torch.zeros_like(batch.positions),
        req_pool_indices=_on_device([req.table_idx for req in reqs], torch.int64),
        seq_lens=seq_lens_cpu.to(DEVICE),
        out_cache_loc=batch.out_loc.to(torch.int64),
        seq_lens_sum=int(seq_lens_cpu.sum()),
        seq_lens_cpu=seq_lens_cpu,
        positions=batch.positions.to(torch.int64),
    )
    if batch.is_prefill:
        made.extend_num_tokens = sum(extend)
        made.extend_seq_lens = _on_device(extend, torch.int32)
        made.extend_prefix_lens = _on_device(cached, torch.int32)
        made.extend_start_loc = (
            torch.cumsum(made.extend_seq_lens, 0, dtype=torch.int32) - made.extend_seq_lens
        )
        made.extend_seq_lens_cpu, made.extend_prefix_lens_cpu = extend, cached
    runner.kv_index_translator.bind_own_plan(made)
    return made


def _mode(sg: Any, batch: Batch) -> Any:
    if batch.is_decode:
        return sg.ForwardMode.DECODE
    return sg.ForwardMode.MIXED if batch.kind == "mixed" else sg.ForwardMode.EXTEND


def _on_device(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)
