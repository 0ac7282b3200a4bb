"""`check`: the whole suite on one backend, in a test of one's own."""

from __future__ import annotations

from typing import Any

from backends.libraries import LibraryKind
from conformance.campaign import Campaign
from conformance.isolation.session import open_session
from conformance.matrix import matrix
from conformance.render import render
from fakes.recorder import Mode


def check(
    backend: str | type[Any],
    *,
    cases: int = 200,
    sessions: int = 20,
    seed: int = 0,
    library: LibraryKind = "fake",
    mode: Mode = "strict",
    isolate: bool | None = None,
) -> None:
    """Put smoke cases, the corpus, the named edges, random cases and sessions to a backend.

    Args:
        backend: a name, `"pkg.mod:Class"`, or a class.
        cases: random cases.
        sessions: random sessions, of an engine-level backend.
        seed: draws them.
        library: which kind of kernel libraries answers.
        mode: how the fakes behave (`fakes.recorder`).
        isolate: whether it is asked in a worker process; None: with real libraries.

    Raises:
        AssertionError: a check fails; the message holds the smallest case, what is wrong, how to replay it.
        BackendError, LibraryError: the backend or its library cannot be had.
    """
    __tracebackhide__ = True
    with open_session([backend], library=library, mode=mode, isolate=isolate) as session:
        campaign = Campaign(session.askers, count=cases, sessions=sessions, seed=seed, smoke=True, named=True)
        campaign.run()
        if campaign.clean:
            return
        texts = [matrix(campaign.tallies.values())]
        failures = campaign.failures(session.specs[0].name)
        texts += [render(failure.asker, failure.case, failure.verdict) for failure in failures]
    raise AssertionError("\n\n".join(texts))
