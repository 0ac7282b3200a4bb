"""An argument parser whose mistakes are told like any other wrong usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from conformance.errors import UsageError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")
