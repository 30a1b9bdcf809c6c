"""The record of what is shipped: every file is counted, and every column explained."""

import shutil

import pandas as pd

from lib import chapters, published
from lib.models import MODELS
from lib.store import Frozen
from lib.tasks import TASKS


def test_nothing_that_is_shipped_is_without_an_explanation(monkeypatch):
    from conftest import RESULTS

    monkeypatch.setenv("BOOK_RESULTS", str(RESULTS))  # the quick ones, too
    assert len(published.files()) >= 6
    assert {path.name: published.unknown(path) for path in published.files()} == {path.name: set() for path in published.files()}
    assert all(kind.model_fields["kind"].default in published.dictionary() for kind in (*TASKS, *MODELS))


def test_a_column_that_nothing_explains_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path))
    from conftest import RESULTS

    runs, curves = pd.read_csv(RESULTS / "theory.laptop.csv"), pd.read_parquet(RESULTS / "theory.laptop.parquet")
    runs.assign(mystery=1).to_csv(tmp_path / "mine.quick.csv", index=False)
    curves.assign(riddle=1.0).to_parquet(tmp_path / "mine.quick.parquet")
    assert published.unknown(*published.files()) == {"mystery", "riddle"}


def test_the_summary_counts_what_the_files_hold(monkeypatch):
    from conftest import RESULTS

    monkeypatch.setenv("BOOK_RESULTS", str(RESULTS))
    table = published.summary().set_index(["chapter", "profile"])
    runs = pd.read_csv(RESULTS / "regression.laptop.csv")
    mine = table.loc[("regression", "laptop")]
    assert mine["runs"] == len(runs) and mine["steps"] == runs["steps"].sum()
    assert abs(mine["core_hours"] - runs["wall_s"].sum() / 3600) < 1e-9
    assert mine["early"] + (runs["steps"] == runs["budget"]).sum() == len(runs)
    assert published.downloads().count("{download}") == 2 * len(table) + len(list(RESULTS.glob("*.measured.npz"))) >= 2 * len(table) + 4


def test_what_is_left_adds_up():
    table = published.ahead(("quick",)).set_index("chapter")
    assert {"regression", "linear_map", "scaling"} <= set(table.index) and (table["frozen"] <= table["runs"]).all()
    runs = {run.key: run for experiment in chapters.grid("linear_map").values() for run in experiment}
    assert table.loc["linear_map", "runs"] == len(runs)
    left = sum(run.training.steps for key, run in runs.items() if key not in Frozen().rows)
    assert table.loc["linear_map", "steps left"] == left


def test_the_tests_draw_a_third_of_the_quick_runs_to_train_again(tmp_path):
    """What conftest leaves out of the tests' own results: other runs with another draw, those that differ in `perturb` alone
    together, and all of them on demand."""
    from conftest import RESULTS, ship

    def kept(draw):
        shutil.rmtree(tmp_path / draw, ignore_errors=True)
        ship(RESULTS, tmp_path / draw, draw)
        return {path.name: set(pd.read_csv(path)["run"]) for path in sorted((tmp_path / draw).glob("*.csv"))}

    one, again, none = kept("1"), kept("2"), kept("all")
    for name, runs in one.items():
        everything = set(pd.read_csv(RESULTS / name)["run"])
        if ".quick." in name:
            assert 0.5 * len(everything) < len(runs) <= len(everything) - len(everything) // 3 and runs < everything
            assert again[name] != runs and name not in none
        else:
            assert runs == everything == none[name]
    assert any(".quick." in name for name in one)
    linear = pd.read_csv(RESULTS / "linear_map.quick.csv", dtype=str).fillna("")
    moved = linear[linear["perturb"] != "0.0"]
    alike = [name for name in linear if name not in ("run", "perturb", "status", "steps", "wall_s", "finished")]
    for draw in range(20):
        kept(str(draw))
        left = set(pd.read_csv(tmp_path / str(draw) / "linear_map.quick.csv")["run"])
        for _, family in linear.merge(moved[alike].drop_duplicates()).groupby(alike):
            assert len(family) > 1 and len(left & set(family["run"])) in (0, len(family))
