"""Where tensors start, where they move, and what pinned memory is.

Claims about CUDA: where there is a real GPU, they are tested on that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fakes.cuda.claims import Tensor, here, row, there

pytestmark = pytest.mark.usefixtures("cuda_device")


FACTORIES: dict[str, Callable[[Any], Tensor]] = {
    "zeros": lambda d: torch.zeros(2, device=d),
    "empty": lambda d: torch.empty((2, 3), dtype=torch.int32, device=d),
    "tensor": lambda d: torch.tensor([1, 2], dtype=torch.int32, device=d),
    "tensor of a number": lambda d: torch.tensor(1.5, device=d),
    "as_tensor of an array": lambda d: torch.as_tensor(np.arange(3), device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "arange": lambda d: torch.arange(3, dtype=torch.int32, device=d),
    "full": lambda d: torch.full((2,), 1.0, device=d),
    "randn": lambda d: torch.randn(2, device=d),
    "randint": lambda d: torch.randint(0, 3, (2,), device=d),
    "linspace": lambda d: torch.linspace(0, 1, 3, device=d),
    "tril_indices": lambda d: torch.tril_indices(2, 2, device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "new_zeros": lambda d: torch.ones(2).new_zeros(3, device=d),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
@pytest.mark.parametrize(
    "where", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)], ids=repr
)
def test_factories(make: Callable[[Any], Tensor], where: Any) -> None:
    assert there(make(where))
    assert here(make("cpu"))


def test_factories_without_a_device_stay_on_the_cpu() -> None:
    n = torch.tensor(3, device="cuda")
    assert here(
        torch.zeros(2),
        torch.arange(n),  # type: ignore[call-overload]
        torch.full((2,), n),  # type: ignore[call-overload]
        torch.tensor([n, n]),
        torch.from_numpy(np.zeros(2)),
    )
    assert there(torch.as_tensor(n))
    with pytest.warns(UserWarning, match="To copy construct from a tensor"):
        assert there(torch.tensor(n))


def test_device_context() -> None:
    with torch.device("cuda"):
        assert there(torch.zeros(2), torch.tensor([1]), torch.nn.Linear(2, 2).weight)
        assert here(torch.zeros(2, device="cpu"))
    assert here(torch.zeros(2))


def test_only_one_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="cuda:64")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2).to("cuda:64")


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "to(str)": lambda t: t.to("cuda"),
    "to(index)": lambda t: t.to(0),
    "to(device)": lambda t: t.to(torch.device("cuda")),
    "to(device, dtype)": lambda t: t.to("cuda", torch.float16, non_blocking=True),
    "to(device=, dtype=)": lambda t: t.to(device="cuda:0", dtype=torch.int32),
    "to(other)": lambda t: t.to(torch.zeros(1, device="cuda")),
    "to(copy=True)": lambda t: t.to("cuda", copy=True),
    "cuda()": lambda t: t.cuda(),
    "cuda(0)": lambda t: t.cuda(0),
    "cuda(non_blocking=True)": lambda t: t.cuda(non_blocking=True),
    "type_as": lambda t: t.type_as(torch.zeros(1, device="cuda")),
    "as_tensor": lambda t: torch.as_tensor(t, device="cuda"),
    "copy_": lambda t: torch.empty(3, device="cuda").copy_(t, non_blocking=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_copy(move: Callable[[Tensor], Tensor]) -> None:
    source = torch.arange(3.0)
    moved = move(source)
    source.add_(1)
    assert there(moved)
    assert here(source)
    assert moved.tolist() == [0, 1, 2]


MOVES_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to(device=)": lambda t: t.to(device="cpu"),
    "to(other)": lambda t: t.to(torch.zeros(1)),
    "as_tensor": lambda t: torch.as_tensor(t, device="cpu"),
    "copy_": lambda t: torch.empty(3).copy_(t),
    "view first": lambda t: t[:].cpu(),
}


@pytest.mark.parametrize("move", MOVES_BACK.values(), ids=MOVES_BACK)
def test_moves_back_copy(move: Callable[[Tensor], Tensor]) -> None:
    source = row(3)
    moved = move(source)
    source.add_(1)
    assert here(moved)
    assert there(source)
    assert moved.tolist() == [0, 1, 2]


def test_moves_to_where_it_is_return_the_tensor() -> None:
    x, h = row(), torch.zeros(2)
    assert x.to("cuda") is x
    assert x.cuda() is x
    assert x.to(torch.float32) is x
    assert h.to("cpu") is h
    assert h.cpu() is h


def test_dtype_conversions_stay() -> None:
    x = row()
    assert there(
        x.to(torch.int32), x.half(), x.float(), x.type(torch.int64), x.to(dtype=torch.bfloat16), x.bool()
    )
    assert x.type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_pinned_memory() -> None:
    pinned = (
        torch.tensor([1, 2], dtype=torch.int32, pin_memory=True),
        torch.empty(2, pin_memory=True),
        torch.zeros(2, device="cpu", pin_memory=True),
        torch.arange(2, pin_memory=True),
        torch.zeros_like(torch.ones(2), pin_memory=True),
        torch.zeros(2).pin_memory(),
    )
    for t in pinned:
        assert here(t)
        assert t.is_pinned()
        assert t[1:].is_pinned()
        assert t.pin_memory() is t
        assert not t.clone().is_pinned()
        assert there(t.to("cuda", non_blocking=True))
    assert not torch.zeros(2).is_pinned()
    assert not torch.zeros(2, pin_memory=False).is_pinned()
    assert not row().is_pinned()
    assert there(torch.zeros(2, device="cuda", pin_memory=False))


def test_device_memory_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="can be pinned"):
        torch.zeros(2, device="cuda", pin_memory=True)
    with pytest.raises(
        RuntimeError, match=re.escape("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")
    ):
        row().pin_memory()


def test_pinned_staging_buffer_is_copied() -> None:
    staging = torch.tensor([0, 2, 3], dtype=torch.int32, pin_memory=True)
    copied = staging.to(torch.device("cuda"), non_blocking=True)
    torch.cuda.synchronize()
    staging.zero_()
    assert copied.tolist() == [0, 2, 3]


def test_set_needs_one_device() -> None:
    x = row()
    assert there(torch.empty(0, device="cuda").set_(x))  # type: ignore[arg-type]
    assert here(torch.empty(0).set_(torch.zeros(2)))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor"):
        torch.empty(0).set_(x.untyped_storage())


def test_data_may_be_replaced_across_devices() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.data = p.data.cuda()
    assert there(p)
    p.data = p.data.cpu()
    assert here(p)


def test_out_of_factories() -> None:
    x, h = torch.empty(3, device="cuda"), torch.empty(3)
    assert torch.arange(3.0, out=x) is x
    assert there(x)
    assert here(torch.arange(3.0, out=h))
    assert torch.add(x, x, out=x) is x
    with pytest.raises(RuntimeError, match="out"):
        torch.zeros(3, out=h, device="cuda")


def test_random_numbers_repeat() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device="cuda")
    torch.cuda.manual_seed_all(3)
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device="cuda"))


def test_meta_stays_meta() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert row().to("meta").device.type == "meta"
    assert torch.empty_like(row(), device="meta").device.type == "meta"
