"""What plans leave behind for the end of the process."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import os
from fakes import cuda
from fakes.flashinfer import staging
from fakes.test_staging import _plan, _run, _wrapper

with cuda.simulated_cuda("light"):
    wrapper = _wrapper()
    _plan(wrapper)
    _run(wrapper)
os.kept = wrapper, staging  # os goes late, when names in the module are gone
"""


def test_a_process_may_end_with_a_plan_in_flight() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
