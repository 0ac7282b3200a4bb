"""The pytest plugin: options, markers, and the results that the suite `conformance.test_conformance` asserts.

pytest loads it in every run of an environment that it is installed in: nothing of weight is imported before the
suite is collected.
"""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from conformance.limits import at_least, seconds
from conformance.shadow import ROOMS, ShadowError, add_current_folder, require_free_name, require_own_rooms

if TYPE_CHECKING:
    from conformance.suite import Results

DEFAULT_CASES = 40
"""Random cases per backend: what keeps all built-in backends below a minute."""
DEFAULT_SESSIONS = 4

_HOME = Path(__file__).resolve().parent.parent
_SUITE = Path(__file__).with_name("test_conformance.py")
_RESULTS: pytest.StashKey[Results] = pytest.StashKey()
_NO_GPU: pytest.StashKey[str | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of attention backends")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="ask this backend: a built-in or announced name, 'prefill,decode', or pkg.mod:Class; "
        "may be repeated (default: all built-in ones and two hybrids)",
    )
    group.addoption(
        "--library",
        choices=("fake", "real"),
        help="which kernel libraries answer (default: real with -m gpu, else fake)",
    )
    group.addoption(
        "--require",
        choices=("gpu",),
        help="gpu: fail where no GPU answers; without it, tests that need one are skipped there",
    )
    group.addoption(
        "--variants",
        type=at_least(1),
        metavar="N",
        help="with real libraries: kernels that FlashInfer compiles, at most; cases are drawn for these (default: 12)",
    )
    group.addoption(
        "--conformance-mode",
        choices=("strict", "faithful"),
        default="strict",
        help="strict fakes record what the real library would silently get wrong (default: strict)",
    )
    group.addoption(
        "--device-sim",
        choices=("auto", "light", "full"),
        default="auto",
        help="which simulated CUDA device backends see that need a library (default: auto)",
    )
    group.addoption(
        "--engine-path",
        action="append",
        default=[],
        metavar="DIR",
        help="where the package of an engine lies that a backend adapts; may be repeated",
    )
    group.addoption(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask in worker processes, so that a crash or a hang costs one case (default: for real libraries, and "
        "where --workers or --deadline is given)",
    )
    group.addoption(
        "--workers", type=at_least(1), metavar="N", help="worker processes (default: one a GPU, else one)"
    )
    group.addoption(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="what one case on one backend may take before its worker is killed (default: 60)",
    )
    group.addoption(
        "--cases",
        type=at_least(0),
        default=DEFAULT_CASES,
        metavar="N",
        help=f"random cases per backend (default: {DEFAULT_CASES})",
    )
    group.addoption(
        "--sessions",
        type=at_least(0),
        default=DEFAULT_SESSIONS,
        metavar="N",
        help=f"random sessions per engine-level backend (default: {DEFAULT_SESSIONS})",
    )
    group.addoption(
        "--case-seed", type=at_least(0), default=0, metavar="N", help="of the random cases (default: 0)"
    )
    group.addoption("--trace-file", metavar="FILE", help="also ask the batches of a request trace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu: needs no GPU")
    config.addinivalue_line("markers", "gpu: needs a GPU and the real kernel libraries")
    config.addinivalue_line("markers", "slow: needs no GPU, but too long for every change (make test-all)")
    config.addinivalue_line("markers", "engine: needs an engine that is installed (make engine)")
    why = missing_gpu(config)
    if why is not None and config.getoption("require") == "gpu":
        raise pytest.UsageError(f"{why}, and --require gpu asks for one")
    asked = config.getoption("backend") or config.getoption("trace_file") or library(config) != "fake"
    if why is None and (asked or config.getoption("device_sim") == "full"):
        results(config)


def library(config: pytest.Config) -> Literal["fake", "real"]:
    """Which kernel libraries answer in this run."""
    given = config.getoption("library")
    words: list[str] = re.findall(r"\w+", config.getoption("markexpr") or "")
    return given or ("real" if "gpu" in words and not {"cpu", "not"} & {*words} else "fake")


def missing_gpu(config: pytest.Config) -> str | None:
    """Why no GPU answers, in one sentence, where this run asks for one; None: it does, or none is asked for."""
    if library(config) == "fake" and config.getoption("require") != "gpu":
        return None
    if _NO_GPU not in config.stash:
        from conformance.gpu import require_gpu_elsewhere
        from conformance.machine import NoGPU

        try:
            require_gpu_elsewhere()
            config.stash[_NO_GPU] = None
        except NoGPU as error:
            config.stash[_NO_GPU] = str(error)
    return config.stash[_NO_GPU]


def pytest_unconfigure(config: pytest.Config) -> None:
    computed = config.stash.get(_RESULTS, None)
    if computed is not None:
        computed.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """From elsewhere, `--pyargs conformance` means the suite, not this package's own tests."""
    if config.rootpath == _HOME or not collection_path.name.startswith("test_"):
        return None
    return True if _FOLDERS & {*collection_path.parents} and collection_path != _SUITE else None


_FOLDERS = {_HOME / room for room in ROOMS}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    real, why = library(config) == "real", missing_gpu(config)
    for item in items:
        if item.path == _SUITE and real:
            item.add_marker(pytest.mark.gpu)
        ours = any(folder in item.path.parents for folder in _FOLDERS)
        if ours and not any(item.get_closest_marker(other) for other in ("gpu", "engine", "slow")):
            item.add_marker(pytest.mark.cpu)
        if why is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance_backend" not in metafunc.fixturenames:
        return
    from conformance.checks import CHECKS

    if missing_gpu(metafunc.config) is not None:
        names = [
            name for name in ("conformance_backend", "conformance_check") if name in metafunc.fixturenames
        ]
        metafunc.parametrize(names, [("no GPU",) * len(names)], ids=["no GPU"])
        return
    names = results(metafunc.config).names
    if "conformance_check" in metafunc.fixturenames:
        cells = [(name, check) for name in names for check in CHECKS if check != "smoke"]
        ids = [f"{name}-{check}" for name, check in cells]
        metafunc.parametrize(("conformance_backend", "conformance_check"), cells, ids=ids)
    else:
        metafunc.parametrize("conformance_backend", names, ids=names)


def results(config: pytest.Config) -> Results:
    """What the backends that were asked for came to; computed when a test first looks.

    Raises:
        pytest.UsageError: an option that makes no sense, a backend or a library that cannot be had.
    """
    if _RESULTS not in config.stash:
        capture: Any = config.pluginmanager.getplugin("capturemanager") if library(config) == "real" else None
        with nullcontext() if capture is None else capture.global_and_fixture_disabled():  # compiling is told
            config.stash[_RESULTS] = _results(config)
    return config.stash[_RESULTS]


def _results(config: pytest.Config) -> Results:
    option: Any = config.getoption
    try:
        require_own_rooms()
        add_current_folder()
        for name in option("backend"):
            require_free_name(name)
    except ShadowError as error:
        raise pytest.UsageError(str(error)) from None
    from backends.engines.path import look_in
    from conformance.choices import WRONG_USAGE
    from conformance.suite import Results

    try:
        for folder in option("engine_path"):
            look_in(folder)
        return Results(
            option("backend"),
            library=library(config),
            mode=option("conformance_mode"),
            device_sim=option("device_sim"),
            isolate=option("isolate"),
            workers=option("workers"),
            deadline=option("deadline"),
            variants=option("variants"),
            cases=option("cases"),
            sessions=option("sessions"),
            seed=option("case_seed"),
            trace=option("trace_file"),
            folder=config.rootpath / ".conformance",
        )
    except WRONG_USAGE as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def conformance_results(request: pytest.FixtureRequest) -> Results:
    """The verdicts on every backend, for the suite."""
    return results(request.config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    why = config.stash.get(_NO_GPU, None)
    if why is not None:
        terminalreporter.line(f"conformance: nothing ran on a GPU: {why}")
    computed = config.stash.get(_RESULTS, None)
    if computed is not None and computed.computed:
        terminalreporter.section("conformance")
        for line in computed.summary():
            terminalreporter.line(line)
