"""Random numbers that cost no generator: stretches of one table of normal noise, at hashed offsets."""

from __future__ import annotations

from functools import cache

import numpy as np

_TABLE = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15


@cache
def _noise() -> np.ndarray:
    return np.random.default_rng(20261129).standard_normal(_TABLE).astype(np.float32)


@cache
def _stretches(width: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(_noise(), width)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, *parts: np.ndarray) -> np.ndarray:
    """Hash of the parts, elementwise, as uint64."""
    h = np.uint64((seed + 1) * _GOLDEN % (1 << 64))
    for part in parts:
        h = _mix(h + part.astype(np.uint64) * np.uint64(_GOLDEN))
    return np.asarray(h)


def salted(h: np.ndarray, salt: np.ndarray | int) -> np.ndarray:
    """A further hash of each one, broadcast against `salt`."""
    return _mix(h + np.asarray(salt, dtype=np.uint64) * np.uint64(_GOLDEN))


def rows(keys: np.ndarray, width: int) -> np.ndarray:
    """float32 `[*keys.shape, width]`: a stretch of noise for each key."""
    return _stretches(width)[(keys % np.uint64(_TABLE - width)).astype(np.int64)]


def order(seed: int, count: int) -> list[int]:
    """The numbers below `count` in random order."""
    first = seed * _GOLDEN % (1 << 64) % max(_TABLE - count, 1)
    found: list[int] = _noise().take(np.arange(first, first + count), mode="wrap").argsort().tolist()
    return found
