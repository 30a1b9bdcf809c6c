"""Measurements inside models: made once, found again, made anew when anything they depend on changes, shipped as frozen results."""

from pathlib import Path

import numpy as np
import pytest

from lib.config import InputError
from lib.measured import freeze, measuring
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Store
from lib.tasks import SingleLocation

RUNS = [Run(task=SingleLocation(T=4, d=2), model=Transformer(layers=1, heads=1, width=8), training=Training(steps=20, eval_size=8), seed=s) for s in range(2)]
CALLS: list = []
OFFSET = 1.0


def noted(value):
    """Not of a notebook: what is imported is taken as it is."""
    CALLS.append(value)
    return value


noted.__module__ = "elsewhere"


def twice(x):
    return 2 * x


def look(run, scale, names):
    return {"seed": noted(run.seed), "curve": twice(np.linspace(0, scale, 3)), "names": names, "true": [True, False]}


def leans(run):
    return {"curve": np.zeros(2) + OFFSET}


def object_of(run):
    return {"curve": [{"a": 1}]}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    CALLS.clear()
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path / "results"))
    (tmp_path / "results").mkdir()


def test_a_measurement_is_made_once_and_comes_back_as_it_was(tmp_path):
    measure = measuring("x", "laptop", Store(tmp_path / "store"))
    made = measure(look, RUNS[0], 1.5, ["a", "bc"])
    known = measure(look, RUNS[0], 1.5, ["a", "bc"])
    assert CALLS == [0]
    assert list(made) == list(known) == ["seed", "curve", "names", "true"]
    for name in made:
        assert made[name].dtype == known[name].dtype and np.array_equal(made[name], known[name])
    assert made["curve"].dtype == np.float32 and made["curve"].tolist() == [0, 1.5, 3] and made["names"].tolist() == ["a", "bc"]


def test_other_arguments_runs_or_sources_are_other_measurements(tmp_path, monkeypatch):
    measure = measuring("x", "laptop", Store(tmp_path / "store"))
    first = measure(look, RUNS[0], 1.0, [])
    assert measure(look, RUNS[1], 1.0, [])["seed"] == 1 and measure(look, RUNS[0], 2.0, [])["curve"][-1] == 4
    assert CALLS == [0, 1, 0]

    def twice(x):
        return 3 * x

    twice.__module__ = look.__module__
    monkeypatch.setitem(look.__globals__, "twice", twice)
    assert measure(look, RUNS[0], 1.0, [])["curve"][-1] == 3 != first["curve"][-1]  # a function that it uses was changed


def test_what_may_change_unseen_is_refused(tmp_path):
    measure = measuring("x", "laptop", Store(tmp_path / "store"))
    with pytest.raises(InputError, match="leans uses OFFSET, a variable from around it; hand it over"):
        measure(leans, RUNS[0])
    with pytest.raises(InputError, match="must be a run or plain values, not ndarray"):
        measure(look, RUNS[0], np.zeros(2), [])
    with pytest.raises(InputError, match="object_of returns curve of type object"):
        measure(object_of, RUNS[0])
    assert not (tmp_path / "store").exists()


def test_frozen_measurements_are_found_where_the_store_has_none(tmp_path):
    store = Store(tmp_path / "store")
    measure = measuring("x", "laptop", store)
    made = [measure(look, run, 1.0, []) for run in RUNS]
    measuring("y", "laptop", store)(look, RUNS[0], 7.0, [])  # another chapter's
    assert freeze([RUNS[0].key], store, "x", "laptop") == 1  # the other run is none of the grid
    assert freeze([run.key for run in RUNS], store, "x", "laptop") == 2
    elsewhere = measuring("x", "laptop", Store(tmp_path / "absent"))
    CALLS.clear()
    assert all(np.array_equal(elsewhere(look, run, 1.0, [])["curve"], known["curve"]) for run, known in zip(RUNS, made, strict=True))
    assert CALLS == [] and not (tmp_path / "absent").exists()
    assert freeze([run.key for run in RUNS], Store(tmp_path / "absent"), "x", "laptop") == 2  # they outlive the live store
    assert freeze([RUNS[0].key], store, "x", "quick") == 0 and not (tmp_path / "results/x.quick.measured.npz").exists()


def test_a_damaged_measurement_is_named_and_made_again_and_a_damaged_shipped_one_refused(tmp_path, capsys):
    store = Store(tmp_path / "store")
    measure = measuring("x", "laptop", store)
    whole = measure(look, RUNS[0], 1.0, [])
    freeze([RUNS[0].key], store, "x", "laptop")
    shipped, (mine,) = Path(tmp_path / "results/x.laptop.measured.npz"), (tmp_path / "store/measured").iterdir()
    assert capsys.readouterr().err == ""
    content = shipped.read_bytes()
    shipped.unlink()
    for damage in (content[:-30], content[:200] + bytes([content[200] ^ 1]) + content[201:], b"", b"\x80\x04K\x01."):
        mine.write_bytes(damage)
        CALLS.clear()
        again = measure(look, RUNS[0], 1.0, [])
        assert CALLS == [0] and np.array_equal(again["curve"], whole["curve"])
        assert str(mine) in (said := capsys.readouterr().err) and "made again" in said and said.count("\n") == 1
        shipped.write_bytes(damage)
        mine.unlink()
        with pytest.raises(InputError, match="measured.npz: damaged .*git checkout"):
            measure(look, RUNS[0], 1.0, [])
        shipped.unlink()
