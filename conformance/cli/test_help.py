from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from conformance.__main__ import main

try:
    main(sys.argv[1:])
finally:
    print("imported torch" if "torch" in sys.modules else "without torch")
"""


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("option", "said"), [("--help", "ask backends many cases"), ("--version", "attention-conformance ")]
)
def test_a_look_at_the_command_does_not_wait_for_torch(option: str, said: str) -> None:
    asked = subprocess.run([sys.executable, "-c", SCRIPT, option], capture_output=True, text=True, check=True)
    assert said in asked.stdout
    assert asked.stdout.endswith("without torch\n")
