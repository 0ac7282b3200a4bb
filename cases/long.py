"""Long contexts: cases that only a GPU computes in seconds."""

from __future__ import annotations

from cases.model import Case, Heads, KernelRequest, Level, Mask, Request, Step

LONG = 131_072
"""Tokens: the context limit of many models."""
_SEED = 11
"""Draws no relation (`conformance.checks.relations`): one more execution, and tensors to lend."""


def _kernel(
    *requests: tuple[int, int],
    heads: tuple[int, int],
    page_size: int,
    decode: bool = False,
    mask: Mask | None = None,
) -> Case:
    step = Step(
        tuple(KernelRequest(qo, kv, uid) for uid, (qo, kv) in enumerate(requests)),
        "decode" if decode else "prefill",
        "decode" if decode else "prefill",
    )
    return Case(
        (step,),
        level="kernel",
        heads=Heads(*heads),
        num_layers=1,
        page_size=page_size,
        placement="scattered",
        mask=mask or Mask(),
        seed=_SEED,
    )


def _engine(step: Step, heads: tuple[int, int], page_size: int) -> Case:
    return Case(
        (step,), heads=Heads(*heads), num_layers=1, page_size=page_size, placement="scattered", seed=_SEED
    )


LONG_CASES: dict[str, tuple[Case, str]] = {
    "decode_of_131072": (
        _kernel((1, LONG), (1, 17), heads=(8, 1), page_size=16, decode=True),
        "One long request beside a short one: its keys are split over many blocks.",
    ),
    "decode_of_131072_small_group": (
        _kernel((1, LONG - 1), heads=(2, 1), page_size=1, decode=True),
        "The same for kernels that take small GQA groups, with a page a token.",
    ),
    "prefill_of_131072": (
        _kernel((LONG, LONG), heads=(2, 1), page_size=64),
        "A whole prompt at once: 2^34 pairs of row and key.",
    ),
    "chunk_at_the_end_of_131072": (
        _kernel((515, LONG), (3, 5), heads=(7, 1), page_size=16),
        "The last chunk of a long prompt, 7 query heads a KV head.",
    ),
    "full_attention_over_40000": (
        _kernel((100, 40_000), heads=(4, 2), page_size=256, mask=Mask(causal=False)),
        "Every row sees every key.",
    ),
    "engine_decode_of_131072": (
        _engine(
            Step((Request(LONG - 1, 1), Request(4095, 1, uid=1), Request(0, 1, uid=2)), "decode", "decode"),
            (8, 1),
            16,
        ),
        "A decode batch of very unequal lengths.",
    ),
    "engine_prefill_of_131072": (
        _engine(Step((Request(0, LONG),)), (2, 1), 64),
        "A whole prompt at once.",
    ),
    "engine_chunk_at_the_end_of_131072": (
        _engine(Step((Request(LONG - 515, 515), Request(8, 3, uid=1)), kind="chunked"), (5, 1), 16),
        "The last chunk of a long prompt, 5 query heads a KV head.",
    ),
}
"""Case and why, by name."""


def long_cases(level: Level) -> list[Case]:
    """Those of one level."""
    return [case for case, _ in LONG_CASES.values() if case.level == level]
