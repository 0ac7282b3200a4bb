"""A session as a state machine of hypothesis: rules that a serving engine follows, one example one session.

`conformance.selection.sessions_for` draws the same sessions ten times as fast; this is for whom wants to see a failure
as a list of rules, or to add rules of an engine's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from cases.model import Case, Request, Step
from cases.schedule import Schedule
from conformance.examine import examine
from conformance.question import Question
from conformance.render import render
from conformance.trial import AnyAsker

_FIRST = st.integers(0, 5)
_FEW = st.integers(1, 6)


class SessionMachine(RuleBasedStateMachine):
    """Rules over `cases.schedule.Schedule`; when an example is over, its session is put to the backend.

    A subclass sets `asker` and may set `settings`, a case whose steps are replaced, and add rules.
    """

    asker: AnyAsker
    settings = Case((Step((Request(),)),), page_size=4, session=True)

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(
            page_size=self.settings.page_size, phases=self.asker.spec.capabilities.phases
        )

    @property
    def live(self) -> list[int]:
        """uids that are there."""
        return list(self.schedule.live)

    def pick(self, number: int) -> int:
        """One of them."""
        return self.live[number % len(self.live)]

    @rule(kv_len=st.integers(1, 24), from_elsewhere=st.integers(0, 8), mixed=st.booleans())
    def admit(self, kv_len: int, from_elsewhere: int, mixed: bool) -> None:
        self.schedule.admit(kv_len, from_elsewhere, mixed=mixed)

    @precondition(lambda self: self.live)
    @rule(lender=_FIRST, new=_FEW, mixed=st.booleans())
    def admit_behind_a_prefix(self, lender: int, new: int, mixed: bool) -> None:
        self.schedule.hit(self.pick(lender), new, mixed=mixed)

    @precondition(lambda self: self.live)
    @rule()
    def decode(self) -> None:
        self.schedule.decode()

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=_FIRST)
    def decode_some(self, which: int) -> None:
        self.schedule.decode([uid for uid in self.live if uid != self.pick(which)])

    @precondition(lambda self: self.live)
    @rule(which=_FIRST, new=_FEW)
    def extend(self, which: int, new: int) -> None:
        self.schedule.extend([self.pick(which)], new)

    @precondition(lambda self: self.live)
    @rule(drafts=st.integers(2, 4))
    def verify(self, drafts: int) -> None:
        self.schedule.verify(drafts)

    @precondition(lambda self: self.live)
    @rule(which=_FIRST)
    def finish(self, which: int) -> None:
        self.schedule.finish(self.pick(which))

    @precondition(lambda self: self.schedule.gone)
    @rule(which=_FIRST)
    def come_back(self, which: int) -> None:
        gone = list(self.schedule.gone)
        self.schedule.resume(gone[which % len(gone)])

    def case(self) -> Case:
        """The session so far."""
        return replace(self.settings, steps=tuple(self.schedule.steps))

    def teardown(self) -> None:
        """Put the session to the backend.

        Raises:
            AssertionError: a check fails; the message is what `conformance run` prints.
        """
        if not self.schedule.steps:
            return
        case = self.case()
        verdict = examine(Question(case), self.asker)
        if verdict.failed:
            raise AssertionError(render(self.asker, case, verdict))


def machine_for(asker: AnyAsker, settings: Case | None = None) -> type[SessionMachine]:
    """A state machine for one backend, for `hypothesis.stateful.run_state_machine_as_test`.

    `settings`: heads, dtype, page size and so on; its steps do not matter.
    """
    members: dict[str, Any] = {"asker": asker}
    if settings is not None:
        members["settings"] = replace(settings, session=True)
    return type(f"Sessions[{asker.spec.name}]", (SessionMachine,), members)
