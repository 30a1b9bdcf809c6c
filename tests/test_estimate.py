"""What a sweep will cost is known before it starts."""

import time

import pytest
from test_sweep import grid

from lib.estimate import estimate
from lib.store import Store
from lib.sweep import sweep


def test_counts_what_is_missing_and_foretells_the_time(tmp_path):
    runs = [run.model_copy(update={"training": run.training.model_copy(update={"steps": 400, "stop_below": None})}) for run in grid(3)]
    table = estimate({"a": runs, "b": runs[:2]}, store=Store(tmp_path), workers=1, device="cpu").set_index("experiment")
    assert table.loc["all", ["runs", "missing", "member-steps"]].tolist() == [6, 6, 6 * 400]
    assert table.loc["b", "runs"] == 0  # shared with a
    start = time.perf_counter()
    sweep({"a": runs[:3]}, chapter="x", store=tmp_path, workers=1)
    took = time.perf_counter() - start
    rest = estimate({"a": runs}, store=Store(tmp_path), workers=1, device="cpu").iloc[-1]
    assert rest["missing"] == 3
    assert took == pytest.approx(3600 * table.loc["all", "hours"] / 2, rel=0.6)
