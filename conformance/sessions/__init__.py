"""Sessions of one's own making: a state machine of hypothesis over a backend."""

from conformance.sessions.machine import machine_for

__all__ = ["machine_for"]
