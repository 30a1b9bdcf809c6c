"""The bench measures what it says, in the contract's form. What it finds depends on the machine and is not tested."""

import functools
import json

import torch

from lib import bench
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import SingleLocation

KEYS = {"case", "ours", "plain", "ratio", "roofline_fraction", "device", "threads"}
SMALL = Run(
    task=SingleLocation(T=4, d=2), model=Transformer(layers=1, heads=1, width=8),
    training=Training(steps=20, every=10, eval_size=8, stop_below=10.0, tail=0.0),
)


def test_bench_leaves_the_contract_s_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ALTERNATIONS", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.05)
    monkeypatch.setitem(bench.CASES, "regression T 64", SMALL)
    monkeypatch.setattr(bench, "memory", functools.partial(bench.memory, 1, 2))
    monkeypatch.setattr(bench, "GROWTH", {"T": [SMALL.task], "members": [3], "width": [16]})
    said = []
    rows = bench.bench(tmp_path / "bench.json", {"small": SMALL}, [SMALL], said.append)
    assert rows == json.loads((tmp_path / "bench.json").read_text()) and len(said) == 1 + 4 and len(rows) == 4 + 3
    assert all(KEYS <= set(row) and row["ours"] > 0 for row in rows)
    assert all(row["ratio"] == row["ours"] / row["plain"] for row in (rows[0], rows[-2]))
    assert 0 < rows[0]["optimizer"] < 1
    assert [(row["vary"], row["value"]) for row in rows if "vary" in row] == [("T", 4), ("members", 3), ("width", 16)]


def test_the_bench_for_a_gpu_on_this_device(tmp_path, monkeypatch):
    """Everything but the capture: sizes of the stack against the plain loop, and where memory ends."""
    monkeypatch.setattr(bench, "SECONDS", 0.05)
    real = bench.seconds

    def small_device(run, steps, members=1, device="cpu", eval_size=1):
        if members > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(run, steps, members, device, eval_size)

    monkeypatch.setattr(bench, "seconds", small_device)
    rows = bench.bench_gpu(tmp_path / "bench-gpu.json", {"small": SMALL}, [1, 2, 4, 8], "cpu", lambda line: None)
    assert rows == json.loads((tmp_path / "bench-gpu.json").read_text())
    assert [row["members"] for row in rows] == [1, 2] and all(KEYS <= set(row) for row in rows)


def test_flops_are_those_of_the_matrix_products_we_do():
    """One layer, read at one position: counted by hand, forward and twice that backward, less what needs no gradient."""
    task, model = SingleLocation(T=64, d=16), Transformer(layers=1, heads=1, width=32, mlp=False)
    run = Run(task=task, model=model, training=Training(batch=32))
    embed, once = 32 * 64 * 17 * 32, 32 * 32 * 32
    forward = 2 * (embed + 5 * once + 2 * 32 * 64 * 32)  # q, k, v, o and read on one position; scores and pooling
    assert 2 * forward < bench.step_flops(run) < 3.2 * forward
