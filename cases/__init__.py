"""What is asked: the `Case` record, its text form, strategies, named edge cases and real traces."""

from cases.codec import CaseFile, digest, from_json, load, save, short, to_json
from cases.errors import CaseError
from cases.model import (
    AnyRequest,
    Case,
    DType,
    Heads,
    KernelRequest,
    Kind,
    KVDType,
    Layout,
    Level,
    Mask,
    Phase,
    Placement,
    Request,
    Step,
    ValueKind,
)

__all__ = [
    "AnyRequest",
    "Case",
    "CaseError",
    "CaseFile",
    "DType",
    "Heads",
    "KVDType",
    "KernelRequest",
    "Kind",
    "Layout",
    "Level",
    "Mask",
    "Phase",
    "Placement",
    "Request",
    "Step",
    "ValueKind",
    "digest",
    "from_json",
    "load",
    "save",
    "short",
    "to_json",
]
