"""Asks a kernel-level adapter: one call of one entry point per layer, with metadata that is right by construction."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch

from backends.contract import Attention, KernelCall
from cases.bits import same_bits
from cases.tensors import StepTensors
from conformance.engine import EngineRun, bring_back, fetched_pool, fused, lasting, receive
from conformance.execution import Execution, LayerRun, Mark, StepRun
from conformance.question import Answer
from fakes.recorder import resumed
from reference import AttentionState, exact_tolerance, paged_attention, visible
from reference.merge import from_base, merge_all, to_base

__all__ = ["KernelRun"]


class KernelRun(EngineRun):
    """One kernel-level adapter on one case. The pool holds every key; nothing may be written."""

    def _step(self, execution: Execution, backend: Any, index: int) -> None:
        tensors = self.tensors.steps[index]
        run = StepRun()
        execution.steps.append(run)
        self.pool.fill(index, nan=execution.nan)
        calls = [
            self._call(execution, tensors, index, layer) for layer in range(self.question.case.num_layers)
        ]
        given = [t for c in calls for t in (c.q, c.k, c.v, *chain.from_iterable(c.states))]
        self.recorder.lasting = lasting(self.pool, *given)
        kept = [(c.q.clone(), c.k.clone(), c.v.clone()) for c in calls] if execution.is_first else []
        for layer, call in enumerate(calls):
            answer: object = None
            with execution.catching(index, layer):
                answer = self.attend(backend, call, Mark(execution.first_batch + index, layer))
            if execution.failure:
                break
            handed = LayerRun(call.q, call.k, call.v)
            if isinstance(answer, Attention):
                handed.out, handed.lse = answer.out, answer.lse
            else:
                handed.out = answer
            receive(execution, handed)
            run.layers.append(handed)
        bring_back(execution, self.machine, index)
        if not execution.is_first or execution.failure:
            return
        for layer, (call, then) in enumerate(zip(calls, kept, strict=True)):
            for name, now, before in zip(("q", "k", "v"), (call.q, call.k, call.v), then, strict=True):
                if not same_bits(now, before):
                    run.changed.append(f"{name} of layer {layer}")
        run.pool = fetched_pool(self.pool, self.machine)

    def attend(self, backend: Any, call: KernelCall, mark: Mark) -> object:
        """Have the adapter make one call; whatever it returns."""
        self.recorder.at = mark
        with self.machine.running(), resumed(self.recorder):
            return backend.attend(call)

    def _call(self, execution: Execution, tensors: StepTensors, index: int, layer: int) -> KernelCall:
        case, step, adopt = self.question.case, tensors.step, self.machine.adopt
        q, k, v = (
            tensors.q[layer : layer + 1],
            tensors.k_all[layer : layer + 1],
            tensors.v_all[layer : layer + 1],
        )
        if case.strided:
            q = fused(adopt, q, q)[0]
            k, v = fused(adopt, k, v) if not case.stored_as_fp8 else (adopt(k.clone()), adopt(v.clone()))
        else:
            q, k, v = adopt(q.clone()), adopt(k.clone()), adopt(v.clone())
        states = self._states(execution, tensors, index, layer) if self.spec.capabilities.merges else []
        return KernelCall(
            q=q[0],
            k_cache=self.pool.k_cache(layer),
            v_cache=self.pool.v_cache(layer),
            k=k[0],
            v=v[0],
            states=[(adopt(out), adopt(lse)) for out, lse in states],
            qo_lens=list(step.qo_lens),
            kv_lens=list(step.kv_lens),
            pages=[[int(page) for page in pages] for pages in tensors.placed.pages],
            causal=case.mask.causal,
            window=case.mask.window,
            soft_cap=case.mask.soft_cap,
            custom_mask=None if tensors.custom is None else [adopt(mask.clone()) for mask in tensors.custom],
            scale=case.scale,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
        )

    def _states(
        self, execution: Execution, tensors: StepTensors, index: int, layer: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Partial attention over disjoint keys, rounded as a kernel leaves it; the answer is their exact merge."""
        case, step = self.question.case, tensors.step
        rng = np.random.default_rng((case.seed, index, layer))
        parts = 2 + int(rng.integers(0, 2))
        seen: list[list[torch.Tensor]] = [[] for _ in range(parts)]
        for i, r in enumerate(step.requests):
            custom = None if tensors.custom is None else tensors.custom[i]
            allowed = visible(r.qo_len, r.kv_len, case.mask, custom)
            owner = torch.as_tensor(np.sort(rng.integers(0, parts, r.kv_len)))
            for part in range(parts):
                seen[part].append(allowed & (owner == part))
        base = self.spec.capabilities.lse or "e"
        rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in range(parts):
            state = paged_attention(
                tensors.q[layer],
                tensors.k_all[layer],
                tensors.v_all[layer],
                slots=torch.arange(tensors.k_all.shape[1]),
                qo_lens=step.qo_lens,
                kv_lens=step.kv_lens,
                mask=case.mask,
                scale=case.scale,
                custom=tuple(seen[part]),
                k_scale=case.k_scale,
                v_scale=case.v_scale,
            )
            rounded.append(
                (state.out.to(tensors.q.dtype).contiguous(), to_base(state.lse, base).float().contiguous())
            )
        exact = merge_all(
            [AttentionState(out.double(), from_base(lse.double(), base)) for out, lse in rounded]
        )
        whole = self.question.answer(index, layer).state
        exact = exact._replace(max_score=whole.max_score, max_v=whole.max_v)
        execution.answers[index, layer] = Answer(exact, exact_tolerance(whole.max_score, whole.max_v))
        return rounded
