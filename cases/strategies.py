"""Hypothesis strategies for cases.

A case is one draw, since each costs as much as building ten requests (and two of a kind set off hypothesis's
mutations, which double the price): a string of bytes, one per setting, then one per request (five bits pick
its length, three how it is split). A byte is an index into a table that begins with the simplest value, so
lowering bytes and dropping them is what shrinking means: towards one request of one token, page size 1, one
head, a plain decode batch, sequential pages. Everything that is drawn is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from hypothesis import strategies as st

from cases.assemble import Assembler
from cases.mix import Mix, default_mix
from cases.model import Case
from cases.wanted import ENGINE, KERNEL, Wanted


def engine_cases(wanted: Wanted = ENGINE, *, mix: Mix | None = None) -> st.SearchStrategy[Case]:
    """Cases of level "engine": batches of requests, over one step or several.

    `wanted` says what may be asked for (the default: causal, no window, no cap, NHD); `mix` gives the
    limits and weights (the default: `cases/mix.json`).
    """
    if wanted.level != "engine":
        raise ValueError(f"engine_cases draws cases of level engine, wanted.level is {wanted.level}")
    return _cases(Assembler((mix or default_mix()).engine, wanted))


def kernel_cases(wanted: Wanted = KERNEL, *, mix: Mix | None = None) -> st.SearchStrategy[Case]:
    """Cases of level "kernel": query and key lengths independent of each other, for kernel-level adapters.

    The default of `wanted` is everything: windows, soft cap, custom masks, fp8 KV with scales, non-causal
    masks, rows without keys, empty requests, both layouts.
    """
    if wanted.level != "kernel":
        raise ValueError(f"kernel_cases draws cases of level kernel, wanted.level is {wanted.level}")
    return _cases(Assembler((mix or default_mix()).kernel, wanted))


@cache
def _exactly(count: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=count, max_size=count)


def _cases(assembler: Assembler) -> st.SearchStrategy[Case]:
    settings = assembler.settings.num_bytes
    choices = st.binary(min_size=settings + 1, max_size=settings + assembler.mix.max_requests)

    @st.composite
    def cases(draw: Callable[[st.SearchStrategy[bytes]], bytes]) -> Case:
        drawn = draw(choices)
        return assembler.build(drawn[settings:], drawn[:settings], lambda count: draw(_exactly(count)))

    return cases()
