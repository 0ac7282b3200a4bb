"""Known failures: TOML files beside the backends, one entry a fault; the reader, and the predicates that they use."""

from backends.waivers.entry import KINDS, Waiver, WaiverError, load, waivers_of

__all__ = ["KINDS", "Waiver", "WaiverError", "load", "waivers_of"]
