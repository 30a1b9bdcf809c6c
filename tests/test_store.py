"""Nothing finished is lost, nothing damaged is trusted."""

import json
import os

import pytest

from lib.config import InputError
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Frozen, Store, freeze
from lib.sweep import sweep
from lib.tasks import SingleLocation
from lib.train import train

RUNS = [Run(task=SingleLocation(T=4, d=2), model=Transformer(layers=1, heads=1, width=8),
            training=Training(steps=20, eval_size=8), seed=s) for s in range(2)]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store").open()
    for result in train(RUNS):
        store.put(result)
    return store


def test_what_goes_in_comes_out(store):
    result = train(RUNS[:1])[0]
    outcome, curves = store.get(RUNS[0])
    assert outcome["status"] == "finished" and outcome["steps"] == 20
    assert curves["step"].tolist() == result.curves["step"]
    sidecar = json.loads(store.path(RUNS[0].key, ".json").read_text())
    assert Run.model_validate(sidecar["run"]).key == RUNS[0].key  # the configuration alone names the run


def test_a_finished_run_is_never_written_again_and_a_second_training_is_said(store, capsys):
    before = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.*") if p.is_file()}
    for result in train(RUNS):
        store.put(result)
    assert capsys.readouterr().err.count("was trained twice; do locks hold") == len(RUNS)
    sweep({"a": RUNS}, chapter="x", store=store)
    assert before == {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.*") if p.is_file()}


DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "bit flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": os.unlink,
}


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_runs_are_set_aside_named_and_made_again(store, how, suffix, capsys):
    _, intact = store.get(RUNS[0])
    DAMAGE[how](store.path(RUNS[0].key, suffix))
    results = sweep({"a": RUNS}, chapter="x", store=store)["a"]
    assert len(results.rows) == 2
    assert store.get(RUNS[0])[1].equals(intact)
    if (how, suffix) != ("gone", ".json"):  # without its sidecar a run is not there yet, as after a kill
        assert RUNS[0].key in capsys.readouterr().err
        assert list((store.folder / "damaged").iterdir())


def test_a_damaged_run_that_cannot_be_set_aside_is_named_in_one_line_and_stays(store):
    path = store.path(RUNS[0].key, ".parquet")
    path.write_bytes(damaged := path.read_bytes()[:-1])
    (store.folder / "damaged").touch()  # where the folder should be
    with pytest.raises(InputError, match=f"run {RUNS[0].key} is damaged .* cannot be set aside in .* \\(File exists\\); make .* writable"):
        sweep({"a": RUNS}, chapter="x", store=store, missing="skip")
    assert path.read_bytes() == damaged


def test_skip_shows_what_exists_and_counts_what_does_not(store, tmp_path):
    wanted = [*RUNS, RUNS[0].model_copy(update={"seed": 7})]
    some = sweep({"a": wanted}, chapter="x", store=store, missing="skip")["a"]
    assert (len(some.rows), some.wanted) == (2, 3) and "not run yet" in str(some)
    none = sweep({"a": wanted}, chapter="x", store=tmp_path / "absent", missing="skip")["a"]
    assert len(none.rows) == 0 and not (tmp_path / "absent").exists()


def test_frozen_results_equal_the_store(store, tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path / "results"))
    live = sweep({"a": RUNS}, chapter="x", store=store)["a"]
    assert freeze(RUNS, store, "x", "laptop") == 2
    thawed = sweep({"a": RUNS}, chapter="x", store=tmp_path / "absent", missing="skip")["a"]
    assert thawed.rows.drop(columns="wall_s").equals(live.rows.drop(columns="wall_s"))
    assert thawed.curves[live.curves.columns].astype(float, errors="ignore").equals(live.curves.astype(float, errors="ignore"))
    assert freeze(RUNS, Store(tmp_path / "absent"), "x", "laptop") == 2  # frozen runs outlive the live store
    assert len(Frozen().rows) == 2


def test_nothing_to_freeze_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path / "results"))
    with pytest.raises(InputError, match="no run of x at profile laptop"):
        freeze(RUNS, Store(tmp_path / "absent"), "x", "laptop")
    assert not (tmp_path / "results").exists()


def test_unwritable_store_gets_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to .*BOOK_STORE"):
        sweep({"a": RUNS}, chapter="x", store=tmp_path / "file" / "store")


def test_one_process_at_a_time_trains_a_run(store):
    with store.lock(RUNS[0]) as mine:
        assert mine
        with Store(store.folder).lock(RUNS[0]) as second:
            assert not second
    with store.lock(RUNS[0]) as mine:
        assert mine
