"""Hypothesis strategies for sessions: cases of many steps over one pool.

As in `cases.strategies` a session is one draw: a byte per setting, then two per action, one that says what happens and
one for its numbers. Lowering bytes and dropping pairs leads towards fewer actions, and each towards "all decode".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from cases.assemble import window_layers
from cases.lengths import lengths, prefill_cached
from cases.mix import Action, Mix, default_mix, spread
from cases.model import Case, Heads, Mask
from cases.schedule import Schedule
from cases.settings import Settings
from cases.wanted import ENGINE, Wanted

_BYTE = 256


def session_cases(wanted: Wanted = ENGINE, *, mix: Mix | None = None) -> st.SearchStrategy[Case]:
    """Sessions that use no more than `wanted`: requests are admitted, extended, decoded, verified and finished, borrow
    prefixes, wait, and come back.
    """
    if wanted.level != "engine":
        raise ValueError(f"session_cases draws cases of level engine, wanted.level is {wanted.level}")
    decoder = Decoder(mix or default_mix(), wanted)
    first = decoder.settings.num_bytes
    choices = st.binary(min_size=first + 2, max_size=first + 2 * decoder.mix.max_actions)

    @st.composite
    def sessions(draw: Callable[[st.SearchStrategy[bytes]], bytes]) -> Case:
        drawn = draw(choices)
        return decoder.build(drawn[first:], drawn[:first])

    return sessions()


class Decoder:
    """Makes sessions of bytes."""

    def __init__(self, mix: Mix, wanted: Wanted) -> None:
        wanted = _of_whole_sessions(wanted)
        self.mix, self.wanted = mix.session, wanted
        plain = replace(
            mix.engine,
            page_size=self.mix.page_size,
            heads=self.mix.heads,
            head_dims=self.mix.head_dims,
            batch=(("decode" if "decode" in wanted.phases else "prefill", 1),),  # actions say what a batch is
            later=(((), 1),),
            prefix=(("own", 1),),
        )
        self.settings = Settings(plain, wanted)
        self._num_layers = mix.engine.num_layers
        self._actions = spread(self.mix.actions, _BYTE)

    def build(self, actions: bytes, indices: bytes) -> Case:
        """A session from two bytes an action and a byte a setting."""
        chosen = self.settings.read(indices)
        schedule = Schedule(
            page_size=chosen["page_size"],
            token_limit=self.mix.token_limit,
            max_live=self.mix.max_live,
            phases=self.wanted.phases,
        )
        wished = lengths(chosen["page_size"], chosen["window"], False)
        for what, number in zip(actions[::2], actions[1::2], strict=False):
            act(schedule, self._actions[what], number, wished)
        if not schedule.steps:
            schedule.decode()
        k_scale, v_scale = chosen["kv_scales"] if chosen["kv_dtype"] is not None else (1.0, 1.0)
        longest = max(max(step.kv_lens) for step in schedule.steps)
        return Case(
            steps=tuple(schedule.steps),
            heads=Heads(*chosen["heads"], *chosen["head_dims"]),
            num_layers=self._num_layers,
            dtype=chosen["dtype"],
            kv_dtype=chosen["kv_dtype"],
            k_scale=k_scale,
            v_scale=v_scale,
            page_size=chosen["page_size"],
            layout=chosen["layout"],
            placement=chosen["placement"],
            max_seq_len=longest if chosen["table"] == "exact" else None,
            mask=Mask(
                window=chosen["window"],
                soft_cap=chosen["soft_cap"],
                window_layers=window_layers(chosen["window_layers"], chosen["window"], self._num_layers),
            ),
            sm_scale=chosen["sm_scale"],
            values=chosen["values"],
            strided=chosen["strided"],
            seed=chosen["seed"],
            session=True,
        )


def act(schedule: Schedule, action: Action, number: int, wished: tuple[int, ...]) -> None:
    """One action; `number`, 0 to 255, picks requests and lengths, `wished` lists 32 lengths."""
    live = list(schedule.live)
    low, high = number % 32, number // 32
    if not live and action in ("decode", "chunk", "finish", "hit", "verify"):
        action = "admit"
    match action:
        case "decode":
            chosen = [uid for i, uid in enumerate(live) if number < 160 or number >> i & 1] or live
            schedule.decode(chosen[::-1] if number >= 128 else chosen)
        case "admit" | "join":
            kv_len = min(wished[low], schedule.token_limit // 2)
            cached = prefill_cached(high, kv_len, schedule.page_size)
            schedule.admit(kv_len, cached, mixed=action == "join")
        case "chunk":
            schedule.extend([live[number % len(live)]] if number & 128 else live, 2 + low % 6)
        case "finish":
            schedule.finish(live[number % len(live)])
        case "hit":
            lender = max(live, key=schedule.live.__getitem__) if number & 128 else live[number % len(live)]
            schedule.hit(lender, 1 + low % 6, 1 if number & 64 else None, mixed=bool(number & 32))
        case "verify":
            schedule.verify(2 + number % 3)
        case "resume":
            gone = [uid for uid in schedule.gone if uid not in schedule.live]
            schedule.resume(gone[number % len(gone)] if gone else -1)


def _of_whole_sessions(wanted: Wanted) -> Wanted:
    """Without the variants that some step of a session could not have; where none has all, the phases of the first."""
    if not wanted.variants:
        return wanted
    phases = wanted.phases
    if not any(phases <= variant.phases for variant in wanted.variants):
        phases &= wanted.variants[0].phases
    variants = tuple(variant for variant in wanted.variants if phases <= variant.phases)
    return replace(wanted, phases=phases, variants=variants)
