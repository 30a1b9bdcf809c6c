"""The tests have a store, a build folder and results of their own, for the notebooks too; the repository is not touched.

Of the runs that are shipped at `quick` a third is left out, drawn anew each time, and trained again by the chapters; so is all
that they measure inside models. Runs that differ in `perturb` alone are left out together: a chapter compares them to the bit,
which holds on one kind of processor. BOOK_DRAW is the draw, printed at the top, to repeat one; BOOK_DRAW=all leaves out all of them.

Tests that inject faults count them through the fixture `faults`: a sample of each kind in `make test`; in `make soak`, where
BOOK_SOAK names a file, the full number, and what was counted is written there. Tests that were left out this time keep the
rows that they have there: after a failure that was mended, its test alone can be run again.
"""

import contextlib
import csv
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

from lib.store import MADE, OUTCOME

SCRATCH = Path(tempfile.mkdtemp(prefix="book-tests-"))
RESULTS = Path(__file__).resolve().parents[1] / "book" / "results"
DRAW = os.environ.setdefault("BOOK_DRAW", str(random.SystemRandom().randrange(10**6)))


def ship(source: Path, target: Path, draw: str) -> None:
    """Copy the shipped results; of those at `quick` all but the runs of this draw."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.quick.measured.npz", *["*.quick.*"] * (draw == "all")))
    for path in sorted(target.glob("*.quick.csv")):
        header, *lines = path.read_text().splitlines(keepends=True)
        alike = defaultdict(list)
        for line, row in zip(lines, csv.DictReader([header, *lines]), strict=True):
            alike[tuple(value for name, value in row.items() if name not in ("run", "perturb", *OUTCOME, *MADE))].append(line)
        families, left = random.Random(f"{draw} {path.name}").sample(list(alike.values()), len(alike)), len(lines)
        while left > len(lines) - len(lines) // 3:
            left -= len(families.pop())
        path.write_text("".join([header, *sum(families, [])]))


ship(RESULTS, SCRATCH / "results", DRAW)
os.environ |= {f"BOOK_{name.upper()}": str(SCRATCH / name) for name in ("store", "build", "results")}
os.environ.pop("BOOK_DIR", None)


SOAK = os.environ.get("BOOK_SOAK")
STARTED = time.monotonic()
COUNTED: dict[tuple[str, str], int] = defaultdict(int)  # (test, fault) -> how often
MEASURED: list[dict] = []
FAILED: set[str] = set()


class Faults:
    """How often this test injects a fault, and how often it did."""

    full = bool(SOAK)

    def __init__(self, test: str):
        self.test = test.split("[")[0]

    def times(self, sample: int, full: int) -> int:
        """The number for `make test`, or that for `make soak`."""
        return full if self.full else sample

    def count(self, fault: str, times: int = 1) -> None:
        """Say that a fault was injected."""
        COUNTED[self.test, fault] += times

    def measure(self, **row) -> None:
        """Keep a measured row beside the counts."""
        MEASURED.append(row)


@pytest.fixture
def faults(request):
    return Faults(request.node.nodeid)


def pytest_report_header():
    return f"BOOK_DRAW={DRAW}: the shipped quick runs that are trained again"


@pytest.fixture(scope="session")
def book():
    """The build folder after `python -m lib build`, in the tests' own store: what a fresh clone gets.

    Who works on the pages alone may name a build folder in BOOK_BUILT: it is taken as it is.
    """
    from lib import chapters

    if built := os.environ.get("BOOK_BUILT"):
        return Path(built).resolve()
    done = subprocess.run([sys.executable, "-m", "lib", "build"], capture_output=True, text=True, cwd=chapters.ROOT)
    assert done.returncode == 0, done.stderr
    return chapters.build_folder()


@pytest.fixture
def ax():
    """Axes in the book's style, drawn on no screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lib import plots

    with plt.rc_context():
        plots.use()
        figure, ax = plt.subplots()
        yield ax
        plt.close(figure)


@contextlib.contextmanager
def chromium():
    """Headless Chromium without a network; a thread needs one of its own."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Chromium, and finds none; on Debian: apt install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


def opened(browser, path, address=None, **options):
    """A page opened from disk, and what went wrong on it: failed requests, errors, refusals."""
    context = browser.new_context(offline=address is None, reduced_motion="reduce", **options)  # no colour is read half-way through its fade
    page, faults = context.new_page(), []
    page.on("requestfailed", lambda request: faults.append(f"{request.url}: {request.failure}"))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address or Path(path).resolve().as_uri(), wait_until="load")
    return page, faults


@pytest.fixture(scope="module")
def browser():
    """For a module at a time: the event loop that drives it is in the way of others."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """visit(path, **options): `opened` in this browser."""
    yield functools.partial(opened, browser)
    for context in browser.contexts:
        context.close()


def pytest_runtest_logreport(report):
    if report.failed:
        FAILED.add(report.nodeid.split("[")[0])


def merged(before: list[dict], counted: dict[tuple[str, str], int], failed: set[str]) -> list[dict]:
    """The rows of a soak: those of tests that were left out this time stay; whatever failed has not held, counted or not."""
    rows = [row for row in before if row["test"] not in {test for test, _ in counted}]
    rows += [{"fault": fault, "injected": n, "held": True, "test": test} for (test, fault), n in counted.items()]
    rows += [{"fault": "none: the test failed first", "injected": 0, "held": False, "test": t} for t in failed - {row["test"] for row in rows}]
    return [row | {"held": row["held"] and row["test"] not in failed} for row in rows]


def pytest_sessionfinish():
    if not SOAK:
        return
    from lib.bench import machine

    before = json.loads(Path(SOAK).read_text()) if Path(SOAK).exists() else {}
    rows, minutes = merged(before.get("faults", []), COUNTED, FAILED), (time.monotonic() - STARTED) / 60
    if {row["test"] for row in before.get("faults", [])} - {test for test, _ in COUNTED}:  # rows of that time stay, and so do its minutes
        minutes += before.get("minutes", 0)
    soak = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "minutes": round(minutes, 1), "faults": rows}
    soak |= {"measured": MEASURED or before.get("measured", [])}
    Path(SOAK).parent.mkdir(parents=True, exist_ok=True)
    Path(SOAK).write_text(json.dumps(soak, indent=1) + "\n")
    print(*(f"{row['injected']:7} {'held' if row['held'] else 'FAILED':6} {row['fault']}" for row in rows), sep="\n")


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
