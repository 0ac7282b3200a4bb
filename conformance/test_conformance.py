"""The suite: every backend, every check. Elsewhere: `pytest --pyargs conformance --backend pkg.mod:Class`.

The random cases are drawn once and put to all backends; a test asserts one cell of the matrix. Failures are
shown in the smallest case that was found for them.
"""

from __future__ import annotations

import pytest

from conformance.suite import Results, Stage


def test_smoke(conformance_results: Results, conformance_backend: str) -> None:
    """One request of one token; where this fails, look at the adapter before the library."""
    _assert_passed(conformance_results, "smoke", conformance_backend)


def test_corpus(conformance_results: Results, conformance_backend: str) -> None:
    """Every case from a public report and every named edge that the backend declares."""
    _assert_passed(conformance_results, "corpus", conformance_backend)


def test_check(conformance_results: Results, conformance_backend: str, conformance_check: str) -> None:
    """One check on the random cases, and on those of a trace where one is given."""
    _assert_passed(conformance_results, "random", conformance_backend, conformance_check)


def _assert_passed(results: Results, stage: Stage, backend: str, check: str | None = None) -> None:
    __tracebackhide__ = True
    text = results.failures(stage, backend, check)
    if text is not None:
        pytest.fail(text, pytrace=False)
    if not results.looked(stage, backend, check):
        pytest.skip("nothing that this check looks at came up on this backend")
