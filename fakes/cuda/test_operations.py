"""What operations do with device tensors: views, results, mixing, indexing.

Claims about CUDA: where there is a real GPU, they are tested on that.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fakes import cuda
from fakes.cuda.claims import Tensor, here, row, there

pytestmark = pytest.mark.usefixtures("cuda_device")
MIXED = "Expected all tensors to be on the same device"


def test_queries() -> None:
    x = row()
    assert x.get_device() == 0
    assert torch.zeros(1).get_device() == -1
    assert x.device.type == "cuda"
    assert x.device.index == 0
    assert x.untyped_storage().device == torch.device("cuda", 0)
    assert "device='cuda:0'" in repr(x)
    assert "device='cuda:0'" in f"{x}"
    assert "device" not in repr(torch.zeros(2))
    assert x.__dlpack_device__() == (2, 0)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t[1:],
    "index": lambda t: t[0],
    "step": lambda t: t[::2],
    "None and ellipsis": lambda t: t[None, ...],
    "view": lambda t: t.view(2, 3),
    "view(dtype)": lambda t: t.view(torch.int32),
    "reshape": lambda t: t.reshape(3, 2),
    "transpose": lambda t: t.view(2, 3).t(),
    "permute": lambda t: t.view(1, 2, 3).permute(2, 0, 1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: t.expand(2, 6),
    "expand_as": lambda t: t.expand_as(torch.zeros(2, 6)),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "T": lambda t: t.view(2, 3).T,
    "as_strided": lambda t: t.as_strided((2,), (1,)),
    "narrow": lambda t: t.narrow(0, 0, 2),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "unbind": lambda t: t.view(2, 3).unbind()[1],
    "split": lambda t: t.split(2)[0],
    "chunk": lambda t: torch.chunk(t, 2)[1],
    "iteration": lambda t: next(iter(t)),
    "parameter": torch.nn.Parameter,
    "contiguous": lambda t: t.contiguous(),
    "squeeze": lambda t: t.squeeze(),
    "base of a view": lambda t: t[1:]._base,  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view: Callable[[Tensor], Tensor]) -> None:
    x = row()
    seen = view(x)
    assert there(seen)
    assert seen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert here(view(torch.arange(6.0)))


def test_writing_through_a_view() -> None:
    x = row()
    x[1:3].fill_(9)
    x.view(2, 3)[1].mul_(0)
    assert x.tolist() == [0, 9, 9, 0, 0, 0]


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda t: t + t,
    "scalar": lambda t: 2 * t - 1,
    "cpu scalar tensor": lambda t: t + torch.tensor(1.0),
    "cpu scalar first": lambda t: torch.tensor(2.0) * t,
    "in place": lambda t: t.add_(1).mul_(2),
    "augmented": lambda t: t.__iadd__(1),
    "cumsum": lambda t: torch.cumsum(t, dim=0, dtype=torch.int32),
    "cumsum_": lambda t: t.cumsum_(dim=0),
    "sum": lambda t: t.sum(),
    "max of a dimension": lambda t: tuple(t.view(2, 3).max(dim=1)),
    "topk": lambda t: tuple(torch.topk(t, 2)),
    "compare": lambda t: t > 2,
    "where": lambda t: torch.where(t > 2, t, 0.0),
    "where with a cpu scalar": lambda t: torch.where(t > 1, torch.tensor(1.0), t),
    "masked_fill": lambda t: t.masked_fill(t > 2, torch.tensor(0.0)),
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t], dim=1),
    "nested lists": lambda t: torch.stack([torch.stack([t])]),
    "foreach": lambda t: torch._foreach_add([t, t], 1),  # type: ignore[attr-defined]
    "einsum": lambda t: torch.einsum("i,j->ij", t, t),
    "matmul": lambda t: t.view(2, 3) @ t.view(3, 2),
    "softmax": lambda t: torch.softmax(t, 0),
    "layer_norm": lambda t: F.layer_norm(t, (6,)),
    "pad": lambda t: F.pad(t, (1, 0)),
    "one_hot": lambda t: F.one_hot(t.long()),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, 2),
    "nonzero": lambda t: t.nonzero(),
    "sort": lambda t: tuple(t.sort()),
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy in a dict": lambda t: copy.deepcopy({"a": t})["a"],
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 2.0),
    "new_empty": lambda t: t.new_empty(3),
    "new_zeros": lambda t: t.new_zeros((2, 2), dtype=torch.int32),
    "new_tensor": lambda t: t.new_tensor([1, 2]),
    "fft": torch.fft.rfft,
    "logsumexp": lambda t: torch.logsumexp(t, 0),
    "norm": torch.linalg.vector_norm,
    "op overload": lambda t: torch.ops.aten.add.Tensor(t, t),
    "bfloat16 and fp8": lambda t: t.bfloat16().to(torch.float8_e4m3fn).to(torch.float32),
    "sdpa": lambda t: F.scaled_dot_product_attention(
        t.view(1, 1, 2, 3), t.view(1, 1, 2, 3), t.view(1, 1, 2, 3), is_causal=True
    ),
}


@pytest.mark.parametrize("compute", RESULTS.values(), ids=RESULTS)
def test_results_are_on_the_device(compute: Callable[[Tensor], Any]) -> None:
    on_device, on_host = compute(row()), compute(torch.arange(6.0))
    pairs = zip(_several(on_device), _several(on_host), strict=True)
    for got, want in pairs:
        assert there(got)
        assert here(want)
        assert got.shape == want.shape
        assert got.dtype == want.dtype


def _several(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def test_values_are_those_of_the_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    got = F.scaled_dot_product_attention(q.cuda(), q.cuda(), q.cuda(), is_causal=True)
    assert torch.allclose(got.cpu(), want, atol=1e-5)
    assert torch.allclose(got, want.cuda(), atol=1e-5)
    with pytest.raises(RuntimeError, match=MIXED):
        torch.allclose(got, want)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_without_autograd(no_grad: Callable[[], Any]) -> None:
    with no_grad():
        x = row()
        y = x[1:] + 1
        x[1:3].add_(1)
        assert there(x, y, x.view(2, 3), x.clone())
    assert there(x, y)


def test_autograd() -> None:
    p = torch.nn.Parameter(row())
    try:
        (p * p).sum().backward()
    except cuda.NotSimulated as reason:
        pytest.skip(str(reason))  # test_process.py asks in a process of its own
    assert p.grad is not None
    assert there(p, p.grad, p.data)
    (g,) = torch.autograd.grad((p * 2).sum(), [p])
    assert there(g)


def test_modules_move() -> None:
    m = torch.nn.Linear(6, 2).to("cuda")
    assert isinstance(m.weight, torch.nn.Parameter)
    assert there(m.weight, m(row()), m.state_dict()["weight"], torch.nn.Linear(6, 2).cuda().weight)
    m.load_state_dict({"weight": torch.ones(2, 6), "bias": torch.zeros(2)})
    assert there(m.weight)
    with pytest.raises(RuntimeError, match=MIXED):
        m(torch.zeros(6))
    assert here(m.to("cpu").weight)


REFUSED_MIXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "device + cpu": lambda d, c: d + c,
    "cpu + device": lambda d, c: c + d,
    "function": torch.mul,
    "in place": lambda d, c: d.add_(c),
    "in place on the cpu": lambda d, c: c.add_(d),
    "cpu += device scalar": lambda d, c: c.add_(d[0]),
    "cpu scalar += device": lambda d, c: c[0].add_(d[0]),
    "dot": torch.dot,
    "matmul": lambda d, c: d.view(1, 6) @ c.view(6, 1),
    "maximum": torch.maximum,
    "compare": lambda d, c: d == c,
    "cat": lambda d, c: torch.cat([d, c]),
    "stack": lambda d, c: torch.stack([c, d]),
    "stack of scalars": lambda d, c: torch.stack([d[0], c[0]]),
    "out=": lambda d, c: torch.add(d, d, out=c),
    "index_select": lambda d, c: d.index_select(0, torch.tensor([0])),
    "gather": lambda d, c: d.gather(0, torch.tensor([0])),
    "scatter_": lambda d, c: d.scatter_(0, torch.tensor([0]), 1.0),
    "index_put_": lambda d, c: d.index_put_((torch.tensor([0, 1]),), c[:2]),
    "index_copy_": lambda d, c: d.index_copy_(0, torch.tensor([0, 1], device="cuda"), c[:2]),
    "index assignment": lambda d, c: d.__setitem__(torch.tensor([0, 1], device="cuda"), c[:2]),
    "index assignment by a list": lambda d, c: d.__setitem__([0, 1], c[:2]),
    "cpu index assignment": lambda d, c: c.__setitem__([0, 1], d[:2]),
    "embedding": lambda d, c: F.embedding(torch.tensor([1]), d.view(3, 2)),
    "sdpa": lambda d, c: F.scaled_dot_product_attention(
        d.view(1, 1, 2, 3), c.view(1, 1, 2, 3), c.view(1, 1, 2, 3)
    ),
    "linear": lambda d, c: F.linear(c, d.view(1, 6)),
    "foreach": lambda d, c: torch.addcmul(d, c, d),
}


@pytest.mark.parametrize("mix", REFUSED_MIXES.values(), ids=REFUSED_MIXES)
def test_mixing_is_refused(mix: Callable[[Tensor, Tensor], Any]) -> None:
    on_device, on_host = row(), torch.arange(6.0)
    with pytest.raises(RuntimeError, match=r"same device|cuda:0 and cpu|but got .* cpu|on cpu"):
        mix(on_device, on_host)
    assert on_device.tolist() == on_host.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_error_of_mixing() -> None:
    with pytest.raises(RuntimeError) as caught:
        row() + torch.zeros(6)
    wanted = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    assert str(caught.value).startswith(wanted)


def test_copies_by_operator_cross_devices() -> None:
    x, h = row(), torch.zeros(6)
    assert there(torch.ops.aten.copy_.default(x, h + 1))
    assert here(torch.ops.aten.copy_(h, x))
    assert h.tolist() == [1] * 6


def test_where_refuses_mixing() -> None:
    x, h = row(), torch.zeros(6)
    for call in (
        lambda: torch.where(x > 2, x, h),
        lambda: torch.where(h > 2, x, x),
        lambda: torch.where(h > 2, h, x),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            call()


def test_indexing_across_devices() -> None:
    x, h = row(), torch.arange(6.0)
    i, cpu_i = torch.tensor([0, 2], device="cuda"), torch.tensor([0, 2])
    assert there(x[i], x[cpu_i], x[x > 2], x[[0, 2]], x[i, None], x.index_select(0, i), x.gather(0, i))
    assert here(h[cpu_i], h[i[1]])
    assert x[cpu_i].tolist() == [0, 2]
    assert h[i[1]].item() == 2
    for call in (lambda: h[i], lambda: h[x > 2], lambda: h.__setitem__(i, 1.0)):
        with pytest.raises(
            RuntimeError,
            match=re.escape(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            ),
        ):
            call()


def test_assignment_across_devices() -> None:
    x, h = row(), torch.arange(6.0)
    x[1:3] = h[3:5]
    assert x.tolist() == [0, 3, 4, 3, 4, 5]
    h[:2] = x[1:3]
    assert h.tolist() == [3, 4, 2, 3, 4, 5]
    x[torch.tensor([0, 1])] = torch.tensor(9.0)
    x[x > 8] = 7
    x[5] = torch.tensor(1.0)
    x[torch.tensor([4], device="cuda")] = torch.ones(1, device="cuda")
    x.scatter_(0, torch.tensor([3], device="cuda"), 0.5)
    assert x.tolist() == [7, 7, 4, 0.5, 1, 1]
    assert there(x)
    assert here(h)


def test_numpy_is_refused() -> None:
    wanted = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor"
    x = row()
    for call in (x.numpy, lambda: np.asarray(x), lambda: np.add(x, 1)):
        with pytest.raises(TypeError, match=re.escape(wanted)):
            call()
    assert x.cpu().numpy()[1] == 1
    forced = x.numpy(force=True)
    x.add_(1)
    assert forced.tolist() == [0, 1, 2, 3, 4, 5]


def test_host_reads() -> None:
    x = row(3)
    assert x.tolist() == [0, 1, 2]
    assert x[1].item() == 1
    assert int(x[2]) == 2
    assert bool(x[1])
    assert float(x.sum()) == 3
    assert len(x) == 3
    assert 1.0 in x
    assert [v.item() for v in x] == [0, 1, 2]
    assert list(range(3))[torch.tensor(1, device="cuda")] == 1
    assert torch.equal(x, row(3))
