"""The tests have a store, a build folder and results of their own, for the notebooks too; the repository is not touched.

Results frozen at `quick` are left out: whatever takes two minutes is trained for real.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SCRATCH = Path(tempfile.mkdtemp(prefix="book-tests-"))
RESULTS = Path(__file__).resolve().parents[1] / "book" / "results"
shutil.copytree(RESULTS, SCRATCH / "results", ignore=shutil.ignore_patterns("*.quick.*"))
os.environ |= {f"BOOK_{name.upper()}": str(SCRATCH / name) for name in ("store", "build", "results")}
os.environ.pop("BOOK_DIR", None)


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
