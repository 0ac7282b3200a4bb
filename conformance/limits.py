"""What a number that a user gives may be, at every door: the command line, pytest and `conformance.check`.

pytest's plugin imports this in every run of its environment: nothing of weight is imported.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole(value: object, least: int) -> int:
    """An integer from `least` on.

    Raises:
        TypeError, ValueError: it is none. The message, which follows the number's name, is the end of a sentence.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be an integer, got {_shown(value)}")
    if value < least:
        raise ValueError(f"must be at least {least}, got {_shown(value)}")
    return value


def require_whole(least: int, **values: object) -> None:
    """Make sure that arguments are integers from `least` on.

    Raises:
        TypeError, ValueError: one is not, in one sentence with its name.
    """
    for name, value in values.items():
        try:
            whole(value, least)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} {error}") from None


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least` on."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be an integer, got {_shown(text)}") from None
        try:
            return whole(value, least)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return integer


def seconds(text: str) -> float:
    """An argparse type: seconds, more than none."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number of seconds, got {_shown(text)}") from None
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
