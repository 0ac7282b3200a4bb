"""`check`: the whole suite on one backend, in a test of one's own."""

from __future__ import annotations

from typing import Any, get_args

from backends.libraries import LibraryKind
from conformance.campaign import Campaign
from conformance.isolation.session import open_session
from conformance.limits import require_whole
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
        TypeError, ValueError: an argument that makes no sense, in one sentence.
    """
    __tracebackhide__ = True
    require_whole(0, cases=cases, sessions=sessions, seed=seed)
    _require_backend(backend)
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    with open_session([backend], library=library, mode=mode, isolate=isolate) as session:
        campaign = Campaign(session.askers, count=cases, sessions=sessions, seed=seed, smoke=True, named=True)
        campaign.run()
        if campaign.clean:
            return
        texts = [matrix(campaign.tallies.values())]
        failures = campaign.failures(session.specs[0].name)
        texts += [render(failure.asker, failure.case, failure.verdict) for failure in failures]
    raise AssertionError("\n\n".join(texts))


def _require_backend(given: object) -> None:
    if not isinstance(given, str | type):
        raise TypeError(f"backend must be a name or a class, got {given!r}")
