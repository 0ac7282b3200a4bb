"""Storing keys and values on pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fakes.contract.paged_fi import bind, ints, rule
from fakes.contract.rule import RIGHT, UNDEFINED, WRONG, Lab, Observation, refused

PAGE_SIZE, HEADS, DIM = 4, 2, 64
PAGES = 8
TABLE = {"kv_indices": [5, 2, 7, 1], "kv_indptr": [0, 2, 4], "kv_last_page_len": [3, 1]}
"""Request 0 has 7 tokens on pages 5 and 2, request 1 has 5 on pages 7 and 1."""
TOKENS = {"batch_indices": [0, 0, 0, 1, 1], "positions": [4, 5, 6, 0, 4]}
SLOTS = [(2, 0), (2, 1), (2, 2), (7, 0), (1, 0)]
"""(page, place in it) of each of these tokens."""


class _Given:
    """Sound arguments of one append, on the CPU; a probe changes some."""

    def __init__(self, layout: str = "NHD", dtype: torch.dtype = torch.float16, dim: int = DIM) -> None:
        random = torch.Generator().manual_seed(0)
        self.layout = layout
        shape = (PAGES, HEADS, PAGE_SIZE, dim) if layout == "HND" else (PAGES, PAGE_SIZE, HEADS, dim)
        self.k, self.v = (torch.zeros(shape).to(dtype) for _ in range(2))
        self.key, self.value = (
            torch.randn((len(SLOTS), HEADS, dim), generator=random).to(dtype) for _ in range(2)
        )
        self.arrays = {name: ints(values) for name, values in (TABLE | TOKENS).items()}
        self.stacked = False

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches with the tokens where they belong."""
        found = []
        for cache, rows in ((self.k, self.key), (self.v, self.value)):
            new = cache.clone()
            view = new.transpose(1, 2) if self.layout == "HND" else new
            for (page, place), row in zip(SLOTS, rows, strict=False):
                view[page, place] = row.to(cache.dtype)
            found.append(new)
        return found[0], found[1]

    def append(self, lab: Lab, host: tuple[str, ...] = ()) -> Observation:
        """Append, and compare all of both caches. `host`: arguments that stay on the CPU."""
        wanted = self.wanted()
        if self.stacked:
            cache: Any = torch.stack((self.k, self.v), dim=1).to(lab.device)
            caches = cache[:, 0], cache[:, 1]
        else:
            cache = caches = _moved(self.k, lab), _moved(self.v, lab)
        tokens = {"append_key": self.key, "append_value": self.value} | self.arrays
        moved = {name: t if name in host else _moved(t, lab) for name, t in tokens.items()}
        lab.library.append_paged_kv_cache(paged_kv_cache=cache, kv_layout=self.layout, **moved)
        return _compared(caches, wanted)


def _moved(t: torch.Tensor, lab: Lab) -> torch.Tensor:
    """On the device, strides and all."""
    if t.is_contiguous():
        return t.to(lab.device)
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(lab.device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def _compared(got: Any, wanted: Any) -> Observation:
    pairs = zip(got, wanted, strict=True)
    wrong = sum(int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
    return Observation("wrong" if wrong else "right", f"{wrong} bytes differ")


def _append(lab: Lab, change: Callable[[_Given], Any] | None, **options: Any) -> Observation:
    host = options.pop("host", ())
    given = _Given(**options)
    if change is not None:
        change(given)
    return given.append(lab, host)


def _set(name: str, values: Any) -> Callable[[_Given], Any]:
    return lambda given: given.arrays.update({name: values(given.arrays[name])})


def _strided(given: _Given) -> None:
    fused = torch.cat((given.key, given.value), dim=1)
    given.key, given.value = fused[:, :HEADS], fused[:, HEADS:]


def _last_dim(given: _Given) -> None:
    given.key = given.key.transpose(1, 2).contiguous().transpose(1, 2)


def _stacked(given: _Given) -> None:
    given.stacked = True


def _other_dtype(dtype: torch.dtype) -> Callable[[_Given], Any]:
    def change(given: _Given) -> None:
        given.key, given.value = given.key.to(dtype), given.value.to(dtype)

    return change


def _one_row_less(given: _Given) -> None:
    whole = torch.cat((given.value, torch.zeros_like(given.value)))
    given.value = whole[: len(SLOTS) - 1]


def _no_rows(given: _Given) -> None:
    given.key, given.value = given.key[:0], given.value[:0]
    given.arrays |= {"batch_indices": ints([]), "positions": ints([])}


def _other_heads(given: _Given) -> None:
    given.key = given.key[:, :1].contiguous()


def _other_strides(given: _Given) -> None:
    given.v = torch.zeros((PAGES, 2 * PAGE_SIZE, HEADS, DIM), dtype=given.v.dtype)[:, :PAGE_SIZE]


def _mla(lab: Lab, dims: tuple[int, int] = (512, 64)) -> Observation:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn((len(SLOTS), dim), generator=random).to(torch.bfloat16) for dim in dims]
    caches = [torch.zeros((PAGES, PAGE_SIZE, dim), dtype=torch.bfloat16) for dim in dims]
    wanted = [cache.clone() for cache in caches]
    for cache, tokens in zip(wanted, rows, strict=True):
        for (page, place), row in zip(SLOTS, tokens, strict=True):
            cache[page, place] = row
    got = [cache.to(lab.device) for cache in caches]
    arrays = {name: ints(values).to(lab.device) for name, values in (TABLE | TOKENS).items()}
    lab.library.append_paged_mla_kv_cache(
        rows[0].to(lab.device), rows[1].to(lab.device), ckv_cache=got[0], kpe_cache=got[1], **arrays
    )
    return _compared(got, wanted)


def _right(name: str, cause: str, change: Any = None, **options: Any) -> Any:
    return rule(f"append.{name}", cause, bind(_append, change, **options), RIGHT)


def _refused(name: str, cause: str, change: Any, fragment: str, **options: Any) -> Any:
    return rule(f"append.{name}", cause, bind(_append, change, **options), refused("RuntimeError", fragment))


RULES = (
    _right("right", "Token i goes to its position on its request's pages."),
    _right("right.HND", "The same with heads first.", layout="HND"),
    _right("right.bf16", "The same in bfloat16.", dtype=torch.bfloat16),
    _right("right.fp8", "Bytes are copied, whatever they mean.", dtype=torch.float8_e4m3fn),
    _right("right.dim256", "Four head dims are built.", dim=256),
    _right("stacked", "One tensor of both is split in dimension 1.", _stacked),
    _right("strided", "Rows of a fused projection are read by their strides.", _strided),
    *(
        _right(f"int64.{name}", "Index arrays are converted.", _set(name, lambda t: t.long()))
        for name in TABLE | TOKENS
    ),
    _right("last-page", "Nothing reads it but its length.", _set("kv_last_page_len", lambda t: t * 0 + 99)),
    rule(
        "append.dtype",
        "Keys are read as the cache's dtype, whatever they are.",
        bind(_append, _other_dtype(torch.bfloat16)),
        WRONG,
        finding="fi.append-dtype",
    ),
    rule(
        "append.dtype.fp8",
        "16-bit keys are not converted for a cache of bytes.",
        bind(_append, _other_dtype(torch.float16), dtype=torch.float8_e4m3fn),
        WRONG,
        finding="fi.append-dtype",
    ),
    rule(
        "append.beyond-its-pages",
        "A position is counted on from the request's first page id, past its last.",
        bind(_append, _set("positions", lambda t: torch.where(t == 6, 8, t))),
        WRONG,
        finding="fi.append-position",
    ),
    rule(
        "append.twice",
        "Two tokens of one place race.",
        bind(_append, _set("positions", lambda t: torch.where(t == 6, 5, t))),
        WRONG,
        finding="fi.append-twice",
    ),
    rule(
        "append.value-rows",
        "The rows of the value are not counted.",
        bind(_append, _one_row_less),
        UNDEFINED,
        finding="fi.append-rows",
    ),
    _refused("no-rows", "A grid of no blocks.", _no_rows, "failed with error: invalid argument"),
    _refused("heads", "Heads are those of the cache.", _other_heads, "num_heads (1 vs. 2)"),
    _refused("strides", "One set of strides serves both.", _other_strides, "k/v strides must be identical"),
    _refused("last-dim", "Numbers of a head lie side by side.", _last_dim, "append_keymust be contiguous"),
    _refused("dim80", "Four head dims are built.", None, "Unsupported head_dim: 80", dim=80),
    _refused(
        "kv_indptr-short",
        "One entry more than requests.",
        _set("kv_indptr", lambda t: t[:-1]),
        "batch_size + 1 (2 vs. 3)",
    ),
    _refused("positions-short", "One entry a token.", _set("positions", lambda t: t[:-1]), "nnz (4 vs. 5)"),
    *(
        _refused(
            f"host.{name}", "Kernels read device memory.", None, f"{name} must be a CUDA tensor", host=(name,)
        )
        for name in TABLE | TOKENS
    ),
    _refused(
        "host.append_key",
        "The key's device must be the others'.",
        None,
        "append_key.device().device_type (2 vs. 1)",
        host=("append_key",),
    ),
    rule(
        "append.layout",
        "There are two layouts.",
        bind(_append, None, layout="NDH"),
        refused("KeyError", "Invalid kv_layout NDH"),
    ),
    rule("append-mla", "The same for compressed keys.", _mla, RIGHT),
    rule(
        "append-mla.dims",
        "One pair of dims is built.",
        bind(_mla, dims=(256, 64)),
        refused("RuntimeError", "head_dim_ckv must be equal to 512"),
    ),
)
