"""What the oracle costs, and what torch's own float64 attention costs beside it.

`measure()` does it in a process of its own, held to one thread in every library, and returns the numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import NamedTuple

import torch

from reference.attention import paged_attention
from reference.budget import exact_tolerance
from reference.problems import Problem, make_problem

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MIXED_LENS = (1, 3, 8, 20, 9, 7, 12, 4)


class OracleCost(NamedTuple):
    """Seconds of processor time, each the least of its repeats (the small ones: the median).

    Args:
        numpy_add_s: one addition of two ten-element arrays, the yardstick of a machine at this moment.
        prefill_s: the oracle over 8 requests, 64 tokens in all, 4/2 heads of 64, float16.
        decode_s: the same with one query row a request.
        layer_s: the oracle over one layer of decode requests (64 of 4,000 tokens, 32/8 heads of 128, float16).
        sdpa_s: torch's float64 `scaled_dot_product_attention`, request by request, with the same gather and
            conversion: the faster of `enable_gqa` and of a group's heads handed over as query rows.
        sdpa_batched_s: the same with eight requests in a call, which holds eight times the float64 K and V.
        largest_difference: between the oracle's output and torch's, in units of `exact_tolerance`.
    """

    numpy_add_s: float
    prefill_s: float
    decode_s: float
    layer_s: float
    sdpa_s: float
    sdpa_batched_s: float
    largest_difference: float

    @property
    def ratio(self) -> float:
        """Oracle over torch, request by request."""
        return self.layer_s / self.sdpa_s


def measure(num_requests: int = 64, kv_len: int = 4000, repeats: int = 3) -> OracleCost:
    """Measure everything in a fresh process with one thread."""
    arguments = [str(n) for n in (num_requests, kv_len, repeats)]
    done = subprocess.run(  # noqa: S603 - our own module and three numbers
        [sys.executable, "-m", "reference.bench", *arguments],
        env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),
        capture_output=True,
        text=True,
        check=True,
    )
    return OracleCost(**json.loads(done.stdout))


def measure_here(num_requests: int, kv_len: int, repeats: int) -> OracleCost:
    """Measure in this process, which should run one thread."""
    x = torch.zeros(10).numpy()
    mixed, decode = (
        make_problem(qo_lens, MIXED_LENS, heads=(4, 2), dims=(64, 64), dtype=torch.float16)
        for qo_lens in (MIXED_LENS, [1] * len(MIXED_LENS))
    )
    layer = make_problem(
        [1] * num_requests, [kv_len] * num_requests, heads=(32, 8), dims=(128, 128), dtype=torch.float16
    )
    oracle = _seconds(lambda: paged_attention(*layer.tensors, **layer.options), repeats)
    requests = range(num_requests)
    by_group = _seconds(lambda: [_sdpa(layer, [r], heads_as_rows=True) for r in requests], repeats)
    by_head = _seconds(lambda: [_sdpa(layer, [r], heads_as_rows=False) for r in requests[:4]], repeats)
    batches = [list(requests[lo : lo + 8]) for lo in range(0, num_requests, 8)]
    batched = _seconds(lambda: [_sdpa(layer, batch, heads_as_rows=True) for batch in batches], repeats)
    state = paged_attention(*layer.tensors, **layer.options)
    theirs = torch.cat([_sdpa(layer, [r], heads_as_rows=True) for r in requests])
    difference = float((state.out - theirs).abs().max())
    return OracleCost(
        numpy_add_s=_median(lambda: x + x),
        prefill_s=_median(lambda: paged_attention(*mixed.tensors, **mixed.options)),
        decode_s=_median(lambda: paged_attention(*decode.tensors, **decode.options)),
        layer_s=oracle,
        sdpa_s=min(by_group, by_head * num_requests / len(requests[:4])),
        sdpa_batched_s=batched,
        largest_difference=difference / exact_tolerance(state.max_score, state.max_v),
    )


def _sdpa(problem: Problem, requests: list[int], *, heads_as_rows: bool) -> torch.Tensor:
    """Float64 attention of decode requests of equal length by torch, gathered and converted as the oracle does."""
    kv_len = problem.kv_lens[0]
    q = problem.q[requests].to(torch.float64)
    slots = problem.slots.view(-1, kv_len)[requests].flatten()
    shape = (len(requests), kv_len, problem.k_cache.shape[1], -1)
    k, v = (
        cache.index_select(0, slots).to(torch.float64).view(shape).swapaxes(1, 2)
        for cache in (problem.k_cache, problem.v_cache)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    if heads_as_rows:
        rows = q.view(len(requests), shape[2], -1, q.shape[2])
        return attend(rows, k, v, scale=problem.scale).flatten(1, 2)
    return attend(q[:, :, None], k, v, scale=problem.scale, enable_gqa=True)[:, :, 0]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    return min(_timed(call) for _ in range(repeats))


def _median(call: Callable[[], object]) -> float:
    return median(_timed(call) for _ in range(200))


def _timed(call: Callable[[], object]) -> float:
    begin = process_time()
    call()
    return process_time() - begin


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    num_requests, kv_len, repeats = (int(argument) for argument in arguments)
    sys.stdout.write(json.dumps(measure_here(num_requests, kv_len, repeats)._asdict()))


if __name__ == "__main__":
    main(sys.argv[1:])
