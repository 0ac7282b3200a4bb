"""What CUDA does and only the full device can: other threads, operators' bodies, files, C++ code, allocators.

Claims about CUDA: where there is a real GPU, they are tested on that. What both simulated devices can is tested one
folder up, on both.
"""

from __future__ import annotations

import io
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fakes.cuda.claims import Tensor, here, row, there

pytestmark = pytest.mark.usefixtures("full_or_gpu")
_names = itertools.count()


@pytest.fixture
def library() -> Iterator[tuple[str, torch.library.Library]]:
    """An operator namespace of the test's own."""
    name = f"simulated_device_test_{next(_names)}"
    library = torch.library.Library(name, "DEF")
    yield name, library
    library._destroy()


# Where tensors are made


def test_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        made = torch.zeros(2), torch.tensor([1]), torch.nn.Linear(2, 2).weight
    finally:
        torch.set_default_device(None)
    assert there(*made)
    assert here(torch.zeros(2))


def test_device_by_number() -> None:
    assert there(torch.zeros(2, device=0), torch.zeros(2).to(0), torch.zeros(2).cuda(0))
    assert torch.device(0).type == "cuda"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device=torch.cuda.device_count())


def test_generators() -> None:
    generator = torch.Generator(device="cuda")
    assert generator.device == torch.device("cuda", 0)
    draws = []
    for _ in range(2):
        generator.manual_seed(5)
        draws.append(
            (
                torch.rand(4, device="cuda", generator=generator),
                torch.rand(4, device="cuda", generator=generator),
            )
        )
    assert there(*draws[0])
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1])
    torch.cuda.manual_seed(3)
    first = torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), second)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def test_legacy_types() -> None:
    legacy: Any = torch.cuda
    made = legacy.FloatTensor(2, 3)
    assert there(made)
    assert made.shape == (2, 3)
    assert legacy.LongTensor([4, 5]).tolist() == [4, 5]
    assert isinstance(row(), legacy.FloatTensor)
    assert not isinstance(row(), legacy.HalfTensor)
    assert not isinstance(torch.zeros(1), legacy.FloatTensor)
    assert row().type() == "torch.cuda.FloatTensor"
    assert there(torch.zeros(2).type("torch.cuda.HalfTensor"))


def test_storages() -> None:
    storage = torch.UntypedStorage(16, device="cuda")
    assert storage.device == torch.device("cuda", 0)
    assert storage.is_cuda
    x = torch.empty(0, device="cuda").set_(storage)
    assert there(x)
    assert x.numel() == 4
    assert x.data_ptr() == storage.data_ptr()
    assert here(torch.empty(0).set_(torch.UntypedStorage(8)))
    copied = row(2).untyped_storage().cpu()
    assert copied.device.type == "cpu"
    assert torch.empty(0).set_(copied).tolist() == [0, 1]


def test_addresses_are_aligned_as_by_the_caching_allocator() -> None:
    kept = [torch.empty(n, device="cuda") for n in (1, 3, 100)]
    assert all(x.data_ptr() % 512 == 0 for x in kept)


def test_resize_and_set_keep_views_together() -> None:
    x = row(4)
    view = x.view(2, 2)
    x.resize_(1000)
    assert there(x)
    x[:4].fill_(7)
    assert view.tolist() == [[7, 7], [7, 7]]
    y = torch.empty(0, device="cuda").set_(x)  # type: ignore[arg-type]
    y[0] = 1
    assert view[0, 0].item() == 1
    assert there(torch.empty(3, device="cuda").set_())  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="Attempted to set the storage"):
        y.set_(torch.zeros(3).untyped_storage())


def test_out_is_resized() -> None:
    out = torch.empty(0, device="cuda")
    torch.add(row(), row(), out=out)
    assert there(out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


# Who looks at it


def test_other_threads() -> None:
    x, seen = row(), []

    def work() -> None:
        try:
            seen.append((there(x, x + 1, torch.zeros(2, device="cuda")), torch.cuda.is_available()))
        except Exception as error:  # noqa: BLE001
            seen.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(True, True)] * 4


def test_torch_function_switched_off() -> None:
    x = row()
    with torch._C.DisableTorchFunction():
        assert there(x, x + 1, x[1:])


def test_bodies_of_custom_operators() -> None:
    seen: list[bool] = []

    @torch.library.custom_op(f"simulated_device_test_{next(_names)}::body", mutates_args=())
    def body(x: Tensor) -> Tensor:
        seen.append(there(x, torch.ones(6, device="cuda")))
        return x + torch.ones(6, device="cuda")

    assert body(row()).tolist() == [1, 2, 3, 4, 5, 6]
    assert seen == [True]


def test_operators_registered_for_cuda_only(library: tuple[str, torch.library.Library]) -> None:
    name, defined = library
    defined.define("doubled(Tensor x, Tensor(a!) out) -> ()")
    defined.impl("doubled", lambda x, out: (out.copy_(x * 2), None)[1], "CUDA")
    out = torch.zeros(6, device="cuda")
    getattr(torch.ops, name).doubled(row(), out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        getattr(torch.ops, name).doubled(torch.zeros(6), torch.zeros(6))


def test_operators_registered_for_cpu_only_are_not_run(library: tuple[str, torch.library.Library]) -> None:
    name, defined = library
    defined.define("same(Tensor x) -> Tensor")
    defined.impl("same", lambda x: x.clone(), "CPU")
    assert here(getattr(torch.ops, name).same(torch.zeros(2)))
    with pytest.raises(NotImplementedError, match="'CUDA' backend"):
        getattr(torch.ops, name).same(row())


def test_composite_operators(library: tuple[str, torch.library.Library]) -> None:
    name, defined = library
    defined.define("doubled(Tensor x) -> Tensor")
    defined.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    assert there(getattr(torch.ops, name).doubled(row()))
    assert there(torch.ops.aten.add.Tensor(row(), row()))


def test_torchscript() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):

        @torch.jit.script
        def scripted(x: Tensor) -> Tensor:
            return x * 2 + torch.ones(6, device="cuda")

    assert there(scripted(row()))


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = row()
        y = x[1:] + 1
        x[1:3].add_(1)
    assert there(x, y)
    assert x.tolist() == [0, 2, 3, 3, 4, 5]
    with pytest.raises(RuntimeError, match="nference tensor"):
        x.add_(1)


# Where tensors go


def test_files_and_pickles() -> None:
    file = io.BytesIO()
    torch.save({"x": row(), "h": torch.zeros(2)}, file)
    for where, on_device in ((None, True), ("cpu", False), ("cuda", True)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["x"].tolist() == row().tolist()
        assert there(loaded["x"]) if on_device else here(loaded["x"])
        assert there(loaded["h"]) if where == "cuda" else here(loaded["h"])
    again = pickle.loads(pickle.dumps(row()))
    assert there(again)
    assert torch.equal(again, row())


def test_dlpack_says_cuda() -> None:
    assert row().__dlpack_device__()[0] == 2  # kDLCUDA
    assert torch.zeros(1).__dlpack_device__()[0] == 1


def test_numpy_is_refused() -> None:
    for leave in (lambda: row().numpy(), lambda: np.asarray(row())):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            leave()
    assert row().numpy(force=True).tolist() == [0, 1, 2, 3, 4, 5]


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    x = torch.arange(12.0, device="cuda").view(2, 3, 2)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    assert there(packed.data)
    assert here(packed.batch_sizes)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert there(padded)
    assert here(lengths)


# What is computed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention(dtype: torch.dtype) -> None:
    q, k, v = (
        torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)
    )
    got = F.scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda(), is_causal=True)
    assert there(got)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=2e-2, atol=2e-2)


def test_lazy_conjugates_and_negatives() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    on_device = x.cuda()
    assert torch.equal(on_device.conj().cpu(), x.conj())
    assert torch.equal((on_device.conj() * 2).cpu(), x.conj() * 2)
    assert torch.equal(on_device.conj().imag.cpu(), x.conj().imag)
    assert torch.equal(
        torch.view_as_real(on_device.conj().resolve_conj()).cpu(), torch.view_as_real(x.conj().resolve_conj())
    )
    signal = torch.arange(8.0)
    torch.testing.assert_close(torch.fft.ifft(torch.fft.fft(signal.cuda())).real.cpu(), signal)


def test_float8() -> None:
    x = torch.randn(4, 4, device="cuda", dtype=torch.bfloat16)
    as_fp8 = x.to(torch.float8_e4m3fn)
    assert there(as_fp8, as_fp8.to(torch.bfloat16), as_fp8.view(torch.uint8))


def test_lists_of_tensors() -> None:
    x = row()
    assert there(*torch.ops.aten._foreach_add.Scalar([x, x], 1))
    torch.ops.aten._foreach_mul_.Scalar([x], 2.0)
    assert x.tolist() == [0, 2, 4, 6, 8, 10]


def test_meta_tensors_are_left_alone() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert row().to("meta").device.type == "meta"


def test_streams_of_the_accelerator_interface() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() >= 1


def test_attention_forms() -> None:
    """With masks, a scale, gradients, grouped heads: whichever way it is computed."""
    q, k = (torch.randn(1, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    forms: list[Any] = [{"attn_mask": mask}, {"attn_mask": mask.float()}, {"scale": 0.3}, {"is_causal": True}]
    for given in forms:
        on_device: Any = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in given.items()}
        got = F.scaled_dot_product_attention(q.cuda(), k.cuda(), k.cuda(), **on_device)
        wanted: Any = F.scaled_dot_product_attention(q, k, k, **given)
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3)
    got = F.scaled_dot_product_attention(q.cuda().requires_grad_(), k.cuda(), k.cuda())
    assert got.requires_grad
    grouped = F.scaled_dot_product_attention(q.cuda(), k[:, :2].cuda(), k[:, :2].cuda(), enable_gqa=True)
    wanted = F.scaled_dot_product_attention(q, k[:, :2], k[:, :2], enable_gqa=True)
    torch.testing.assert_close(grouped.cpu(), wanted, rtol=1e-3, atol=1e-3)
