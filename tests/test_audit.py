"""The audit: runs are read back from the lines that the book ships, trained again, and told apart from others."""

import csv
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import RESULTS

from lib import audit
from lib.__main__ import main
from lib.config import InputError
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Store, freeze
from lib.sweep import make_up
from lib.tasks import Language, LinearMap, SingleLocation

MODEL = Transformer(layers=1, heads=2, width=16)
RUNS = [
    Run(task=LinearMap(S=4, s=2), model=MODEL, training=Training(optimizer="adamw", learning_rate=3e-3, weight_decay=0.01, batch=16, steps=60, stop_below=None)),
    Run(task=SingleLocation(T=8, d=4), model=MODEL, training=Training(steps=40, batch=8), seed=3),
    Run(task=LinearMap(S=6, s=2), model=MODEL, training=Training(steps=30, batch=8, stop_below=None), seed=1),
]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A folder of results frozen from three short runs."""
    folder = tmp_path_factory.mktemp("shipped")
    store = Store(folder / "store").open()
    make_up(RUNS, store, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOOK_RESULTS", str(folder / "results"))
        freeze(RUNS, store, "mine", "quick")
    return folder / "results"


@pytest.fixture
def results(shipped, tmp_path, monkeypatch):
    shutil.copytree(shipped, tmp_path / "results")
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("BOOK_BUILD", str(tmp_path / "build"))
    return tmp_path / "results"


def test_every_shipped_line_is_read_back_as_the_run_that_it_names():
    lines = audit.shipped(RESULTS)
    assert len(lines) > 300 and {audit.rebuild(line).key for line in lines} == {line["run"] for line in lines}


def test_a_row_is_read_back_whatever_its_task():
    apart = RUNS[0].model_copy(update={"seed": 3, "init_seed": 0, "data_seed": 5})
    for run in (*RUNS, apart, Run(task=Language(rates=[0.1, 0.2, 0.3, 0.25]), model=Transformer(layers=2, heads=2, width=8))):
        assert Run.from_row(run.row()) == run


def test_runs_made_again_are_equal_to_the_bit(results, capsys):
    assert main(["audit", "-n", "3", "--workers", "1"]) == 0
    record = json.loads((results.parent / "build" / "audit.json").read_text())
    assert [row["equal"] for row in record["runs"]] == [True] * 3 and record["eligible"] == 3
    assert {row["run"] for row in record["runs"]} == {run.key for run in RUNS}
    assert "drawn with seed" in capsys.readouterr().out


def test_results_that_the_code_does_not_give_are_found(results, capsys):
    path = results / "mine.quick.parquet"
    curves = pd.read_parquet(path)
    curves.loc[curves["run"] == RUNS[1].key, "test_loss"] += np.float32(0.1)
    curves.to_parquet(path)
    assert pq.read_table(path).num_rows == len(curves)
    assert main(["audit", "-n", "3", "--workers", "1"]) == 1
    assert RUNS[1].key in capsys.readouterr().err
    rows = json.loads((results.parent / "build" / "audit.json").read_text())["runs"]
    assert {row["run"]: row["agrees"] for row in rows} == {RUNS[0].key: True, RUNS[1].key: False, RUNS[2].key: True}


def test_a_line_that_says_another_run_than_its_name_is_refused(results):
    path = results / "mine.quick.csv"
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert audit.rebuild(lines[0])
    with pytest.raises(InputError, match="is called .* today"):
        audit.rebuild(lines[0] | {"learning_rate": "0.5"})
    with pytest.raises(InputError, match="cannot be read back"):
        audit.rebuild(lines[0] | {"task": "nothing"})


@pytest.mark.parametrize("fell, agrees", [(100, True), (109, True), (130, False)])
def test_the_tolerance_is_what_it_says(fell, agrees):
    steps = np.arange(0, 400, 3)
    old, new = (pd.DataFrame({"step": steps, "test_loss": np.where(steps < when, 0.7, 0.0)}) for when in (100, fell))
    outcome = {"status": "finished", "steps": 399}
    assert audit.compare((outcome, old), (outcome, new))["agrees"] == agrees


def test_more_runs_than_are_shipped_are_one_clear_line(results, capsys):
    assert main(["audit", "-n", "9"]) == 2
    assert "choose 1 to 3" in capsys.readouterr().err and not (results.parent / "build").exists()
