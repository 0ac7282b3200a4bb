"""What the batch wrappers share: workspaces, what a plan remembers, and one launch per `run`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from fakes import cuda, recorder, releases
from fakes.flashinfer import rules, staging
from fakes.flashinfer.module import PlanModule
from fakes.flashinfer.plans import Plan
from fakes.modes import illegal_access
from fakes.recorder import Call, TensorRecord

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = "flashinfer"
INT_WORKSPACE_BYTES = 8 * 1024 * 1024

_owners = itertools.count(1)


class Until:
    """A method that a later release no longer has; there it is an AttributeError."""

    def __init__(self, release: str, function: Callable[..., Any]) -> None:
        self.release = release
        self.function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if releases.at_least(LIBRARY, self.release):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.function.__name__!r}")
        return self.function if instance is None else self.function.__get__(instance, owner)


def later_lse(function: Callable[P, R]) -> Callable[P, R]:
    """From 0.7.2 on, prefill `run` also takes `lse_base` ("log2", "ln") and `lse_layout` ("NH", "HN")."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "lse_base" not in kwargs and "lse_layout" not in kwargs:
            return function(*args, **kwargs)
        if not releases.at_least(LIBRARY, "0.7.2"):
            return function(*args, **kwargs)  # Python's own TypeError
        base, layout = kwargs.pop("lse_base", "log2"), kwargs.pop("lse_layout", "NH")
        if base not in ("log2", "ln") or layout not in ("NH", "HN"):
            raise ValueError(f"lse_base {base!r} must be log2 or ln, lse_layout {layout!r} NH or HN")
        buffer = kwargs.pop("lse", None) if layout == "HN" else None
        result: Any = function(*args, **kwargs)
        if not isinstance(result, tuple):
            return result
        return result[0], _finish_lse(result[1], base, layout, buffer)  # pyright: ignore[reportReturnType]

    return run


@cuda.kernel
def _finish_lse(lse: torch.Tensor, base: Any, layout: Any, buffer: Any) -> torch.Tensor:
    plain = cuda.host(lse)
    record = recorder.current()
    exact = record.exact_of(plain) if record is not None else None
    values = exact if exact is not None else plain.to(torch.float64).numpy()
    if base == "ln":
        values = values * np.log(2.0)
    values = np.ascontiguousarray(values.T if layout == "HN" else values)
    target = buffer if buffer is not None else plain if layout == "NH" else torch.empty(values.shape)
    cuda.host(target).copy_(torch.from_numpy(values))
    if record is not None:
        record.keep_exact(cuda.host(target), values)
    return target


class Wrapper:
    """Base of the batch wrappers. Attributes with an underscore are those that engines read."""

    _name: str
    _plan_info: Plan | None
    _backend: Any
    _kv_layout: str
    _use_cuda_graph: bool
    _jit_module: None
    _replans = True
    """Whether `_cached_module.plan` is computed."""

    def _start(self, workspace: torch.Tensor, kv_layout: str, backend: str, use_cuda_graph: bool) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        self._owner = next(_owners)
        self._kv_layout = kv_layout
        self._float_workspace_buffer = workspace
        self.device = workspace.device
        with cuda.paused():
            self._int_workspace_buffer = cuda.adopt(torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8))
        self._pin_memory_int_workspace_buffer = _pinned(INT_WORKSPACE_BYTES)
        self._use_cuda_graph = use_cuda_graph
        self._requested_backend = self._backend = backend
        self._jit_module = None
        self._plan_info = None
        self._cached_module: PlanModule | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def _held_plan(self) -> torch.Tensor:
        """What the fakes' kernels read of the int workspace: a few bytes, so that a capture has little to restore."""
        with cuda.paused():
            return self._int_workspace_buffer[:8]

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = _pinned(int_workspace_buffer.numel())

    def _record(
        self, method: str, op: Any, arguments: dict[str, Any], plan: Plan | None = None
    ) -> Call | None:
        return _record(f"{self._name}.{method}" if method else self._name, self._owner, op, arguments, plan)

    def _keep_plan(self, plan: Plan, call: Call | None) -> None:
        """Stage the plan: what `run` finds in the int workspace decides whether the plan is still there."""
        self._plan_info = plan
        self._stage(plan, call, self._pin_memory_int_workspace_buffer, self._int_workspace_buffer)
        if self._replans:
            # the module knows no wrapper: both would live until cycles are collected, and the workspace with them
            record = functools.partial(_record, f"{self._name}._cached_module.plan", self._owner, "plan")
            self._cached_module = PlanModule(plan, record, self._stage)

    @staticmethod
    def _stage(plan: Plan, call: Call | None, pinned: torch.Tensor, workspace: torch.Tensor) -> None:
        if call is not None:
            plan.call, plan.at = call.index, call.at
        if cuda.current() is not None and torch.cuda.is_current_stream_capturing():  # a node of the graph
            _token(pinned)[0] = plan.token
            workspace[:8].copy_(pinned[:8], non_blocking=True)
            return
        plan.staged = staging.stage(pinned)
        with cuda.paused():
            _token(workspace)[0] = plan.token

    def _check_order(self, plan: Plan, q: torch.Tensor, num_kv_heads: int, page_size: int) -> None:
        """Findings about a run: a plan of an earlier batch, other rows, heads or pages than planned."""
        record = rules.strict()
        if record is None:
            return
        step = getattr(record.at, "batch", record.at)
        planned = getattr(plan.at, "batch", plan.at)
        rows, heads = q.shape[0], q.shape[1]
        if plan.warned == (step, rows, heads):
            return
        plan.warned = (step, rows, heads)
        if plan.call is not None and step != planned:
            rules.order(
                record,
                "fi.stale-plan",
                "plan",
                f"{self._name}.run executes the plan of batch {planned} in batch {step}: lengths and "
                "pages are old",
            )
        if rows != plan.qo_last:
            rules.order(
                record,
                "fi.q-rows",
                "q",
                f"q has {rows} rows, the plan was made for {plan.qo_last} (qo_indptr[-1])",
            )
        if (heads, num_kv_heads) != (plan.num_qo_heads, plan.num_kv_heads):
            rules.order(
                record,
                "fi.planned-heads",
                "num_qo_heads",
                f"plan was told {plan.num_qo_heads} query and {plan.num_kv_heads} KV heads, q and the "
                f"cache have {heads} and {num_kv_heads}: work is cut for the planned ones",
            )
        if page_size != plan.page_size:
            rules.order(
                record,
                "fi.planned-page-size",
                "page_size",
                f"plan was told pages of {plan.page_size}, the cache has pages of {page_size}: the "
                "cache's shape counts",
            )


def _record(
    name: str, owner: int, op: Any, arguments: dict[str, Any], plan: Plan | None = None
) -> Call | None:
    record = recorder.current()
    if record is None:
        return None
    with cuda.paused():
        return record.call(LIBRARY, name, op, owner, arguments, None if plan is None else plan.call)


def plan_in(int_workspace: torch.Tensor, launched: Plan) -> Plan | None:
    """The plan that a kernel finds when it runs: the one it was launched with, or a later one that a captured kernel
    follows; None if another wrapper's lies there."""
    return launched.held_as(int(_token(int_workspace)[0]))


def report_overwritten() -> None:
    record = rules.strict()
    if record is not None:
        rules.order(
            record,
            "fi.plan-overwritten",
            "int_workspace_buffer",
            "the int workspace no longer holds the plan that this run was launched with: a wrapper that shares it "
            "planned since, or its own did after the run was captured outside of graph mode",
        )


def _token(buffer: torch.Tensor) -> np.ndarray:
    return cuda.host(buffer).numpy()[:8].view(np.int64)


def _pinned(size: int) -> torch.Tensor:
    if cuda.current() is None:
        return torch.empty(size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def refuse_uncomputed(**arguments: Any) -> None:
    """Arguments whose meaning the fake does not compute, with their neutral value left out by the caller.

    Raises:
        NotImplementedError: the first that is given.
    """
    for name, given in arguments.items():
        if given is not None and given is not False:
            raise NotImplementedError(f"the fake of flashinfer does not compute {name}={given!r}")


def check_backend(backend: str) -> None:
    if backend not in ("auto", "fa2", "fa3"):
        raise NotImplementedError(
            f"the fake of flashinfer does not compute backend={backend!r}; it computes auto, fa2, fa3"
        )


def resolve_backend(
    requested: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    custom_mask: bool,
    max_q_len: int | None = None,
) -> Any:
    """The prefill kernel that "auto" stands for on an H200: fa3 where it can.

    fa3 has no custom mask and no fp8 KV beside a 16-bit q; 0.7.4 leaves paged batches of at most 64
    rows a request (`max_q_len`) to fa2.

    Raises:
        NotImplementedError: fp8 q, or fa3 with fp8 KV.
    """
    fp8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    if q_dtype in fp8:
        raise NotImplementedError(f"the fake of flashinfer does not compute q_data_type={q_dtype}")
    if requested == "fa3" and kv_dtype in fp8:
        raise NotImplementedError(
            f"the fake of flashinfer does not compute kv_data_type={kv_dtype} with backend='fa3'"
        )
    if requested != "auto":
        return requested
    if custom_mask or kv_dtype in fp8:
        return "fa2"
    short = max_q_len is not None and max_q_len <= 64
    return "fa2" if short and releases.at_least(LIBRARY, "0.7.4") else "fa3"


def check_positions(pos_encoding_mode: str) -> None:
    if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}")
    if pos_encoding_mode != "NONE":
        raise NotImplementedError(
            f"the fake of flashinfer does not compute pos_encoding_mode={pos_encoding_mode!r}"
        )


def dtype_of(given: torch.dtype | str) -> torch.dtype:
    if isinstance(given, str):
        return getattr(torch, given)
    if isinstance(given, torch.dtype):
        return given
    raise TypeError(f"dtype must be a string or torch.dtype, got {type(given)}")


def unpack_cache(cache: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as 4-D tensors, from a tuple of them or one tensor that stacks them in dimension 1."""
    if isinstance(cache, tuple):
        k, v = cache
        return _with_pages(k, layout, 4), _with_pages(v, layout, 4)
    if torch.is_tensor(cache):
        stacked = _with_pages(cache, layout, 5)
        return stacked[:, 0], stacked[:, 1]
    raise KeyError(
        f"Unrecognized paged_kv_cache type {type(cache)}, expect a single tensor or a tuple of tensor."
    )


def _with_pages(x: torch.Tensor, layout: str, ndim: int) -> torch.Tensor:
    if x.ndim not in (ndim - 1, ndim):
        raise ValueError(f"x must be {ndim - 1}D or {ndim}D, got {x.ndim}D")
    if x.ndim == ndim:
        return x
    return x.unsqueeze(-3 if layout == "NHD" else -2)


def check_dtypes(q: torch.Tensor, k: torch.Tensor, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if q.dtype != q_dtype:
        raise ValueError(
            f"The dtype of q {q.dtype} does not match the q_data_type {q_dtype} specified in plan function."
        )
    if k.dtype != kv_dtype:
        raise ValueError(
            f"The dtype of k {k.dtype} does not match the kv_data_type {kv_dtype} specified in plan function."
        )


def check_buffer(
    x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor, name: str
) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"Invalid shape of {name}: expected {torch.Size(shape)}, got {x.shape}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")
    if cuda.on_device(x) != cuda.on_device(like):
        raise ValueError(f"Invalid device of {name}: expected {like.device}, got {x.device}")


def check_on_device(**tensors: torch.Tensor) -> None:
    """Kernels take addresses: host memory is not theirs to read."""
    for name, tensor in tensors.items():
        if not cuda.on_device(tensor):
            raise illegal_access(f"{name} is on the CPU")


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output nobody has written yet. Call it under `cuda.paused()`."""
    return cuda.adopt(torch.full(shape, float("nan"), dtype=dtype))


def cache_record(cache: Any) -> Any:
    """A cache argument as the record keeps it: a tuple's tensors one by one."""
    return tuple(TensorRecord.of(t) for t in cache) if isinstance(cache, tuple) else cache
