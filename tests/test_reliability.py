"""The counts that the book shows are those of a real soak of the tests that are here."""

import json
import re
from pathlib import Path

from lib import reliability
from lib.chapters import ROOT

SOAK = json.loads((ROOT / "book/results/soak.json").read_text())


def test_the_soak_that_is_shipped_injected_enough_and_all_promises_held():
    table = reliability.faults(SOAK)
    assert table["held"].all()
    assert reliability.injected(SOAK, "kill -9") >= 100
    assert reliability.injected(SOAK, "generated") >= 10_000
    assert SOAK["minutes"] <= 60
    assert reliability.promises(SOAK)["injected"].notna().all(), "a promise without a test"


def test_every_fault_it_counted_is_injected_by_a_test_that_is_still_here():
    for row in SOAK["faults"]:
        file, name = row["test"].split("::")
        assert re.search(rf"^def {name}\(", (Path(ROOT) / file).read_text(), re.M), row


def test_a_second_worker_helps():
    one, two = reliability.measured(SOAK, "sweep on dask workers").set_index("workers")["rate"]
    assert two > one
