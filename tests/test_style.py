"""The code passes ruff's checks, as configured in pyproject.toml."""

import subprocess
import sys

from lib import chapters


def test_ruff_has_nothing_to_say():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", "--no-cache", "."],
        cwd=chapters.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
