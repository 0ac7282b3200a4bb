"""What each torch function means when some of its operands are on the device.

Most functions `follow`: all operands on one device (0-dim CPU tensors may join), results there too. The
others have a rule of their own, found by name once per function. A rule takes the function, its positional
and its keyword arguments, and runs with the mode off.
"""

from __future__ import annotations

from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fakes.cuda import indexing, moving
from fakes.cuda.devices import CUDA
from fakes.cuda.interface import NotSimulated
from fakes.cuda.mixing import name_of, refuse_mixing
from fakes.cuda.places import DEVICE, TAG, is_device, place_of, put, put_all, put_new, tensors_in
from fakes.cuda.streams import Streams

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]


def untouched(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """No tensor results, or only such as live in the first operand's storage: the tag is right as it is."""
    return func(*args, **kwargs)


def follow(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Operands on one device, results there; where a device or pinned memory is named, results there."""
    if "device" in kwargs or "pin_memory" in kwargs:
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            return moving.placed(func, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    operands = tensors_in(args)
    if kwargs:
        operands += tensors_in(kwargs.values())
    if not any(map(is_device, operands)):
        return func(*args, **kwargs)
    refuse_mixing(func, args, kwargs, operands)
    try:
        out = func(*args, **kwargs)
    except NotImplementedError as error:
        explain(func, error)
    put_all(out)
    return out


def reads(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A number leaves the device: the host waits for it."""
    if is_device(args[0]):
        Streams.latest.drain(func.__name__)
    return func(*args, **kwargs)


def counts(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The result's size, or the result, depends on device values: the host waits for them."""
    operands = tensors_in(args) + tensors_in(kwargs.values())
    if any(map(is_device, operands)) and kwargs.get("output_size") is None:
        Streams.latest.drain(func.__name__)
    return follow(func, args, kwargs)


def custom(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """An operator that is not torch's own: it decides which operands may mix."""
    try:
        out = func(*args, **kwargs)
    except NotImplementedError as error:
        explain(func, error)
    if any(map(is_device, tensors_in(args) + tensors_in(kwargs.values()))):
        put_new(out, args, kwargs)
    return out


def explain(func: Callable[..., Any], error: NotImplementedError) -> NoReturn:
    """Raise the error of an operator that has no CPU kernel in words that fit; any other as it is."""
    if "Could not run" not in str(error):
        raise error
    raise NotSimulated(
        f"{name_of(func)} has no CPU kernel, and the light simulated CUDA device runs CPU kernels; an "
        'operator that is registered for CUDA only needs the full device (kind="full")'
    ) from error


def _follow_first(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Other operands give sizes or values only; they may be anywhere."""
    if kwargs.get("device") is not None or kwargs.get("pin_memory"):
        return moving.placed(func, args, kwargs)
    out = func(*args, **kwargs)
    if is_device(args[0]):
        put_all(out)
    return out


def _is_cuda(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    try:
        return getattr(args[0].untyped_storage(), TAG, None) is DEVICE
    except (NotImplementedError, RuntimeError):
        return is_device(args[0])


def _is_cpu(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    return place_of(args[0]) is not DEVICE and func(*args)


def _device(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.device:
    return CUDA if place_of(args[0]) is DEVICE else func(*args)


def _get_device(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
    return 0 if is_device(args[0]) else func(*args, **kwargs)


def _text(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> str:
    """`repr` and the like, with the device named as torch does."""
    if is_device(args[0]):
        Streams.latest.drain("printing a tensor")
    text = func(*args, **kwargs)
    if is_device(args[0]) and text.endswith(")"):
        return f"{text[:-1]}, device='cuda:0')"
    return text


def _deepcopy(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The memo among the arguments holds tensors of both sides."""
    out = func(*args, **kwargs)
    return put(out) if is_device(args[0]) else out


def _needs_host(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if not is_device(args[0]):
        return func(*args, **kwargs)
    if kwargs.get("force"):  # numpy(force=True) copies
        Streams.latest.drain(func.__name__)
        return func(args[0].detach().clone(), *args[1:], **kwargs)
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )


def dlpack(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if not is_device(args[0]):
        return func(*args, **kwargs)
    raise NotSimulated("the light simulated CUDA device cannot export device tensors through DLPack")


def _dlpack_device(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return (2, 0) if is_device(args[0]) else func(*args, **kwargs)  # 2: kDLCUDA


def _host_only_effect(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """`share_memory_`: nothing to do for device memory."""
    return args[0] if is_device(args[0]) else func(*args, **kwargs)


def record_stream(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    """Memory of the simulation is never reused while a tensor holds it."""


_GETTERS: dict[str, Rule] = {"is_cuda": _is_cuda, "is_cpu": _is_cpu, "device": _device}
_GETTERS |= dict.fromkeys(
    (
        *(
            "shape",
            "dtype",
            "layout",
            "ndim",
            "itemsize",
            "nbytes",
            "names",
            "requires_grad",
            "is_leaf",
            "grad_fn",
        ),
        *(
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "output_nr",
            "retains_grad",
            "_version",
            "_cdata",
        ),
        *("data", "_base", "T", "mT", "H", "mH", "real", "imag"),  # same storage
    ),
    untouched,
)

_RULES_BY_NAME: dict[str, Rule] = {
    "to": moving.to,
    "type_as": moving.to,
    "cuda": moving.cuda,
    "cpu": moving.cpu,
    "copy_": moving.copy_,
    "type": moving.type_,
    "pin_memory": moving.pin_memory,
    "is_pinned": moving.is_pinned,
    "tensor": moving.from_data,
    "as_tensor": moving.from_data,
    "asarray": moving.from_data,
    "__getitem__": indexing.getitem,
    "__setitem__": indexing.setitem,
    "index_put": indexing.index_put,
    "index_put_": indexing.index_put,
    "_index_put_impl_": indexing.index_put,
    "get_device": _get_device,
    "__repr__": _text,
    "__str__": _text,
    "__format__": _text,
    "__deepcopy__": _deepcopy,
    "numpy": _needs_host,
    "__array__": _needs_host,
    "__dlpack__": dlpack,
    "__dlpack_device__": _dlpack_device,
    "share_memory_": _host_only_effect,
}
_RULES_BY_NAME |= dict.fromkeys(
    (
        *(
            "arange",
            "range",
            "linspace",
            "logspace",
            "full",
            "zeros",
            "ones",
            "empty",
            "eye",
            "scalar_tensor",
        ),
        *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "empty_strided"),
    ),
    moving.factory,
)
_RULES_BY_NAME |= dict.fromkeys(
    ("new_tensor", "expand_as", "view_as", "reshape_as", "resize_as_", "sum_to_size", "new_full"),
    _follow_first,
)
_RULES_BY_NAME |= dict.fromkeys(
    (
        *(
            "dim",
            "size",
            "stride",
            "numel",
            "nelement",
            "element_size",
            "data_ptr",
            "storage_offset",
            "__len__",
        ),
        *(
            "is_contiguous",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "is_inference",
            "is_set_to",
            "is_shared",
        ),
        *("__hash__", "__reduce_ex__"),
        *("untyped_storage", "storage", "_typed_storage", "is_same_size", "result_type", "broadcast_tensors"),
        *("_has_compatible_shallow_copy_type", "_parse_to", "is_grad_enabled", "_set_grad_enabled"),
        *("requires_grad_", "retain_grad", "register_hook", "backward"),
        *(
            "view",
            "detach",
            "detach_",
            "unsqueeze",
            "squeeze",
            "transpose",
            "t",
            "permute",
            "expand",
            "narrow",
        ),
        *("select", "unbind", "split", "chunk", "as_strided", "diagonal", "movedim", "__iter__"),
        *(
            "split_with_sizes",
            "hsplit",
            "vsplit",
            "tensor_split",
            "swapaxes",
            "unflatten",
            "resize_",
            "alias",
        ),
        *("zero_", "squeeze_", "unsqueeze_", "t_", "transpose_"),
    ),
    untouched,
)

_RULES_BY_NAME |= dict.fromkeys(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "is_nonzero"), reads
)
_RULES_BY_NAME |= dict.fromkeys(
    (
        *(
            "nonzero",
            "argwhere",
            "masked_select",
            "unique",
            "unique_consecutive",
            "_unique2",
            "repeat_interleave",
        ),
        *("equal", "allclose", "__contains__", "bincount"),
    ),
    counts,
)

RULES: dict[Any, Rule] = {}
"""Function to rule, filled as functions come by."""

_LASTING = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, FunctionType)


def _is_torchs(func: Callable[..., Any]) -> bool:
    """Whether a function is torch's own."""
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, _LASTING)


def classify(func: Callable[..., Any]) -> Rule:
    """The rule of a function, remembered if it is one of torch's own."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        rule = _GETTERS.get(func.__self__.__name__, _follow_first)  # type: ignore[attr-defined]
    elif name == "__set__":
        rule = untouched if func.__self__.__name__ == "data" else follow  # type: ignore[attr-defined]
    elif isinstance(func, (OpOverload, OpOverloadPacket)):
        namespace, _, operator = str(func).partition(".")
        if namespace != "aten":
            return custom
        return moving.copy_ if operator.partition(".")[0] == "copy_" else follow
    else:
        rule = _RULES_BY_NAME.get(name, follow) if _is_torchs(func) else follow
    if _is_torchs(func):
        RULES[func] = rule
    return rule
