"""`conformance fidelity`: the same library calls on fakes and on real libraries, sound and malformed, compared."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping

from conformance.errors import UsageError
from conformance.fidelity import record, report, run
from conformance.fidelity.call import ENTRIES, LibraryCall
from conformance.fidelity.compare import Comparison, Disagreement, compare
from conformance.fidelity.generate import calls
from conformance.fidelity.record import Observations
from conformance.fidelity.shrink import shrink
from conformance.fidelity.verdict import Seen
from conformance.fidelity.workers import WorkerError
from conformance.limits import at_least
from fakes import releases

DEFAULT_CASES = 2000
LIBRARIES = ("flashinfer", "sgl_kernel")
Foreseen = Mapping[LibraryCall, Seen]
"""What the fakes did with the same calls: those that crash come last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("both", "observe", "compare", "compile"),
        default="both",
        help="both: ask the fakes here and the real libraries in workers, and compare (the default); observe: "
        "ask one of them and write a file; compare: compare two such files; compile: let the real library "
        "compile the kernel variants that the calls need",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="compare: two files that observe wrote")
    parser.add_argument("--cases", type=at_least(1), default=DEFAULT_CASES, metavar="N", help="random calls")
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="of the random calls (default: 0)"
    )
    parser.add_argument("--library", choices=("fake", "real"), default="real", help="observe: which kind")
    parser.add_argument(
        "--library-version",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="a release, such as flashinfer=0.7.4: the fake stands for it, the real one must be it",
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="both: instead of the real libraries ask the fakes of these releases",
    )
    parser.add_argument("--entry", action="append", default=[], metavar="NAME", help="only this entry point")
    parser.add_argument(
        "--ask",
        choices=("all", "calls", "rules"),
        default="all",
        help="random calls, contract rules, or both",
    )
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes that share the GPU")
    parser.add_argument(
        "--out", metavar="FILE", help="where observe writes; both writes FILE.fake and FILE.real"
    )
    parser.add_argument(
        "--expected",
        metavar="FILE",
        help="what the fakes did with the same calls, for the order of the real ones (default: ask them)",
    )
    parser.add_argument(
        "--list-variants", action="store_true", help="list the kernel variants that FlashInfer will compile"
    )


def main(args: argparse.Namespace) -> int:
    entries = _entries(args.entry)
    libraries = [name for name in LIBRARIES if any(_library(entry) == name for entry in entries)]
    if args.list_variants:
        print("\n".join(run.variants(libraries)))
        return 0
    if args.action == "compare":
        if len(args.files) != 2:
            raise UsageError(f"compare takes two files, got {len(args.files)}")
        return _tell(compare(*(record.read(path) for path in args.files)), lambda found: found)
    if args.files:
        raise UsageError(f"{args.action} takes no files, got {args.files[0]}")
    if args.action == "observe" and not args.out:
        raise UsageError("observe needs --out FILE")
    record.require_writable(*_written(args))
    versions = dict.fromkeys(libraries, "") | _versions(args.library_version, libraries)
    drawn = [] if args.ask == "rules" else list(dict.fromkeys(calls(args.cases, args.seed, entries)))
    expected = record.read(args.expected).calls if args.expected else None
    try:
        if args.action == "compile":
            _real(args, [], versions, {}, rules=False)
            return 0
        return (_observe if args.action == "observe" else _both)(args, drawn, versions, expected)
    except WorkerError as error:
        raise UsageError(str(error)) from error


def _written(args: argparse.Namespace) -> list[str]:
    """The files that this command is going to write."""
    if not args.out or args.action == "compile":
        return []
    ends = {"observe": ("",), "both": (".fake", ".other" if args.against else ".real")}
    return [f"{args.out}{end}" for end in ends[args.action]]


def _entries(wanted: list[str]) -> tuple[str, ...]:
    for name in wanted:
        if name not in ENTRIES:
            raise UsageError(f"unknown entry point {name!r} (known: {', '.join(ENTRIES)})")
    return tuple(wanted) or ENTRIES


def _library(entry: str) -> str:
    return "flashinfer" if entry.startswith("fi.") else "sgl_kernel"


def _versions(words: list[str], libraries: list[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for word in words:
        name, _, version = word.partition("=")
        if name not in libraries or not version:
            raise UsageError(f"a library version is {word!r}, must be {' or '.join(libraries)} = a release")
        chosen[name] = version
    return chosen


def _known(versions: Mapping[str, str]) -> dict[str, str]:
    """Releases that fakes stand for: those given, else the default ones."""
    for name, version in versions.items():
        if version and version not in releases.KNOWN[name]:
            known = ", ".join(releases.KNOWN[name])
            raise UsageError(f"no fake of {name} {version}; known releases: {known}")
    return {name: version or releases.selected(name) for name, version in versions.items()}


def _nearest(versions: Mapping[str, str]) -> dict[str, str]:
    """The releases of fakes to compare real ones with: the same, without a local suffix, or the default."""
    return {
        name: next(
            (known for known in releases.KNOWN[name] if version == known or version.startswith(f"{known}.")),
            releases.selected(name),
        )
        for name, version in ((name, version.partition("+")[0]) for name, version in versions.items())
    }


def _fake(args: argparse.Namespace, drawn: list[LibraryCall], versions: Mapping[str, str]) -> Observations:
    return run.observe_fakes(drawn, versions, rules=args.ask != "calls", seed=args.seed)


def _observe(
    args: argparse.Namespace, drawn: list[LibraryCall], versions: dict[str, str], expected: Foreseen | None
) -> int:
    if args.library == "fake":
        seen = _fake(args, drawn, _known(versions))
    else:
        foreseen = _foreseen(drawn, versions) if expected is None else expected
        seen = _real(args, drawn, versions, foreseen, keep=args.out)
    record.write(args.out, seen)
    print(f"{seen.name}: {len(seen.calls)} calls and {len(seen.rules)} rules in {args.out}\n")
    print(report.table(seen))
    return 0


def _foreseen(drawn: list[LibraryCall], versions: Mapping[str, str]) -> Foreseen:
    print(f"asking the fakes which of {len(drawn)} calls may crash", file=sys.stderr, flush=True)
    return run.observe_fakes(drawn, _nearest(versions), rules=False).calls


def _real(
    args: argparse.Namespace,
    drawn: list[LibraryCall],
    versions: Mapping[str, str],
    expected: Foreseen,
    *,
    rules: bool | None = None,
    keep: str | None = None,
) -> Observations:
    return run.observe_real(
        drawn,
        versions,
        rules=args.ask != "calls" if rules is None else rules,
        expected=expected,
        workers=args.workers or max(1, (os.cpu_count() or 2) - 2),
        told=lambda line: print(line, file=sys.stderr, flush=True),
        seed=args.seed,
        journal=keep,
    )


def _both(
    args: argparse.Namespace, drawn: list[LibraryCall], versions: dict[str, str], expected: Foreseen | None
) -> int:
    if args.against:
        fakes = _known(versions)
        others = fakes | _known(_versions(args.against, list(versions)))
        fake, other = _fake(args, drawn, fakes), _fake(args, drawn, others)
    else:
        keep = f"{args.out}.real" if args.out else None
        foreseen = _foreseen(drawn, versions) if expected is None else expected
        other = _real(args, drawn, versions, foreseen, keep=keep)
        if keep:
            record.write(keep, other)
        fake = _fake(args, drawn, _nearest(other.versions))
    if args.out:
        record.write(f"{args.out}.fake", fake)
        if args.against:
            record.write(f"{args.out}.other", other)
    print(f"{report.table(fake)}\n", flush=True)
    comparison = compare(fake, other)
    if not comparison.disagreements:
        return _tell(comparison, lambda found: found)
    with run.asking_again(fake.versions, other.versions, real=other.kind == "real") as ask:
        return _tell(comparison, lambda found: shrink(found, ask))


def _tell(comparison: Comparison, smaller: Callable[[Disagreement], Disagreement]) -> int:
    for line in report.findings(comparison, smaller):
        print(line, flush=True)
    if comparison.disagreements:
        print()
    print(report.summary(comparison))
    return 0 if comparison.clean else 1
