"""A grid of runs -> a table: finished ones are read, the others trained, each by a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass

import pandas as pd
import torch
from tqdm import tqdm

from lib.config import InputError
from lib.run import Run
from lib.store import OUTCOME, Frozen, Store
from lib.train import EVAL_CHUNK, Result, resolve_device, train

ATTEMPTS = 3  # a pool whose worker was killed is built again this often
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
# what a worker frees it keeps, in huge pages: no page faults in the loop; a tenth of the time of a regression step
SEQUENCES = 65_535  # of all members in one kernel: more do not fit into a CUDA grid


@dataclass
class Sweep:
    """One experiment's finished runs.

    rows    one row a run: key `run`, the configuration by bare names, status, steps, wall_s, device
    curves  run, step, train_loss, test_loss and what the model observes
    wanted  how many runs the experiment has; len(rows) how many are there
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    wanted: int

    def __str__(self) -> str:
        missing = f" of {self.wanted}, the others not run yet" if self.wanted > len(self.rows) else ""
        return f"{len(self.rows)} runs{missing}"


def prepare_worker() -> None:
    """A worker ends with the process that started it, however that ended."""
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Fresh single-threaded processes; they leave an interrupt from the terminal to their parent."""
    os.environ.setdefault("GLIBC_TUNABLES", ALLOCATOR)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), prepare_worker)
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by what is spawned now
    try:
        list(pool.map(abs, range(workers)))
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
    return pool


def _work(runs: list[Run], folder: str, device: str) -> list[tuple[str, str, bool]]:
    """Train what is absent and unlocked, committing each run as it ends; returns (key, status, emerged) of each."""
    store = Store(folder)
    results: list[Result] = []

    def commit(result: Result) -> None:
        store.put(result)
        results.append(result)

    with ExitStack() as locks:
        mine = [run for run in runs if locks.enter_context(store.lock(run)) and run not in store]
        _fit(mine, device, commit)
    return [(r.run.key, r.status, r.steps < r.run.training.steps and r.status == "finished") for r in results]


def _fit(runs: list[Run], device: str, done: Callable[[Result], None]) -> None:
    """Train runs together, or in halves where they do not fit into memory; what was done before is not done again."""
    ended: set[str] = set()

    def note(result: Result) -> None:
        ended.add(result.run.key)
        done(result)

    try:
        if runs:
            train(runs, device, done=note)
        return
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise InputError(f"{runs[0].task.kind}: one run alone does not fit into the device's memory; lower batch or width") from None
    torch.cuda.empty_cache()
    left = [run for run in runs if run.key not in ended]
    for half in (left[: len(left) // 2], left[len(left) // 2 :]):
        _fit(half, device, done)


def ensemble(run: Run, device: str) -> int:
    """How many runs like this one to stack: on a CPU one, which is fastest; on a GPU what four fifths of its free memory hold."""
    if device == "cpu":
        return 1
    short = run.model_copy(update={"training": run.training.model_copy(update={"steps": 1, "stop_below": None})})
    used = []
    for members in (1, 2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train([short.model_copy(update={"seed": seed}) for seed in range(members)], device)
        used.append(torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    most = SEQUENCES // max(run.training.batch, min(EVAL_CHUNK, run.training.eval_size))
    return max(1, min(most, int(0.8 * torch.cuda.mem_get_info()[0] / max(1, used[1] - used[0]))))


def batches(runs: list[Run], size: Callable[[Run], int]) -> Iterator[list[Run]]:
    """Runs that may share a batch, at most `size` together, in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.alike, []).append(run)
    together = {alike: size(group[0]) if len(group) > 1 else 1 for alike, group in groups.items()}
    if max(together.values(), default=1) == 1:
        yield from ([run] for run in runs)
        return
    for alike, group in groups.items():
        for start in range(0, len(group), together[alike]):
            yield group[start : start + together[alike]]


def make_up(runs: list[Run], store: Store, workers: int = 0, device: str = "auto", label: str = "runs") -> None:
    """Train every run that the store lacks; each is committed by the worker that made it.

    A run that another process is training is left to it and waited for. A killed worker's run starts again.
    """
    device = resolve_device(device)
    workers = workers or (os.cpu_count() or 1 if device == "cpu" else 1)
    counts = {"emerged": 0, "censored": 0, "diverged": 0}
    with tqdm(total=len(runs), desc=label, unit="run", disable=None) as bar:
        for attempt in range(1, ATTEMPTS + 1):
            jobs = list(batches([run for run in runs if run not in store], lambda run: ensemble(run, device)))
            try:
                for done in _results(jobs, store, workers, device):
                    for _, status, emerged in done:
                        counts["emerged" if emerged else "diverged" if status == "diverged" else "censored"] += 1
                    bar.update(len(done))
                    bar.set_postfix(counts)
                break
            except BrokenProcessPool:
                if attempt == ATTEMPTS:
                    raise InputError(
                        f"sweep: a worker process died {ATTEMPTS} times (out of memory?); "
                        "finished runs are kept, lower workers and start again"
                    ) from None
        while any(run not in store for run in runs):  # another process holds them: wait, and take over if it dies
            waiting = [run for run in runs if run not in store]
            done = _work(waiting[:1], str(store.folder), device)
            bar.update(len(done))
            if not done:
                time.sleep(0.5)


def _results(jobs: list[list[Run]], store: Store, workers: int, device: str) -> Iterator[list]:
    """Each job's outcome as it comes, in this process or from a pool."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield _work(job, str(store.folder), device)
        return
    pool = worker_pool(min(workers, len(jobs)))
    try:
        futures = [pool.submit(_work, job, str(store.folder), device) for job in jobs]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:  # interrupted: what is in progress is given up, what is finished is on disk
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def sweep(
    experiments: dict[str, list[Run]],
    *,
    chapter: str,
    profile: str = "quick",
    missing: str = "train",
    store: Store | str | None = None,
    workers: int = 0,
    device: str = "auto",
) -> dict[str, Sweep]:
    """Every experiment's table. Runs are looked up in the live store, then in the frozen results, then trained
    (missing="train") or left out (missing="skip")."""
    if missing not in ("train", "skip"):
        raise InputError(f"missing: {missing!r} is neither 'train' nor 'skip'")
    store = store if isinstance(store, Store) else Store(store)
    frozen = Frozen()
    runs = {run.key: run for experiment in experiments.values() for run in experiment}
    absent = [run for run in runs.values() if run not in store and run.key not in frozen.rows]
    if absent and missing == "train":
        make_up(absent, store.open(), workers, device, f"{chapter} ({profile})")
    found = {}
    for key, run in runs.items():
        found[key] = store.get(run) or frozen.get(run)
        if found[key] is None and missing == "train":  # damaged on disk: make it again
            make_up([run], store.open(), 1, device, chapter)
            found[key] = store.get(run)
    return {name: _table(wanted, found) for name, wanted in experiments.items()}


def _table(wanted: list[Run], found: dict) -> Sweep:
    there = [run for run in {run.key: run for run in wanted}.values() if found[run.key]]
    rows = [run.row() | found[run.key][0] for run in there]
    curves = [found[run.key][1].assign(run=run.key) for run in there]
    columns = list(wanted[0].row() | dict.fromkeys(OUTCOME)) if wanted else []
    return Sweep(
        pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns),
        pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=["step", "train_loss", "test_loss", "run"]),
        len({run.key for run in wanted}),
    )
