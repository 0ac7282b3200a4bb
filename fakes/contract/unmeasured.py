"""Releases that nobody ran on a GPU: which measured release stands in for them, rule by rule, and why.

They are here because an engine pins them. Nothing in this file is evidence: it says what was read in the wheels'
sources (Python and CUDA), or that nothing could be read because a wheel holds a binary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fakes.contract.rule import Rule, Verdict


@dataclass(frozen=True)
class StandIn:
    """`release` is taken to do what `like` was measured to do, in every rule of the contract but those of `unlike`,
    which gives by id the release that it is like there.

    `read`: which sources were compared, and with what result; "" where the wheel holds a binary only.
    """

    library: str
    release: str
    like: str
    read: str
    unlike: Mapping[str, str] = field(default_factory=dict[str, str])


STAND_INS = (
    StandIn(
        library="flashinfer",
        release="0.7.2",
        like="0.7.4",
        unlike={"flashinfer.segment-packbits.int32": "0.6.6"},
        read="prefill.py, decode.py, cascade.py, page.py, packbits.py, utils.py and the attention headers of 0.6.6, "
        "0.7.2 and 0.7.4: "
        "it has the infinite mask value, the merges of empty states, the group sizes, the checks of q's rows "
        "and the planners of 0.7.4. Two things are as in 0.6.6, and no rule tells them apart: index arrays are not "
        "made contiguous, and paged prefill keeps the kernel that backend='auto' found at its first plan",
    ),
    StandIn(library="sgl_kernel", release="0.4.10", like="0.4.6", read=""),
)


def stand_in(library: str, release: str) -> StandIn | None:
    """What stands in for a release that was not measured; None for one that was."""
    return next((s for s in STAND_INS if (s.library, s.release) == (library, release)), None)


def expected(rule: Rule, release: str) -> tuple[Verdict | None, bool]:
    """What a rule says of a release (None: nothing), and whether that was measured on that release."""
    if release in rule.verdicts:
        return rule.verdicts[release], True
    found = stand_in(rule.library, release)
    if found is None:
        return None, False
    return rule.verdicts.get(found.unlike.get(rule.id, found.like)), False
