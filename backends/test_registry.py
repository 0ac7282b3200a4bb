"""Every name resolves lazily, and every bad one gets one clear sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import registry
from backends.contract import Backend, Capabilities, KernelAdapter
from backends.hybrid import HybridBackend, meet
from backends.registry import BackendError, describe, names, resolve, spec_of
from backends.test_support import make_batch, small_engine
from backends.torch_sdpa import TorchBackend
from cases.model import Phase
from cases.wanted import Variant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_built_in_name_resolves(name: str) -> None:
    spec = resolve(name)
    assert spec.name == name
    assert spec.level == ("kernel" if name.startswith("kernel:") else "engine")
    assert spec.capabilities.library == {"fi": {"flashinfer"}, "fa": {"sgl_kernel"}}.get(
        re.sub("kernel:|-.*", "", name), set()
    )
    wanted = Backend if spec.level == "engine" else KernelAdapter
    assert issubclass_of(spec.factory, wanted)
    assert name in names()


def issubclass_of(cls: object, protocol: type) -> bool:
    public = [m for m in vars(protocol) if not m.startswith("_") and callable(vars(protocol)[m])]
    return all(callable(getattr(cls, m)) for m in public)


def test_naming_every_backend_imports_no_kernel_library_and_touches_no_gpu() -> None:
    code = (
        "import sys, torch\n"
        "from backends.registry import names, resolve\n"
        "assert 'backends.fi' not in sys.modules\n"
        "resolve('torch')\n"
        "assert 'backends.fi_base' not in sys.modules and 'backends.fa' not in sys.modules\n"
        "[resolve(name) for name in names()]; resolve('fa,fi')\n"
        "assert 'backends.fi' in sys.modules\n"
        "assert not {'flashinfer', 'sgl_kernel'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_hybrid_is_the_meet_of_its_parts() -> None:
    spec = resolve("fa,fi")
    assert spec.name == "fa,fi"
    caps = spec.capabilities
    assert caps.library == {"flashinfer", "sgl_kernel"}
    assert caps.head_dims == {(64, 64), (128, 128), (256, 256)}
    assert caps.phases == {"prefill", "decode"}
    assert caps.window
    assert caps.lse is None, "LSEs of base e and base 2 are not one LSE"
    assert resolve("fi,fi-paged").capabilities.lse == "2"
    assert resolve("fi,fi").name == "fi"


def test_a_class_may_declare_variants() -> None:
    class Declares(TorchBackend):
        capabilities = Capabilities(variants=(Variant(), Variant(window=True)))

    assert spec_of(Declares).capabilities.variants == Declares.capabilities.variants


def test_meet_keeps_what_both_parts_declare() -> None:
    every = Capabilities(
        library=frozenset({"flashinfer"}),
        dtypes=frozenset({"float16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        page_sizes=frozenset({16}),
        layouts=frozenset({"HND"}),
        head_dims=frozenset({(64, 64)}),
        group_sizes=frozenset({4}),
        non_causal=True,
        window=True,
        layer_windows=True,
        soft_cap=True,
        custom_mask=True,
        rows_without_keys=True,
        batches_without_keys=False,
        empty_requests=True,
        strided=False,
        lse="2",
        empty_lse="sentinel",
        bit_equal=True,
        variants=(Variant(soft_cap=True),),
        reads_unowned_slots=True,
        cuda_graph=True,
        host_reads=2,
    )
    default = Capabilities()
    kernel_only = {"level", "merges", "phases"}
    assert [f.name for f in fields(every) if getattr(every, f.name) == getattr(default, f.name)] == [
        f.name for f in fields(every) if f.name in kernel_only
    ], "a field is missing above"
    assert meet(every, every) == every
    mixed = meet(every, default)
    assert (mixed.page_sizes, mixed.window, mixed.strided, mixed.lse) == (frozenset({16}), False, False, None)
    assert mixed.reads_unowned_slots
    assert not mixed.cuda_graph
    assert mixed.host_reads is None, "one part is not judged"
    assert meet(default, every).cuda_graph, "only decode batches are captured"


def test_meet_takes_each_phase_from_its_part() -> None:
    prefill = Capabilities(phases=frozenset({"prefill"}))
    decode = Capabilities(phases=frozenset({"decode"}))
    assert meet(prefill, decode).phases == {"prefill", "decode"}
    assert meet(decode, prefill).phases == frozenset()


def test_hybrid_dispatches_on_the_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module(
        tmp_path,
        monkeypatch,
        "class Base:\n"
        "    def __init__(self, engine): self.seen = []\n"
        "    def prepare_metadata(self, batch): self.seen.append(batch.phase)\n"
        "    def forward(self, q, k, v, layer_id, batch): return type(self).__name__\n"
        "class P(Base): pass\n"
        "class D(Base): pass\n",
    )
    engine = small_engine(torch.zeros(1, 4, dtype=torch.int32))
    hybrid = resolve("mine:P,mine:D").factory(engine)
    assert isinstance(hybrid, HybridBackend)
    parts: dict[Phase, str] = {"prefill": "P", "decode": "D"}
    for phase, part in parts.items():
        batch = make_batch(engine, [(0, 1)], phase)
        hybrid.prepare_metadata(batch)
        assert hybrid.forward(None, None, None, 0, batch) == part  # pyright: ignore[reportArgumentType]
    assert hybrid.parts["prefill"].seen == ["prefill"]
    assert hybrid.parts["decode"].seen == ["decode"]


GOOD = (
    "class Good:\n"
    "    def __init__(self, engine): pass\n"
    "    def prepare_metadata(self, batch): pass\n"
    "    def forward(self, q, k, v, layer_id, batch): pass\n"
)


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_class_of_ones_own_needs_no_declaration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module(tmp_path, monkeypatch, GOOD)
    spec = resolve("mine:Good")
    assert spec.capabilities == Capabilities()
    assert not spec.refuses
    module(tmp_path, monkeypatch, GOOD + "    refuses = True\n")
    assert resolve("mine:Good").refuses


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fii", r"unknown backend 'fii'; did you mean 'fi'\? \(known: torch, fi, .*, or pkg.mod:Class\)"),
        ("kernel:fi-decod", r"unknown backend 'kernel:fi-decod'; did you mean 'kernel:fi-decode'\?"),
        ("zzzz", r"unknown backend 'zzzz' \(known: torch, "),
        ("fa,", "backend 'fa,' is neither one name nor a pair 'prefill,decode'"),
        ("", "backend '' is neither one name nor a pair"),
        ("a,b,c", "backend 'a,b,c' is neither one name nor a pair"),
        ("fa,nope", "unknown backend 'nope'"),
        (
            "fa,kernel:fi-decode",
            "backend 'kernel:fi-decode' is a kernel adapter and cannot be part of a hybrid",
        ),
        (
            "no_such_pkg.mod:Class",
            "module no_such_pkg.mod does not import: ModuleNotFoundError: No module named",
        ),
        (":Class", "is not of the form pkg.mod:Class"),
        ("mine:", "is not of the form pkg.mod:Class"),
        (".mine:Good", "module .mine does not import: TypeError"),
        ("mine:Bad", "backend 'mine:Bad': module mine has no attribute Bad"),
        ("mine:number", "backend 'mine:number' is a int, expected a class"),
        ("mine:NoForward", "class NoForward lacks the method forward"),
        ("mine:NoPrepare", "class NoPrepare lacks the method prepare_metadata"),
        ("mine:NoAttend", "class NoAttend lacks the method attend"),
        ("mine:Declares", r"mine:Declares.capabilities is a dict, expected a backends.contract.Capabilities"),
        ("mine:BadLevel", "mine:BadLevel.capabilities.level is 'engin', expected 'engine' or 'kernel'"),
        ("mine:BadBase", "mine:BadBase.capabilities.lse is '10', expected None, 'e' or '2'"),
        ("mine:NoLse", r"class NoLse declares an LSE \(base e\) but lacks the method forward_return_lse"),
        ("mine:NoHooks", "class NoHooks declares cuda_graph but lacks the method init_capture_graph"),
        ("mine:TwoArguments", "class TwoArguments cannot be made from one EngineContext: missing a required"),
        ("mine:BadRefuses", "BadRefuses.refuses is 'yes', expected a bool"),
    ],
)
def test_bad_name_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, sentence: str
) -> None:
    declared = "class {0}(Good):\n    capabilities = {1}\n"
    module(
        tmp_path,
        monkeypatch,
        "from backends.contract import Capabilities\n"
        "number = 3\n"
        + GOOD
        + "class NoForward(Good):\n    forward = None\n"
        + "class NoPrepare(Good):\n    prepare_metadata = None\n"
        + declared.format("NoAttend", "Capabilities(level='kernel')")
        + declared.format("Declares", "{}")
        + declared.format("BadLevel", "Capabilities(level='engin')")
        + declared.format("BadBase", "Capabilities(lse='10')")
        + declared.format("NoLse", "Capabilities(lse='e')")
        + declared.format("NoHooks", "Capabilities(cuda_graph=True)")
        + "class TwoArguments(Good):\n    def __init__(self, engine, more): pass\n"
        + "class BadRefuses(Good):\n    refuses = 'yes'\n",
    )
    with pytest.raises(BackendError, match=sentence) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


COUNTS = "a frozenset of ints from 1 to 4096 or None"
PAIRS = r"a frozenset of pairs \(qk, vo\) of ints from 1 to 4096 or None"


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        (
            {"dtypes": {"fp16"}},
            "dtypes holds 'fp16', expected a frozenset of 'float16', 'bfloat16' or 'float32'",
        ),
        ({"dtypes": {torch.float16}}, "dtypes holds torch.float16, expected a frozenset of 'float16', "),
        ({"dtypes": set()}, "dtypes is empty, expected a frozenset of at least one of 'float16', "),
        ({"phases": {"prefil"}}, "phases holds 'prefil', expected a frozenset of 'prefill' or 'decode'"),
        ({"phases": set()}, "phases is empty, expected "),
        ({"library": {"flashinfr"}}, "library holds 'flashinfr', expected a frozenset of 'flashinfer' or "),
        ({"library": "flashinfer"}, "library is 'flashinfer', expected a frozenset of 'flashinfer' or "),
        (
            {"kv_dtypes": {"fp8"}},
            "kv_dtypes holds 'fp8', expected a frozenset of 'float8_e4m3fn' or 'float8_e5m2'",
        ),
        ({"page_sizes": {"16"}}, f"page_sizes holds '16', expected {COUNTS}"),
        ({"page_sizes": {0}}, f"page_sizes holds 0, expected {COUNTS}"),
        ({"page_sizes": {True}}, f"page_sizes holds True, expected {COUNTS}"),
        ({"page_sizes": [16]}, rf"page_sizes is \[16\], expected {COUNTS}"),
        ({"layouts": {"nhd"}}, "layouts holds 'nhd', expected a frozenset of 'NHD' or 'HND'"),
        ({"head_dims": {64}}, f"head_dims holds 64, expected {PAIRS}"),
        ({"head_dims": {(5000, 5000)}}, rf"head_dims holds \(5000, 5000\), expected {PAIRS}"),
        ({"group_sizes": "4"}, f"group_sizes is '4', expected {COUNTS}"),
        ({"lse": []}, r"lse is \[\], expected None, 'e' or '2'"),
        ({"empty_lse": "foo"}, "empty_lse is 'foo', expected '-inf' or 'sentinel'"),
        ({"window": 1}, "window is 1, expected True or False"),
        ({"host_reads": -1}, "host_reads is -1, expected an int from 0 on, None or 'auto'"),
        ({"variants": (3,)}, r"variants is \(3,\), expected a tuple of cases.wanted.Variant"),
        (
            {"variants": (Variant(dtype="half"),)},
            "variants: dtype is 'half', expected 'float16', 'bfloat16' or ",
        ),
    ],
)
def test_declaration_that_means_nothing_is_refused(declared: dict[str, Any], sentence: str) -> None:
    values: dict[str, Any] = {
        name: frozenset(value) if isinstance(value, set) else value for name, value in declared.items()
    }

    mine = type("Mine", (TorchBackend,), {"capabilities": Capabilities(**values), "__module__": "mine"})
    with pytest.raises(BackendError, match=f"^mine:Mine.capabilities.{sentence}") as caught:
        spec_of(mine)
    assert "\n" not in str(caught.value)


def test_class_of_no_module_is_a_backend() -> None:
    assert spec_of(type("Nowhere", (TorchBackend,), {"__module__": "nowhere"})).name == "nowhere:Nowhere"


def test_class_without_signature_is_refused() -> None:
    methods = {name: getattr(TorchBackend, name) for name in ("prepare_metadata", "forward")}
    with pytest.raises(BackendError, match="class Int cannot be made from one EngineContext: no signature"):
        spec_of(type("Int", (int,), methods))


def test_hybrid_of_parts_with_nothing_in_common_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = "".join(
        f"class {dtype.title()}(Good):\n    capabilities = Capabilities(dtypes=frozenset({{{dtype!r}}}))\n"
        for dtype in ("float16", "bfloat16")
    )
    module(tmp_path, monkeypatch, f"from backends.contract import Capabilities\n{GOOD}{lines}")
    with pytest.raises(BackendError, match="mine:Bfloat16': its parts declare no dtypes in common"):
        resolve("mine:Float16,mine:Bfloat16")


def test_module_that_fails_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module(tmp_path, monkeypatch, "raise RuntimeError('first\\nsecond')\n")
    with pytest.raises(BackendError, match=r"module mine does not import: RuntimeError: first$"):
        resolve("mine:Good")


def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, line: str) -> None:
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_entry_points_announce_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module(tmp_path, monkeypatch, GOOD)
    announce(tmp_path, monkeypatch, "mine-engine", "mine = mine:Good")
    assert names()[-1] == "mine"
    assert resolve("mine").name == "mine"
    assert resolve("mine,torch").name == "mine,torch"


@pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("fi", "backends.fi:FlashInferBackend and mine:Good"),
        ("mine", "(mine|other):Good and (mine|other):Good"),
    ],
)
def test_name_of_two_owners_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, owners: str
) -> None:
    announce(tmp_path, monkeypatch, "mine-engine", f"{name} = mine:Good")
    if name == "mine":
        announce(tmp_path, monkeypatch, "other-engine", f"{name} = other:Good")
    assert names().count(name) == 1
    with pytest.raises(BackendError, match=rf"backend '{name}' is ambiguous: {owners} both have that name"):
        resolve(name)
    assert resolve("torch").name == "torch", "another name is not disturbed"


def test_description_is_one_line_of_what_is_declared() -> None:
    assert describe("torch") == (
        "engine, decode+prefill, needs no library, dtypes bfloat16 float16 float32, page sizes any, "
        "layouts NHD, head dims any, groups any, cuda graph"
    )
    text = describe("kernel:fi-decode")
    assert "\n" not in text
    for part in (
        "kernel, decode, needs flashinfer",
        "float8_e4m3fn",
        "head dims 64/64 128/128",
        "lse base 2",
    ):
        assert part in text
