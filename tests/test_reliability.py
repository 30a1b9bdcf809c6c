"""The counts that the book shows are those of a real soak of the tests that are here."""

import json
import re
from pathlib import Path

from conftest import merged

from lib import reliability
from lib.chapters import ROOT

SOAK = json.loads((ROOT / "book/results/soak.json").read_text())


def test_the_soak_that_is_shipped_injected_enough_and_all_promises_held():
    table = reliability.faults(SOAK)
    assert table["held"].all()
    assert reliability.injected(SOAK, "kill -9") >= 100
    assert reliability.injected(SOAK, "generated") >= 10_000
    assert SOAK["minutes"] <= 60
    assert reliability.promises(SOAK)["held"].all(), "a promise without a test"


def test_every_fault_it_counted_is_injected_by_a_test_that_is_still_here():
    for row in SOAK["faults"]:
        file, name = row["test"].split("::")
        assert re.search(rf"^def {name}\(", (Path(ROOT) / file).read_text(), re.M), row


def test_what_failed_has_not_held():
    """Also where nothing was counted this time: a failure may not hide behind the row of an earlier run."""
    row = {"fault": "x", "injected": 3, "held": True}
    before = [row | {"test": name} for name in ("kept", "fails", "mended")]
    rows = merged(before + [row | {"test": "mended", "held": False}], {("mended", "x"): 5, ("fails late", "y"): 1}, {"fails", "fails late", "fails first"})
    assert {row["test"]: row["held"] for row in rows} == {"kept": True, "fails": False, "mended": True, "fails late": False, "fails first": False}


def test_a_promise_that_no_test_was_run_for_has_not_held():
    table = reliability.promises(SOAK | {"faults": [row for row in SOAK["faults"] if "clock" not in row["test"]]})
    assert table.set_index("promise")["held"].to_dict() == {text: text != "A clock that jumps changes nothing" for text in reliability.PROMISES}


def test_a_second_worker_helps():
    one, two = reliability.measured(SOAK, "sweep on dask workers").set_index("workers")["rate"]
    assert two > one
