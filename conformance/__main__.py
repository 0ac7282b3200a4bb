"""The command `conformance`, also `python -m conformance`.

Exit codes: 0 all well, 1 findings, 2 wrong usage, 3 the harness itself failed; 130 interrupted, 141 output not read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.shadow import ShadowError, add_current_folder, require_own_rooms


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    try:
        require_own_rooms()
    except ShadowError as error:
        print(f"conformance: error: {error}", file=sys.stderr)
        return 2
    add_current_folder()
    try:
        from conformance.cli import run_command  # not before our packages are known to be ours

        return run_command(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # torch was being imported
        print("conformance: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
