"""The bench measures what it says, in the contract's form. What it finds depends on the machine and is not tested."""

import json

from lib import bench
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import SingleLocation

SMALL = Run(
    task=SingleLocation(T=4, d=2), model=Transformer(layers=1, heads=1, width=8),
    training=Training(steps=20, every=10, eval_size=8, stop_below=10.0, tail=0.0),
)


def test_bench_leaves_the_contract_s_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ALTERNATIONS", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.05)
    monkeypatch.setitem(bench.CASES, "regression T 64", SMALL)
    said = []
    rows = bench.bench(tmp_path / "bench.json", {"small": SMALL}, [SMALL], said.append)
    assert rows == json.loads((tmp_path / "bench.json").read_text()) and len(said) == 1 + len(rows) == 4
    keys = {"case", "ours", "plain", "ratio", "roofline_fraction", "device", "threads"}
    assert all(keys <= set(row) and min(row["ours"], row["plain"]) > 0 for row in rows)
    assert rows[0]["ratio"] == rows[0]["ours"] / rows[0]["plain"]


def test_flops_are_those_of_the_matrix_products_we_do():
    """One layer, read at one position: counted by hand, forward and twice that backward, less what needs no gradient."""
    task, model = SingleLocation(T=64, d=16), Transformer(layers=1, heads=1, width=32, mlp=False)
    run = Run(task=task, model=model, training=Training(batch=32))
    embed, once = 32 * 64 * 17 * 32, 32 * 32 * 32
    forward = 2 * (embed + 5 * once + 2 * 32 * 64 * 32)  # q, k, v, o and read on one position; scores and pooling
    assert 2 * forward < bench.step_flops(run) < 3.2 * forward
