"""What a user may get wrong, apart from what a case, a backend, a library or a device says of itself."""

from __future__ import annotations


class UsageError(ValueError):
    """A choice that makes no sense. The message is one sentence."""
