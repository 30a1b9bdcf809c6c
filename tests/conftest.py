"""The tests have a store and a build folder of their own, for the notebooks too; the repository is not touched."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SCRATCH = Path(tempfile.mkdtemp(prefix="book-tests-"))
os.environ |= {"BOOK_STORE": str(SCRATCH / "store"), "BOOK_BUILD": str(SCRATCH / "build")}
for name in ("BOOK_DIR", "BOOK_RESULTS"):
    os.environ.pop(name, None)


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
