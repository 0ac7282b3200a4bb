"""What is drawn is valid and what was wanted, reaches every border, and shrinks to what one would write."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from cases import Case, KernelRequest, Request, Step, to_json
from cases.assemble import Assembler
from cases.coverage import Reached
from cases.mix import default_mix
from cases.simplify import simplify
from cases.strategies import engine_cases, kernel_cases
from cases.wanted import ENGINE, KERNEL, Wanted

MIX = default_mix()
FINDING = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=3000,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@cache
def _drawn(wanted: Wanted, count: int = 3000) -> tuple[Case, ...]:
    """Cases from plain random bytes: what hypothesis draws, without its price."""
    rng = random.Random(5)
    assembler = Assembler(MIX.engine if wanted.level == "engine" else MIX.kernel, wanted)

    def one() -> Case:
        requests = rng.randbytes(rng.randint(1, 8))
        return assembler.build(requests, rng.randbytes(assembler.settings.num_bytes), rng.randbytes)

    return tuple(one() for _ in range(count))


def _reached(wanted: Wanted) -> Reached:
    reached = Reached()
    for case in _drawn(wanted):
        reached.add(case)
    return reached


@pytest.mark.parametrize("wanted", [ENGINE, KERNEL], ids=["engine", "kernel"])
def test_limits_hold(wanted: Wanted) -> None:
    mix = MIX.engine if wanted.level == "engine" else MIX.kernel
    for case in _drawn(wanted):
        long = case.page_size >= mix.long_page_size
        for step in case.steps:
            assert sum(step.kv_lens) <= (mix.long_token_limit if long else mix.token_limit), to_json(case)
            assert step.num_rows <= mix.row_limit, to_json(case)
            assert len(step.requests) <= (mix.long_max_requests if long else mix.max_requests), to_json(case)


COMMON = {
    "page_size": [1, 2, 3, 4, 8, 16, 32, 64, 128, 256],
    "group_size": [1, 2, 4, 5, 7, 8],
    "head_dim": ["64/64", "80/80", "96/96", "128/128", "192/128", "256/256"],
    "dtype": ["float16", "bfloat16", "float32"],
    "placement": ["sequential", "reversed", "scattered"],
    "requests": [1, 2, 3, 4, 5, 6, 7, 8],
    "values": ["needles", "zero_q", "constant_v", "one_hot_v", "extreme", "low", "random"],
    "kv_len": [
        "1",
        "P-1",
        "P",
        "P+1",
        "2P-1",
        "2P",
        "2P+1",
        "multiple of P from 2P on",
        "two pages and more",
        "limit",
    ],
    "prefix": ["shared pages"],
    "strided": ["yes", "no"],
}
OF_LEVEL = {
    "engine": {
        "phase": ["prefill", "decode"],
        "kind": ["prefill", "chunked", "decode", "mixed", "verify", "draft_extend"],
        "steps": [1, 2, 3],
        "qo_len": ["1", "more than one", "kv_len"],
    },
    "kernel": {
        "phase": ["prefill", "decode"],
        "kv_len": ["0", "W-1", "W", "W+1", "W+P", "beyond W"],
        "qo_len": ["0", "1", "more than one", "kv_len", "more than kv_len"],
        "mask": ["causal", "full", "custom", "window", "soft cap", "own scale"],
        "layout": ["NHD", "HND"],
        "kv_dtype": ["float8_e4m3fn", "float8_e5m2"],
    },
}


def test_most_engine_cases_suit_every_backend() -> None:
    """Windows, caps and HND are rare, so that one draw serves the backends that lack them as well."""
    everything = replace(
        ENGINE, layouts=frozenset({"NHD", "HND"}), window=True, layer_windows=True, soft_cap=True
    )
    plain = [not _beyond(case, ENGINE) for case in _drawn(everything)]
    assert sum(plain) >= 0.65 * len(plain)
    reached = _reached(everything)
    for group, names in {
        "mask": ["window", "window in some layers", "soft cap"],
        "kv_len": ["W-1", "W", "W+1", "W+P"],
    }.items():
        for name in names:
            assert reached.count(group, name) >= 0.0125 * reached.cases, name


@pytest.mark.parametrize("wanted", [ENGINE, KERNEL], ids=["engine", "kernel"])
def test_everything_is_reached(wanted: Wanted) -> None:
    """One case in a hundred at least: 20,000 cases then reach each label 200 times."""
    reached = _reached(wanted)
    for labels in (COMMON, OF_LEVEL[wanted.level]):
        for group, names in labels.items():
            for name in names:
                count = reached.count(group, name)
                assert count >= 0.0125 * reached.cases, f"{group} {name}: {count} of {reached.cases}"


@pytest.mark.parametrize("page_size", [2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size_meets_its_borders(page_size: int) -> None:
    lengths = {r.kv_len for case in _drawn(ENGINE) if case.page_size == page_size for r in _requests(case)}
    p, limit = page_size, MIX.engine.token_limit
    borders = {p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1}
    if p < MIX.engine.long_page_size:
        borders -= {n for n in borders if n > limit}
    assert borders <= lengths | {0}


@pytest.mark.parametrize("wanted", [ENGINE, KERNEL], ids=["engine", "kernel"])
def test_what_is_wanted_beyond_the_mix_is_drawn(wanted: Wanted) -> None:
    """Declared is tested: some values of the mix do not stand for those beside them."""
    dims = frozenset({(64, 64), (128, 128), (112, 112), (192, 192), (5000, 5000)})
    reached = _reached(replace(wanted, head_dims=dims, page_sizes=frozenset({16, 48, 1024, 8192})))
    for group, names in {"page_size": (16, 48, 1024), "head_dim": ("64/64", "112/112", "192/192")}.items():
        for name in names:
            assert reached.count(group, name) >= 0.0125 * reached.cases, name
    assert reached.count("head_dim", "64/64") >= 0.75 * reached.cases


def test_many_values_beyond_the_mix_stay_rare() -> None:
    reached = _reached(replace(ENGINE, page_sizes=frozenset(range(1, 5000))))
    assert sum(reached.count("page_size", size) for size, _ in MIX.engine.page_size) >= 0.8 * reached.cases


def test_hypothesis_draws_as_much() -> None:
    """The bytes that hypothesis makes are spread like random ones."""
    reached = Reached()

    @settings(FINDING, max_examples=400, phases=[Phase.generate])
    @given(engine_cases())
    def draw(case: Case) -> None:
        reached.add(case)

    draw()
    for group in ("page_size", "kind", "group_size", "requests"):
        for label in [*COMMON.get(group, []), *OF_LEVEL["engine"].get(group, [])]:
            assert reached.count(group, label) >= 3, f"{group} {label}"


NARROW = {
    "decode only": Wanted(phases=frozenset({"decode"})),
    "prefill only": Wanted(phases=frozenset({"prefill"})),
    "one page size of the mix": Wanted(page_sizes=frozenset({16})),
    "page sizes beyond the mix": Wanted(page_sizes=frozenset({32, 48})),
    "groups": Wanted(group_sizes=frozenset({4, 8})),
    "group beyond the mix": Wanted(group_sizes=frozenset({6})),
    "head dim beyond the mix": Wanted(head_dims=frozenset({(192, 128)})),
    "16 bits": Wanted(dtypes=frozenset({"float16", "bfloat16"}), strided=False),
    "engine with window": Wanted(window=True, soft_cap=True, layouts=frozenset({"HND"})),
    "engine with windows in some layers": Wanted(window=True, layer_windows=True),
    "engine with fp8": Wanted(kv_dtypes=frozenset({"float8_e4m3fn"}), non_causal=True, custom_mask=True),
    "kernel without anything": Wanted(level="kernel"),
    "kernel, empty requests": Wanted(level="kernel", empty_requests=True),
    "kernel, rows without keys": Wanted(level="kernel", rows_without_keys=True),
    "kernel, decode": Wanted(level="kernel", phases=frozenset({"decode"}), empty_requests=True),
    "kernel, masks": replace(KERNEL, rows_without_keys=False, empty_requests=False),
}


@pytest.mark.parametrize("wanted", NARROW.values(), ids=list(NARROW))
def test_only_what_is_wanted(wanted: Wanted) -> None:
    for case in _drawn(wanted, 600):
        assert not _beyond(case, wanted), f"{_beyond(case, wanted)}: {to_json(case)}"


def _beyond(case: Case, wanted: Wanted) -> str:
    heads, mask = case.heads, case.mask
    rows = [(r.qo_len, r.kv_len) for step in case.steps for r in step.requests]
    keyless = any(qo > 0 and (not kv or (mask.causal and qo > kv)) for qo, kv in rows)
    needs = {
        "phase": all(step.phase in wanted.phases for step in case.steps),
        "dtype": case.dtype in wanted.dtypes,
        "kv_dtype": case.kv_dtype is None or case.kv_dtype in wanted.kv_dtypes,
        "page_size": wanted.page_sizes is None or case.page_size in wanted.page_sizes,
        "layout": case.layout in wanted.layouts,
        "head_dim": wanted.head_dims is None or (heads.head_dim_qk, heads.head_dim_vo) in wanted.head_dims,
        "group": wanted.group_sizes is None or heads.group_size in wanted.group_sizes,
        "causal": mask.causal or mask.custom is not None or wanted.non_causal,
        "window": mask.window is None or wanted.window,
        "window layers": mask.window_layers is None or wanted.layer_windows,
        "soft_cap": mask.soft_cap is None or wanted.soft_cap,
        "custom": mask.custom is None or wanted.custom_mask,
        "strided": not case.strided or wanted.strided,
        "rows without keys": not keyless or wanted.rows_without_keys,
        "empty requests": all(qo for qo, _ in rows) or wanted.empty_requests,
        "some row": all(step.num_rows for step in case.steps),
    }
    return ", ".join(name for name, fits in needs.items() if not fits)


def test_nothing_left_is_an_error() -> None:
    only_half = replace(MIX, engine=replace(MIX.engine, batch=(("decode", 1),)))
    with pytest.raises(ValueError, match="no batch of the mix is wanted"):
        engine_cases(Wanted(phases=frozenset({"prefill"})), mix=only_half)


@pytest.mark.parametrize(("strategy", "wanted"), [(engine_cases, KERNEL), (kernel_cases, ENGINE)])
def test_wrong_level(strategy: Callable[[Wanted], object], wanted: Wanted) -> None:
    with pytest.raises(ValueError, match=f"wanted.level is {wanted.level}"):
        strategy(wanted)


def _requests(case: Case) -> list[Request | KernelRequest]:
    return [r for step in case.steps for r in step.requests]


def _decode(*kv_lens: int) -> Step:
    return Step(tuple(Request(n - 1, 1, i) for i, n in enumerate(kv_lens)), "decode", "decode")


SHRUNK: dict[str, tuple[Callable[[Case], bool], Case]] = {
    "last_page_len is kv_len % page_size": (
        lambda c: c.page_size > 1 and any(r.kv_len % c.page_size == 0 for r in _requests(c)),
        Case((_decode(2),), page_size=2),
    ),
    "the same at page size 16 only": (
        lambda c: c.page_size == 16 and any(r.kv_len % 16 == 0 for r in _requests(c)),
        Case((_decode(16),), page_size=16),
    ),
    "page number not divided": (
        lambda c: c.page_size > 1 and any(r.kv_len > c.page_size for r in _requests(c)),
        Case((_decode(3),), page_size=2),
    ),
    "stale plan": (
        lambda c: any(
            len(a.requests) == len(b.requests) and a.phase == b.phase and sum(a.kv_lens) < sum(b.kv_lens)
            for a, b in zip(c.steps, c.steps[1:], strict=False)
        ),
        Case((_decode(1), _decode(2))),
    ),
    "shared prefix lost": (
        lambda c: any(r.prefix_of is not None for r in _requests(c)),
        Case((Step((Request(1, 1), Request(1, 1, 1, 0, 1)), "decode", "decode"),)),
    ),
    "causal from the top left": (
        lambda c: any(1 < r.qo_len < r.kv_len for r in _requests(c)),
        Case((Step((Request(1, 2),)),)),
    ),
    "pages taken in order": (
        lambda c: c.placement == "scattered" and any(r.kv_len > c.page_size for r in _requests(c)),
        Case((_decode(2),), placement="scattered"),
    ),
    "second request longer": (
        lambda c: any(s.kv_lens[1] > s.kv_lens[0] for s in c.steps if len(s.requests) > 1),
        Case((_decode(1, 2),)),
    ),
}


@pytest.mark.parametrize(("fails", "smallest"), SHRUNK.values(), ids=list(SHRUNK))
def test_shrinks_to(fails: Callable[[Case], bool], smallest: Case) -> None:
    found = simplify(find(engine_cases(), fails, settings=FINDING), fails)  # as the product shrinks
    assert to_json(found) == to_json(smallest)


def test_simplest_case() -> None:
    assert find(engine_cases(), lambda _: True, settings=FINDING) == Case((_decode(1),))
    simplest = find(kernel_cases(), lambda _: True, settings=FINDING)
    assert simplest == Case((Step((KernelRequest(1, 1),), "decode", "decode"),), level="kernel", num_layers=1)


def test_window_shrinks_to_one_key() -> None:
    def fails(case: Case) -> bool:
        return case.mask.window is not None and any(r.kv_len > case.mask.window for r in _requests(case))

    found = find(kernel_cases(), fails, settings=FINDING)
    assert (found.mask.window, [r.kv_len for r in _requests(found)]) == (1, [2])


def test_a_mix_of_ones_own() -> None:
    mix = replace(MIX, engine=replace(MIX.engine, page_size=((8, 1),), max_requests=2))
    found = find(engine_cases(mix=mix), lambda c: len(c.steps[0].requests) == 2, settings=FINDING)
    assert found == Case((_decode(1, 1),), page_size=8)
