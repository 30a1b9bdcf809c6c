"""Our loop against the textbook one, interleaved in one run: `make bench`.

Plain is what a user would write: one nn.Module over the full sequence, autograd, torch.optim, one model at a time with
torch's own choice of threads. Ours is `lib.train.train`, one single-threaded worker a core. Same task, batch, widths and
loss; rates are member-steps a second. FLOPs are counted by torch on our own step, so what we need not compute counts for
nobody; the peak is that of float32 matrix products on all workers at once, measured in the same run.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib import chapters
from lib.config import InputError
from lib.files import write
from lib.models import Transformer
from lib.plain import PlainLoop
from lib.run import Run, Training
from lib.store import Store, processor, results_folder
from lib.sweep import make_up, sweep, worker_pool
from lib.tasks import AssociativeRecall, CellularAutomaton, LinearMap, SingleLocation
from lib.train import start, train

ALTERNATIONS = 5
SECONDS = 2.0  # of each side in each alternation
GPU_SIZES = [1 << n for n in range(11)]
SHORT = 10  # steps of the shorter run on a GPU: past its capture

MASKED = dict(causal=True, positions="learned", embedding="table", layer_norm=True)
ADAMW = dict(optimizer="adamw", learning_rate=1e-3, weight_decay=0.01)
CASES = {
    "linear map S 16, s 3": Run(
        task=LinearMap(S=16, s=3), model=Transformer(layers=1, width=128, heads=8, **MASKED), training=Training(batch=256, **ADAMW)
    ),
    "regression T 64": Run(task=SingleLocation(T=64, d=16), model=Transformer(), training=Training()),
    "regression T 16": Run(task=SingleLocation(T=16, d=16), model=Transformer(), training=Training()),
    "associative recall 32 pairs, 256 tokens": Run(
        task=AssociativeRecall(N_pairs=32, N_tokens=256), model=Transformer(layers=4, causal=True), training=Training()
    ),
    "cellular automata S 16, T 16": Run(
        task=CellularAutomaton(), model=Transformer(layers=4, width=128, heads=8, **MASKED), training=Training(**ADAMW)
    ),
}
STUDY = [
    Run(
        task=LinearMap(S=12, s=3), model=Transformer(layers=1, width=64, heads=8, **MASKED), seed=seed,
        training=Training(batch=256, steps=10_000, every=25, spacing=0.0, eval_size=256, stop_below=0.35, tail=0.0, **ADAMW),
    )
    for seed in range(16)
]


def seconds(run: Run, steps: int, members: int = 1, device: str = "cpu", eval_size: int = 1) -> float:
    """What our loop takes for so many steps of so many members side by side, in this process."""
    training = run.training.model_copy(update=dict(steps=steps, every=steps, eval_size=eval_size, stop_below=None))
    runs = [run.model_copy(update={"training": training, "seed": seed}) for seed in range(members)]
    return train(runs, device)[0].wall_s


def timed(run: Run, steps: int) -> float:
    """Steps a second of our loop, in this process."""
    return steps / seconds(run, steps)


def peak(duration: float, device: str = "cpu") -> float:
    """Float32 FLOPs a second of a matrix product: on a CPU one that stays in cache, one thread."""
    m, k, n = (1024, 512, 512) if device == "cpu" else (8192, 8192, 8192)
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    torch.mm(a, b).sum().item()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < duration:
        product = torch.mm(a, b)
        count += 1
        if device != "cpu":
            product[0, 0].item()
    return 2 * m * k * n * count / (time.perf_counter() - start)


def step_flops(run: Run) -> int:
    """FLOPs of the matrix products of one of our steps, forward and backward."""
    counts = []
    for steps in (2, 1):
        with FlopCounterMode(display=False) as counter:
            seconds(run, steps)
        counts.append(counter.get_total_flops())
    return counts[0] - counts[1]


def optimizer_share(run: Run, steps: int = 30) -> float:
    """Share of a step's time that the optimiser takes, in this process: it alone, over the whole step."""
    loop, took = start([run], "cpu"), []
    for act in (loop.take, loop.optimizer.step):
        act()
        before = time.perf_counter()
        for _ in range(steps):
            act()
        took.append(time.perf_counter() - before)
    return took[1] / took[0]


def compare(name: str, run: Run, pool: ProcessPoolExecutor, workers: int) -> dict:
    """One case of the bench: medians of interleaved measurements."""
    flops = step_flops(run)
    plain = PlainLoop(run)
    start = time.perf_counter()
    plain.advance(3)
    plain_steps = max(3, round(SECONDS * 3 / (time.perf_counter() - start)))
    our_steps = max(3, round(SECONDS * min(pool.map(timed, [run] * workers, [5] * workers))))
    ours, theirs, peaks = [], [], []
    for _ in range(ALTERNATIONS):
        peaks.append(sum(pool.map(peak, [SECONDS / 4] * workers)))
        ours.append(sum(pool.map(timed, [run] * workers, [our_steps] * workers)))
        start = time.perf_counter()
        plain.advance(plain_steps)
        theirs.append(plain_steps / (time.perf_counter() - start))
    rate, top = statistics.median(ours), statistics.median(peaks)
    return {
        "case": name, "ours": rate, "plain": statistics.median(theirs), "ratio": statistics.median(ours) / statistics.median(theirs),
        "roofline_fraction": flops * rate / top, "device": "cpu", "threads": workers, "flops": flops, "peak": top,
        "optimizer": statistics.median(pool.map(optimizer_share, [run] * workers)),
    }


def study(seeds: list[Run], workers: int) -> dict:
    """Many seeds to their last emergence, both sides with early exit, ours with the start of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        sweep({"study": seeds}, chapter="bench", store=Store(folder), workers=workers, device="cpu")
        ours = time.perf_counter() - start
    start = time.perf_counter()
    for run in seeds:
        loop = PlainLoop(run)
        while loop.step < run.training.steps and loop.test_loss() > run.training.stop_below:
            loop.advance(run.training.every)
    plain = time.perf_counter() - start
    return {"case": f"{len(seeds)}-seed study, runs/s", "ours": len(seeds) / ours, "plain": len(seeds) / plain, "ratio": plain / ours,
            "roofline_fraction": None, "device": "cpu", "threads": workers}


def efficiency(pool: ProcessPoolExecutor, workers: int) -> dict:
    """The same runs by one worker and by all: rate over workers times the rate of one."""
    run, one, many = CASES["regression T 64"], [], []
    for _ in range(ALTERNATIONS):
        one.append(pool.submit(timed, run, 15).result())
        many.append(sum(pool.map(timed, [run] * workers, [15] * workers)))
    ratio = statistics.median(many) / (workers * statistics.median(one))
    return {"case": f"1 and {workers} workers, efficiency", "ours": statistics.median(many), "plain": workers * statistics.median(one),
            "ratio": ratio, "roofline_fraction": None, "device": "cpu", "threads": workers}


def _sweep_memory(count: int) -> float:
    """Peak resident megabytes of a fresh process that trains so many runs; Linux only."""
    run = CASES["regression T 16"]
    training = run.training.model_copy(update=dict(steps=10, every=10, eval_size=32))
    with tempfile.TemporaryDirectory() as folder:
        make_up([run.model_copy(update={"training": training, "seed": seed}) for seed in range(count)], Store(folder).open(), 1, "cpu")
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # rusage remembers the parent's


def memory(few: int = 8, many: int = 64) -> dict:
    """Peak memory of a sweep of many runs over that of a sweep of few, each in a process of its own, megabytes."""
    used = []
    for count in (many, few):
        with worker_pool(1) as pool:
            used.append(pool.submit(_sweep_memory, count).result())
    return {"case": f"peak memory of {many} runs and of {few}, MB", "ours": used[0], "plain": used[1], "ratio": used[0] / used[1],
            "roofline_fraction": None, "device": "cpu", "threads": 1}


GROWTH = {  # one size at a time, from a model that is small enough to be quick: what a step costs
    "d": [SingleLocation(T=64, d=d) for d in (8, 16, 32, 64, 128)],
    "T": [SingleLocation(T=T, d=16) for T in (16, 32, 64, 128, 256)],
    "batch": [8, 16, 32, 64, 128],
    "width": [32, 64, 128, 256, 512],
    "members": [1, 2, 4, 8],
}


def growth(pool: ProcessPoolExecutor, repeats: int = 3) -> list[dict]:
    """Member-steps a second of one worker as one size grows from the base regression T 64."""
    base, rows = CASES["regression T 64"], []
    for vary, values in GROWTH.items():
        for value in values:
            run, members, size = base, 1, value
            if vary in ("d", "T"):
                run, size = base.model_copy(update={"task": value}), getattr(value, vary)
            elif vary == "batch":
                run = base.model_copy(update={"training": base.training.model_copy(update={"batch": value})})
            elif vary == "width":
                run = base.model_copy(update={"model": base.model.model_copy(update={"width": value})})
            else:
                members = value
            once = pool.submit(seconds, run, 3, members).result() / 3
            steps = max(3, round(SECONDS / 4 / once))
            times = [pool.submit(seconds, run, steps, members).result() for _ in range(repeats)]
            rows.append({"case": f"{vary} = {size}", "ours": members * steps / statistics.median(times), "plain": None, "ratio": None,
                         "roofline_fraction": None, "device": "cpu", "threads": 1, "vary": vary, "value": size})
    return rows


def bench_gpu(out: Path, cases: dict[str, Run] = CASES, sizes: list[int] = GPU_SIZES, device: str = "cuda", report: Callable = print) -> list[dict]:
    """Member-steps a second against how many members are stacked, the plain loop and the device's peak; writes `out`.

    The start, the capture and the readings are taken out by subtracting a shorter run; medians of three, the plain loop between
    them. A size that does not fit ends a case. What is measured is written at once.
    """
    def finished(act: Callable, *args) -> float:
        """Seconds until the device has done it."""
        start = time.perf_counter()
        act(*args)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def extra(run: Run, steps: int, members: int) -> float:
        return seconds(run, SHORT + steps, members, device) - seconds(run, SHORT, members, device)

    top, rows = peak(SECONDS / 4, device), []
    report(f"{'case':42} {'members':>8} {'ours':>10} {'plain':>8} {'of peak':>8}")
    for name, run in cases.items():
        flops = step_flops(run)
        plain = PlainLoop(run, device=device)
        finished(plain.advance, 5)
        plain_steps = max(5, round(SECONDS / 4 / (finished(plain.advance, 5) / 5)))
        for members in sizes:
            steps, ours, plains = SHORT, [], []
            try:
                while (took := extra(run, steps, members)) < SECONDS / 4 and steps < 10**6:
                    steps *= 4 if took < SECONDS / 16 else 2
                for _ in range(3):
                    ours.append(members * steps / max(extra(run, steps, members), 1e-9))
                    plains.append(plain_steps / finished(plain.advance, plain_steps))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            rate, theirs = statistics.median(ours), statistics.median(plains)
            rows.append({"case": name, "ours": rate, "plain": theirs, "ratio": rate / theirs, "roofline_fraction": flops * rate / top,
                         "device": device, "threads": torch.get_num_threads(), "members": members, "flops": flops, "peak": top})
            report(f"{name:42} {members:8d} {rate:10.1f} {theirs:8.1f} {flops * rate / top:8.0%}")
            _write(out, rows)
    return _write(out, rows)


def load(name: str = "bench") -> pd.DataFrame:
    """The rows of the last bench in the build folder, or else of the one that the repository ships."""
    for folder in (chapters.build_folder(), results_folder()):
        if (path := folder / f"{name}.json").exists():
            return pd.read_json(path)
    raise InputError(f"bench: there is no {name}.json; make it with `make {'bench' if name == 'bench' else 'gpu-check'}`")


def plain_flops(run: Run) -> int:
    """FLOPs of the matrix products of one step of the textbook loop."""
    loop = PlainLoop(run)
    with FlopCounterMode(display=False) as counter:
        loop.advance(1)
    return counter.get_total_flops()


def machine() -> str:
    """Processor, cores and the version of torch."""
    return f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}"


def _write(out: Path, rows: list[dict]) -> list[dict]:
    rows = [row | {"machine": machine()} for row in rows]
    write(out, (json.dumps(rows, indent=1) + "\n").encode())
    return rows


def bench(out: Path, cases: dict[str, Run] = CASES, seeds: list[Run] = STUDY, report: Callable = print) -> list[dict]:
    """Measure every case and the study of `seeds`, print a table, write `out`."""
    workers = os.cpu_count() or 1
    rows = []
    report(f"{'case':42} {'ours':>8} {'plain':>8} {'ratio':>6} {'of peak':>8}")

    def add(row: dict) -> None:
        rows.append(row)
        share = f"{row['roofline_fraction']:8.0%}" if row["roofline_fraction"] else f"{'':8}"
        report(f"{row['case']:42} {row['ours']:8.2f} {row['plain']:8.2f} {row['ratio']:6.2f} {share}")

    with worker_pool(workers) as pool:
        for name, run in cases.items():
            add(compare(name, run, pool, workers))
        add(efficiency(pool, workers))
        rows += growth(pool)
    add(memory())
    add(study(seeds, workers))
    return _write(out, rows)
