"""Faults that show in numbers alone, in the torch backend: masks, groups, scales, strides, results that wobble."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from typing import Any

import torch

from conformance.mutants.mutant import mutant


def _attends(cls: type[Any], attend: Any) -> type[Any]:
    """A subclass that attends by `attend(self, q, k, v)`, float32 q `[qo_len, heads, dim]`."""

    class Attends(cls):
        def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = attend(self, *(x.squeeze(0).transpose(0, 1) for x in (q, k, v)))
            return rows.transpose(0, 1).unsqueeze(0)

    return Attends


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out.transpose(0, 1)


def _causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(q), len(k), dtype=torch.bool).tril_(len(k) - len(q))


@mutant(
    "causal_top_left",
    base="torch",
    check="values",
    why="the causal mask is aligned top left",
    issue="mutant bank",
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril_()
        return _sdpa(q, k, v, seen, self.engine.scale)

    return _attends(cls, attend)


@mutant(
    "finite_mask",
    base="torch",
    check="values",
    why="hidden scores become -1000, which is above some that are seen",
    issue="flashinfer#4450",
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("rhd,khd->hrk", q, k) * self.engine.scale
        weights = scores.masked_fill(~_causal(q, k), -1000.0).softmax(dim=-1)
        return torch.einsum("hrk,khd->rhd", weights, v)

    return _attends(cls, attend)


@mutant(
    "gqa_interleaved",
    base="torch",
    check="values",
    why="query head h reads KV head h % num_kv_heads",
    issue="seed 000",
)
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return _sdpa(q, k.repeat(1, group, 1), v.repeat(1, group, 1), _causal(q, k), self.engine.scale)

    return _attends(cls, attend)


@mutant(
    "group_div_shift",
    base="torch",
    check="values",
    why="the KV head is h >> log2(group rounded up to a power of two)",
    issue="flashinfer#1148",
)
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        head = torch.arange(q.shape[1]) >> (group - 1).bit_length()
        return _sdpa(q, k[:, head], v[:, head], _causal(q, k), self.engine.scale)

    return _attends(cls, attend)


@mutant("scale_forgotten", base="torch", check="values", why="scores are not scaled", issue="issue 2")
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        return _sdpa(q, k, v, _causal(q, k), 1.0)

    return _attends(cls, attend)


@mutant("scale_twice", base="torch", check="values", why="scores are scaled twice", issue="issue 2")
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        return _sdpa(q, k, v, _causal(q, k), self.engine.scale**2)

    return _attends(cls, attend)


@mutant(
    "assume_contiguous_q",
    base="torch",
    check="values",
    why="q is read as if it were contiguous",
    issue="flashinfer#1865",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class Contiguous(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            packed = (q.shape[1] * q.shape[2], q.shape[2], 1)
            return super().forward(q.as_strided(q.shape, packed), k, v, layer_id, batch)

    return Contiguous


@mutant(
    "split_from_bound",
    base="torch",
    check="relations",
    why="the keys are summed in an order that depends on the batch, while bit_equal is declared",
    issue="flashinfer#4647",
    requests=2,
    tokens=8,
    declares={"bit_equal": True},
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    def attend(self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        seen = _causal(q, k)
        if self.batch_size > 1:
            k, v, seen = k.flip(0), v.flip(0), seen.flip(1)
        return _sdpa(q, k, v, seen, self.engine.scale)

    class Splits(_attends(cls, attend)):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            self.batch_size = len(batch.padded_reqs)

    return Splits


@mutant(
    "last_bit_flickers",
    base="torch",
    check="determinism",
    why="the last bit of a result differs from call to call",
    issue="Dao#1897",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class Flickers(cls):
        calls = 0

        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            out = super().forward(q, k, v, layer_id, batch)
            self.calls += 1
            if self.calls % 2 and self.calls > self.engine.num_layers:
                out = torch.nextafter(out.float(), torch.tensor(torch.inf)).to(out.dtype)
                out.view(-1)[0] = torch.nextafter(out.view(-1)[0], torch.tensor(torch.inf, dtype=out.dtype))
            return out

    return Flickers


@mutant(
    "scales_q_in_place",
    base="torch",
    check="inputs",
    why="q is scaled in place after the result was computed",
    issue="Dao#772",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class InPlace(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            out = super().forward(q, k, v, layer_id, batch)
            q.add_(1.0)
            return out

    return InPlace


@mutant(
    "append_wrong_row",
    base="torch",
    check="pool",
    why="K and V are stored a second time, in a slot that nobody owns",
    issue="Dao#772",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class StoresTwice(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            out = super().forward(q, k, v, layer_id, batch)
            owned = {
                int(slot)
                for r in batch.reqs
                for slot in self.page_table[r.table_idx, : r.device_len].tolist()
            }
            free = next(
                slot for slot in range(self.engine.num_pages * self.engine.page_size) if slot not in owned
            )
            self.kv_pool.store_kv(k[:1], v[:1], torch.tensor([free], dtype=torch.int32), layer_id)
            return out

    return StoresTwice


@mutant(
    "answers_what_it_must_refuse",
    base="torch",
    check="refusals",
    why="a window that is not declared is ignored instead of refused",
    issue="sglang#33915",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class NeverRefuses(cls):
        def __init__(self, engine: Any) -> None:
            from dataclasses import replace

            plain = replace(engine, windows=(None,) * engine.num_layers, soft_cap=None)
            super().__init__(plain)

    return NeverRefuses


@mutant(
    "pv_includes_tail",
    base="torch",
    check="poison",
    why="the whole last page is read and masked by weight 0: 0 times NaN is NaN",
    issue="Dao#1745",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    class WholePages(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            out = super().forward(q, k, v, layer_id, batch)
            size = self.engine.page_size
            v_slots = self.kv_pool.v_cache(layer_id).flatten(0, 1)
            row = 0
            for r in batch.padded_reqs:
                last = int(self.page_table[r.table_idx, r.device_len - 1])
                page = v_slots[last // size * size : (last // size + 1) * size]
                out[row : row + r.extend_len] += 0.0 * page.float().sum().to(out.dtype)
                row += r.extend_len
            return out

    return WholePages


@mutant(
    "one_token_fails",
    base="torch",
    check="smoke",
    why="a batch of a single token is not handled",
    tokens=1,
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class NeedsTwo(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            if q.shape[0] == 1 and batch.reqs[0].device_len == 1:
                raise IndexError("index 1 is out of bounds for dimension 0 with size 1")
            return super().forward(q, k, v, layer_id, batch)

    return NeedsTwo
