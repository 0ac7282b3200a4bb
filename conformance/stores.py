"""Where a library's own kernel stores new tokens, by the addresses it writes to, against where they must go."""

from __future__ import annotations

import numpy as np
import torch

from cases.model import Case
from cases.tensors import StepTensors
from conformance.causes import claim
from conformance.decode import OUTSIDE, pool_slots, shares
from conformance.fields import WrongField
from fakes.recorder import Call, TensorRecord

_ARRAYS = ("batch_indices", "positions", "kv_indptr", "kv_indices")


def stored_slots(case: Case, call: Call, pool: torch.Tensor) -> np.ndarray | None:
    """The slot of a layer's pool (of keys) that each token of a call was put to, `OUTSIDE` of it elsewhere. None: the
    call stored nothing, or into other memory."""
    stored = call.stored
    if stored is None or not shares(stored.k, pool):
        return None
    return pool_slots(case, (stored.layout, stored.page_size), stored.k, pool, stored.slots)


def misplaced(case: Case, tensors: StepTensors, call: Call, pool: torch.Tensor) -> list[WrongField]:
    """What sends a step's tokens elsewhere, at the first that it does; empty where all go where they must.

    A call of other tokens than the step's, or in another order, is not judged: `pool` sees what comes of it.
    """
    slots, want = stored_slots(case, call, pool), tensors.out_loc.numpy()
    if slots is None or len(slots) != len(want) or np.array_equal(np.sort(slots), np.sort(want)):
        return []
    token = int(np.flatnonzero(slots != want)[0])
    request, position = int(tensors.rows.request[token]), int(tensors.rows.position[token])
    array = None
    if call.stored is not None and call.stored.k.data_ptr() == pool.data_ptr():
        array = _wrong_array(tensors, call, call.stored.page_size, token)
    if array is not None:
        return [array]
    where = "another pool or layer" if slots[token] == OUTSIDE else f"slot {slots[token]}"
    goes = f"stores position {position} of request {request} in {where}, must be slot {want[token]}"
    return [WrongField("out_loc", request, f"{call.name} {goes}")]


def _wrong_array(tensors: StepTensors, call: Call, page_size: int, token: int) -> WrongField | None:
    """The one array that differs from the case's own; None where several do, for requests may be numbered otherwise."""
    given: dict[str, np.ndarray] = {}
    for name in _ARRAYS:
        array = call.arguments.get(name)
        if not isinstance(array, TensorRecord) or array.values is None:
            return None
        given[name] = array.values.astype(np.int64)
    indptr, ids = _page_table(tensors, page_size)
    requests, positions = tensors.rows.request, tensors.rows.position
    wanted = {"batch_indices": requests, "positions": positions, "kv_indptr": indptr, "kv_indices": ids}
    given["kv_indices"] = given["kv_indices"][: len(ids)]
    differ = [name for name in _ARRAYS if not np.array_equal(given[name], wanted[name])]
    if len(differ) != 1 or len(given[differ[0]]) != len(wanted[differ[0]]):
        return None
    (name,) = differ
    got, must, request = given[name], wanted[name], int(requests[token])
    entry = int(indptr[request] + positions[token] // page_size)
    at = {"batch_indices": token, "positions": token, "kv_indptr": request, "kv_indices": entry}[name]
    cause = ""
    if name == "positions":
        stored = np.array([r.stored_len for r in tensors.step.requests], dtype=np.int64)[requests]
        causes = [
            (": the request's stored tokens are not counted", positions - stored),
            (": the row's own number, not its position", np.arange(len(positions))),
        ]
        cause = claim(got, must, np.flatnonzero(got != must), causes)
    return WrongField(name, request, f"{name}[{at}] is {got[at]}, must be {must[at]}{cause}")


def _page_table(tensors: StepTensors, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """kv_indptr and kv_indices of the step's requests in their order."""
    pages = [slots[::page_size] // page_size for slots in tensors.placed.slots]
    return np.cumsum([0, *map(len, pages)]), np.concatenate(pages)
