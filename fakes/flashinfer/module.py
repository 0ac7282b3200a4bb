"""`_cached_module`: the compiled module behind a wrapper. Engines call its `plan` past the wrapper's own.

It is private, so every release may change it: the number of arguments is checked as the foreign function interface
does. Source of the orders: `batch_prefill.cu`, `batch_prefill_sm90.cu` and `batch_decode.cu` of each release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fakes import cuda, releases
from fakes.flashinfer.plans import Plan, make_decode, make_prefill, read_decode_indptr, read_host
from fakes.recorder import Call

_WORKSPACES = ("float_workspace", "int_workspace", "pinned_workspace")
_FA3 = (
    *_WORKSPACES,
    "qo_indptr",
    "kv_indptr",
    "kv_lens",
    "total_num_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "enable_cuda_graph",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "window_left",
)
_FA2 = (*_FA3, "fixed_split_size", "disable_split_kv", "num_colocated_ctas")
_LATER = {"0.6.6": (), "0.7.2": ("uniform_q_len",), "0.7.4": ("uniform_q_len", "fixed_uniform_q_len")}
_CUDA_CORE = (
    *_WORKSPACES,
    "indptr",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "enable_cuda_graph",
    "window_left",
    "logits_soft_cap",
    "head_dim_qk",
    "head_dim_vo",
    "empty_q",
    "empty_kv",
)
_RECORDED = (
    "qo_indptr",
    "kv_indptr",
    "kv_lens",
    "indptr",
    "page_size",
    "num_qo_heads",
    "num_kv_heads",
    "window_left",
)


class PlanModule:
    """What `plan` compiled: `like` is the plan that it made, of which window, cap and dtypes are built in.

    Args:
        record: makes a record of a call from its arguments.
        stage: stages a plan in (pinned workspace, int workspace).
    """

    def __init__(
        self,
        like: Plan,
        record: Callable[[dict[str, Any]], Call | None],
        stage: Callable[[Plan, Call | None, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._like = like
        self._record = record
        self._stage = stage

    def plan(self, *args: Any) -> Plan:
        """A plan from host arrays, int32, without copying any array to the device.

        Raises:
            TypeError: another number of arguments than this release takes.
            RuntimeError: as the planner does.
        """
        kernel = self._like.kernel
        names = {
            "cuda_core": _CUDA_CORE,
            "fa3": _FA3,
            "fa2": (*_FA2, *_LATER[releases.selected("flashinfer")]),
        }[kernel]
        if len(args) != len(names):
            raise TypeError(
                f"Mismatched number of arguments when calling plan of the {kernel} module: expected {len(names)} "
                f"in flashinfer {releases.selected('flashinfer')}, got {len(args)}"
            )
        given = dict(zip(names, args, strict=True))
        call = self._record({name: given[name] for name in _RECORDED if name in given})
        with cuda.paused():
            plan = self._made(given)
        self._stage(plan, call, given["pinned_workspace"], given["int_workspace"])
        return plan

    def _made(self, given: dict[str, Any]) -> Plan:
        size: int = given["batch_size"]
        like = self._like
        plan = Plan(
            kernel=like.kernel,
            num_qo_heads=given["num_qo_heads"],
            num_kv_heads=given["num_kv_heads"],
            head_dim=given["head_dim_vo"],
            page_size=given["page_size"],
            qo=list(range(size + 1)),
            kv=[],
            capped=like.capped,
            windowed=like.windowed,
            window_left=given["window_left"],
            graph=given["enable_cuda_graph"],
            total_rows=given.get("total_num_rows", size),
            fixed_split=given.get("fixed_split_size", -1),
            disable_split=given.get("disable_split_kv", False),
            q_dtype=like.q_dtype,
            kv_dtype=like.kv_dtype,
            qo_last=size,
        )
        workspace = given["float_workspace"]
        if plan.kernel == "cuda_core":
            plan.kv = read_decode_indptr(given["indptr"], size)
            make_decode(plan, workspace)
            return plan
        plan.qo, plan.kv = read_host(given["qo_indptr"], given["kv_indptr"], size)
        plan.qo_last = plan.qo[-1]
        make_prefill(plan, workspace, cuda.host(given["kv_lens"]))
        return plan
