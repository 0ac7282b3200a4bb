"""Rows and requests that see no key: what comes out, and how empty states merge."""

from __future__ import annotations

import torch

from fakes.contract.check import dense, requests
from fakes.contract.paged_fi import (
    DECODE,
    LN2,
    PREFILL,
    Kernel,
    attend,
    bind,
    both,
    caches,
    ints,
    make,
    plan,
    rule,
    running_sum,
    workspace,
    worst,
)
from fakes.contract.rule import RIGHT, Lab, Observation, judge, refused, value

SENTINEL = value("out 0, lse finite below -1000")
NEUTRAL = value("out 0, lse -inf")
CONTIGUOUS = refused("RuntimeError", "must be contiguous")
AVERAGED = value("out not 0, lse finite below -1000")


def _ending(out: torch.Tensor, lse: torch.Tensor) -> Observation:
    """How rows without keys end. out `[rows, ...]`, lse `[rows, heads]`."""
    words = (
        "out 0" if bool((out == 0).all()) else "out not finite" if not out.isfinite().all() else "out not 0"
    )
    if bool(torch.isneginf(lse).all()):
        return Observation("value", f"{words}, lse -inf")
    low = bool(lse.isfinite().all() and (lse < -1000).all())
    return Observation("value", f"{words}, lse {'finite below -1000' if low else 'other'}")


def _empty_request(lab: Lab, kernel: Kernel) -> Observation:
    r = requests([20, 0, 5])
    got = attend(lab, kernel, r)
    wrong = both((got[0][::2], got[1][::2]), tuple(t[::2] for t in r.expected()))  # pyright: ignore[reportArgumentType]
    return wrong if wrong.kind != "right" else _ending(got[0][1:2], got[1][1:2])


def _rows_before_keys(lab: Lab, kernel: Kernel) -> Observation:
    r = requests([3, 12], [7, 4])
    got = attend(lab, kernel, r)
    out, lse = r.expected(causal=True)
    wrong = both((got[0][4:], got[1][4:]), (out[4:], lse[4:]))
    return wrong if wrong.kind != "right" else _ending(got[0][:4], got[1][:4])


def _rows_without_request(lab: Lab, kernel: Kernel) -> Observation:
    r = requests([0, 12], [3, 4])
    got = attend(lab, kernel, r, causal=False)
    out, lse = r.expected()
    wrong = both((got[0][3:], got[1][3:]), (out[3:], lse[3:]))
    return wrong if wrong.kind != "right" else _ending(got[0][:3], got[1][:3])


def _ragged(
    lab: Lab, kernel: Kernel, kv_lens: list[int], qo_lens: list[int], causal: bool
) -> tuple[torch.Tensor, ...]:
    r = requests(kv_lens, qo_lens)
    wrapper = lab.library.BatchPrefillWithRaggedKVCacheWrapper(workspace(lab), backend=kernel)
    qo, kv = ints(running_sum(qo_lens)), ints(running_sum(kv_lens))
    wrapper.plan(qo, kv, 8, 2, 128, causal=causal, q_data_type=r.q.dtype)
    k, v = torch.cat(r.k), torch.cat(r.v)
    out, lse = wrapper.run(*(t.to(lab.device) for t in (r.q, k, v)), return_lse=True)
    return out.cpu(), lse.cpu().double() * LN2, *r.expected(causal=causal)


def _ragged_right(lab: Lab, kernel: Kernel) -> Observation:
    seen = []
    for causal in (False, True):
        out, lse, *expected = _ragged(lab, kernel, [40, 17, 5], [7, 3, 5], causal)
        seen.append(both((out, lse), (expected[0], expected[1])))
    return worst(*seen)


def _ragged_rows_before_keys(lab: Lab, kernel: Kernel) -> Observation:
    out, lse, *expected = _ragged(lab, kernel, [3, 12], [7, 4], causal=True)
    wrong = both((out[4:], lse[4:]), (expected[0][4:], expected[1][4:]))
    return wrong if wrong.kind != "right" else _ending(out[:4], lse[:4])


def _states(rows: int = 3) -> tuple[torch.Tensor, ...]:
    """Two halves of one attention: v and base-2 s of each, and the whole."""
    r = requests([20], [rows])
    (a, s_a), (b, s_b) = dense(r.q, r.k[0][:8], r.v[0][:8]), dense(r.q, r.k[0][8:], r.v[0][8:])
    half = [t.to(torch.bfloat16).contiguous() for t in (a, b)]
    logs = [(t / LN2).float().contiguous() for t in (s_a, s_b)]
    return half[0], logs[0], half[1], logs[1], *dense(r.q, r.k[0], r.v[0])


def _merge(lab: Lab) -> Observation:
    *given, out, lse = _states()
    v, s = lab.library.merge_state(*(t.to(lab.device) for t in given))
    return both((v, s.cpu().double() * LN2), (out, lse))


def _merge_in_place(lab: Lab) -> Observation:
    given = [t.to(lab.device) for t in _states()[:4]]
    v, s = lab.library.merge_state(*given)
    lab.library.merge_state_in_place(*given)
    return Observation("right" if torch.equal(given[0], v) and torch.equal(given[1], s) else "wrong")


def _merge_empty(lab: Lab) -> Observation:
    v = torch.zeros(2, 8, 128, dtype=torch.bfloat16, device=lab.device)
    s = torch.full((2, 8), float("-inf"), device=lab.device)
    out, lse = (t.cpu() for t in lab.library.merge_state(v, s, v.clone(), s.clone()))
    if out.isnan().all() and lse.isnan().all():
        return Observation("value", "nan")
    return _ending(out, lse)


def _merge_list(lab: Lab) -> Observation:
    a, s_a, b, s_b, out, lse = _states()
    v, s = torch.stack((a, b), dim=1).to(lab.device), torch.stack((s_a, s_b), dim=1).to(lab.device)
    got, got_lse = lab.library.merge_states(v, s)
    return both((got, got_lse.cpu().double() * LN2), (out, lse))


def _merge_strided(lab: Lab) -> Observation:
    v_a, *others = (t.to(lab.device) for t in _states()[:4])
    lab.library.merge_state(v_a.transpose(0, 1).contiguous().transpose(0, 1), *others)
    return Observation("right")


def _merge_list_empty(lab: Lab, rows: int) -> Observation:
    v = torch.zeros(rows, 3, 8, 128, dtype=torch.bfloat16, device=lab.device)
    s = torch.full((rows, 3, 8), float("-inf"), device=lab.device)
    out, lse = (t.cpu() for t in lab.library.merge_states(v, s))
    level = "-inf" if torch.isneginf(lse).all() else f"{float(lse.mean()):.0f}"
    return Observation("value", f"({'0' if bool((out == 0).all()) else 'other'}, {level})")


def _cascade(lab: Lab) -> Observation:
    r = requests([52, 37, 45], page_size=16)
    shared = r.pages[0][:2]
    for i in (1, 2):  # the first 32 tokens of every request are those of request 0
        r.pages[i][:2] = shared
        r.k[i][:32], r.v[i][:32] = r.k[0][:32], r.v[0][:32]
    wrapper = lab.library.MultiLevelCascadeAttentionWrapper(2, workspace(lab), "NHD")
    own = [p[2:] for p in r.pages]
    on = [
        [ints([0, 3]), ints([0, 1, 2, 3])],
        [ints([0, 2]), ints(running_sum(len(p) for p in own))],
        [ints(shared), ints(page for p in own for page in p)],
        [ints([16]), ints((n - 32 - 1) % 16 + 1 for n in r.kv_lens)],
    ]
    wrapper.plan(*([t.to(lab.device) for t in level] for level in on), 8, 2, 128, 16, q_data_type=r.q.dtype)
    return judge(wrapper.run(r.q.to(lab.device), caches(lab, r)), r.expected()[0], 1e-2)


def _lse_options(lab: Lab) -> Observation:
    r = requests([40, 17], [7, 3])
    wrapper = make(lab, "fa2")
    plan(lab, wrapper, "fa2", r)
    out, lse = wrapper.run(
        r.q.to(lab.device), caches(lab, r), return_lse=True, lse_base="ln", lse_layout="HN"
    )
    return both((out, lse.cpu().double().T), r.expected(causal=True))


RULES = (
    *(
        rule(
            f"empty-request.{kernel}",
            "Masked scores are finite before 0.7.4, so an empty row ends in a sentinel.",
            bind(_empty_request, kernel),
            SENTINEL,
            NEUTRAL,
        )
        for kernel in DECODE
    ),
    rule(
        "rows-before-keys.fa2",
        "A causal row without keys keeps its first state.",
        bind(_rows_before_keys, "fa2"),
        SENTINEL,
        NEUTRAL,
    ),
    rule(
        "rows-before-keys.fa3",
        "fa3 weighs all columns of a wholly masked tile alike before 0.7.4.",
        bind(_rows_before_keys, "fa3"),
        AVERAGED,
        NEUTRAL,
    ),
    *(
        rule(
            f"rows-without-request.{kernel}",
            "A request with kv_len 0 has no tile to go through.",
            bind(_rows_without_request, kernel),
            SENTINEL,
            NEUTRAL,
        )
        for kernel in PREFILL
    ),
    *(
        rule(
            f"ragged.{kernel}",
            "Ragged prefill, causal and not; LSE base 2.",
            bind(_ragged_right, kernel),
            RIGHT,
        )
        for kernel in PREFILL
    ),
    rule(
        "ragged-rows-before-keys.fa2",
        "As in paged prefill.",
        bind(_ragged_rows_before_keys, "fa2"),
        SENTINEL,
        NEUTRAL,
    ),
    rule(
        "ragged-rows-before-keys.fa3",
        "As in paged prefill; the tile's columns past the request are loaded, too.",
        bind(_ragged_rows_before_keys, "fa3"),
        AVERAGED,
        NEUTRAL,
    ),
    rule("merge-state", "Weights are powers of 2.", _merge, RIGHT),
    rule(
        "merge-state-empty",
        "-inf less -inf is no number; 0.7.4 guards it.",
        _merge_empty,
        value("nan"),
        NEUTRAL,
    ),
    rule("merge-state-in-place", "The same kernel, written over its first operands.", _merge_in_place, RIGHT),
    rule("merge-states", "A list of states.", _merge_list, RIGHT),
    rule("merge-strided", "States are read as contiguous memory.", _merge_strided, CONTIGUOUS),
    rule(
        "merge-states-empty",
        "The sum over a list starts from the sentinel before 0.7.4.",
        bind(_merge_list_empty, 5),
        value("(0, -50000)"),
        value("(0, -inf)"),
    ),
    rule(
        "merge-states-empty.more-states-than-rows",
        "Before 0.7.4 each of 8 thread rows starts from the sentinel: 2 ** 3 times its weight.",
        bind(_merge_list_empty, 1),
        value("(0, -49997)"),
        value("(0, -inf)"),
    ),
    rule("cascade", "Two levels, 32 shared tokens, equal the flat answer.", _cascade, RIGHT),
)
RULES = (
    *RULES,
    rule(
        "lse-options",
        "lse_base and lse_layout came with 0.7.",
        _lse_options,
        refused("TypeError", "lse_base"),
        RIGHT,
    ),
)
