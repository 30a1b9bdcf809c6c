"""A grid of runs -> a table: finished ones are read, the others trained, each by a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import psutil
import torch
from tqdm import tqdm

from lib.config import InputError
from lib.run import Run
from lib.store import OUTCOME, Frozen, Store
from lib.train import EVAL_CHUNK, Result, Steps, resolve_device, train

ATTEMPTS = 3  # so often a run may take its worker process with it before it counts as failed
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
# what a worker frees it keeps, in huge pages: no page faults in the loop; a tenth of the time of a regression step
SEQUENCES = 65_535  # of all members in one kernel: more do not fit into a CUDA grid


class Outcome(NamedTuple):
    """What became of a run: emerged, censored or diverged (then it is in the store); unfit or died (then it is not)."""

    run: Run
    became: str


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


@contextmanager
def uninterrupted():
    """Processes that are started within leave an interrupt from the terminal to their parent."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)


def worker_pool(workers: int, wait: bool = True) -> ProcessPoolExecutor:
    """Fresh single-threaded processes; `wait` until they have started."""
    os.environ.setdefault("GLIBC_TUNABLES", ALLOCATOR)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), prepare_worker)
    with uninterrupted():
        started = pool.map(abs, range(workers))
        if wait:
            list(started)
    return pool


def give_up(pool: ProcessPoolExecutor) -> None:
    """Kill a pool's processes, and those that they started.

    They are not asked to end: who runs a notebook answers that by stopping its kernel, and where that has not begun yet, by
    nothing.
    """
    for pid in list(pool._processes or {}):
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(pid)
            worker.suspend()  # it starts no other meanwhile
            for process in [*worker.children(recursive=True), worker]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _work(runs: list[Run], folder: str, device: str) -> list[Outcome]:
    """Train what is absent and unlocked, committing each run as it ends; returns what became of each."""
    store = Store(folder)
    outcomes: list[Outcome] = []

    def commit(result: Result) -> None:
        store.put(result)
        early = result.steps < result.run.training.steps
        outcomes.append(Outcome(result.run, result.status if result.status != "finished" else "emerged" if early else "censored"))

    with ExitStack() as locks:
        mine = [run for run in runs if locks.enter_context(store.lock(run)) and run not in store]
        unfit = _fit(mine, device, commit)
    return outcomes + [Outcome(run, "unfit") for run in unfit]


def _out_of_memory(error: Exception) -> bool:
    """Whether a device or this machine had no room; on a CPU torch says so in words alone."""
    words = ("can't allocate memory", "CUDA error: out of memory", "Storage size calculation overflowed", "numel: integer multiplication overflow")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(w in str(error) for w in words)


def _fit(runs: list[Run], device: str, done: Callable[[Result], None]) -> list[Run]:
    """Train runs together, or in halves where they do not fit into memory; what was done before is not done again.

    Returns those that do not fit even alone.
    """
    ended: set[str] = set()

    def note(result: Result) -> None:
        ended.add(result.run.key)
        done(result)

    try:
        if runs:
            train(runs, device, done=note)
        return []
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
    if len(runs) == 1:
        return runs
    if device == "cuda":
        torch.cuda.empty_cache()
    left = [run for run in runs if run.key not in ended]
    return [run for half in (left[: len(left) // 2], left[len(left) // 2 :]) for run in _fit(half, device, done)]


def ensemble(run: Run, device: str) -> int:
    """How many runs like this one to stack: on a CPU one, which is fastest; on a GPU what four fifths of its free memory hold."""
    if device == "cpu":
        return 1
    most, steps = SEQUENCES // max(run.training.batch, min(EVAL_CHUNK, run.training.eval_size)), Steps.EAGER + 2
    short = run.model_copy(update={"training": run.training.model_copy(update={"steps": steps, "every": steps, "stop_below": None})})
    used = []
    try:
        for members in (1, 5):  # to a captured step: the capture's own memory and that of a reading add up
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            train([short.model_copy(update={"seed": seed}) for seed in range(members)], device)
            used.append(torch.cuda.max_memory_reserved())
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        return 1
    finally:
        torch.cuda.empty_cache()
    return max(1, min(most, int(0.8 * torch.cuda.mem_get_info()[0] * 4 / max(1, used[1] - used[0]))))


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


def make_up(
    runs: list[Run], store: Store, workers: int = 0, device: str = "auto", label: str = "runs", scheduler: str = ""
) -> None:
    """Train every run that the store lacks; each is committed by the worker that made it.

    A run that another process is training is left to it and waited for. A killed worker's run starts again. A run that
    does not fit into memory or takes its worker with it, ATTEMPTS times, is named by an InputError once all others are done.
    """
    counts, failed = dict.fromkeys(("emerged", "censored", "diverged"), 0), {}
    with tqdm(total=len(runs), desc=label, unit="run", disable=None) as bar:
        others = False
        while waiting := [run for run in runs if run not in store and run.key not in failed]:
            # after the first round what is left is held by another process: wait, and take over if that dies
            free, done = [run for run in waiting if not others or store.free(run)], 0
            for outcomes in _results(free, store, workers, device, scheduler) if free else ():
                for run, became in outcomes:
                    if became in counts:
                        counts[became] += 1
                    else:
                        failed[run.key] = run, became
                done += len(outcomes)
                bar.update(len(outcomes))
                bar.set_postfix(counts)
            if others and not done:
                time.sleep(max(0.5, 0.005 * len(waiting)))
            others = True
    if failed:
        run, why = next(iter(failed.values()))
        said = {
            "unfit": "one run alone does not fit into the device's memory; lower batch or width",
            "died": f"a worker process died {ATTEMPTS} times in it (out of memory?); lower workers, batch or width and start again",
        }[why]
        others = f" (and {len(failed) - 1} runs more)" if len(failed) > 1 else ""
        raise InputError(f"sweep: {run.task.kind}: {said}; the first is run {run.key}{others}, all others are kept")


def _results(runs: list[Run], store: Store, workers: int, device: str, scheduler: str) -> Iterator[list[Outcome]]:
    """Each job's outcomes as they come: from a cluster, from processes of this machine, or from this process."""
    if scheduler:
        from lib import cluster

        yield from cluster.results(runs, store, workers, device, scheduler)
        return
    device = resolve_device(device)
    jobs = list(batches(runs, lambda run: ensemble(run, device)))
    workers = min(workers or (os.cpu_count() or 1 if device == "cpu" else 1), len(jobs))
    if workers > 1:
        yield from _in_processes(jobs, str(store.folder), workers, device)
        return
    for job in jobs:
        yield _work(job, str(store.folder), device)


def _in_processes(jobs: list[list[Run]], folder: str, workers: int, device: str) -> Iterator[list[Outcome]]:
    """Every worker is a pool of its own, so that one that is killed costs its own job alone."""
    waiting, deaths = deque(enumerate(jobs)), [0] * len(jobs)
    idle: list[ProcessPoolExecutor] = []
    busy: dict[Future, tuple[ProcessPoolExecutor, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                pool = idle.pop() if idle else worker_pool(1, wait=False)
                with suppress(BrokenProcessPool):  # killed between two jobs
                    busy[pool.submit(_work, waiting[0][1], folder, device)] = pool, waiting[0][0]
                    waiting.popleft()
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                pool, number = busy[future]
                try:
                    yield future.result()
                    idle.append(pool)
                except BrokenProcessPool:
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        waiting.append((number, jobs[number]))
                    else:
                        yield [Outcome(run, "died") for run in jobs[number]]
                del busy[future]
    except BaseException:  # interrupted: what is in progress is given up, what is finished is on disk
        for pool, _ in busy.values():
            give_up(pool)
        raise
    finally:
        for pool in [*idle, *(pool for pool, _ in busy.values())]:
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
    scheduler: str | None = None,
) -> dict[str, Sweep]:
    """Every experiment's table. Runs are looked up in the live store, then in the frozen results, then trained
    (missing="train") or left out (missing="skip").

    scheduler  where they train, default: environment BOOK_SCHEDULER, else "": processes of this machine;
               "dask", a cluster made here; tcp://HOST:PORT, tls://HOST:PORT or a scheduler file, a cluster that is there
    """
    if missing not in ("train", "skip"):
        raise InputError(f"missing: {missing!r} is neither 'train' nor 'skip'")
    store = store if isinstance(store, Store) else Store(store)
    scheduler = os.environ.get("BOOK_SCHEDULER", "") if scheduler is None else scheduler
    frozen = Frozen()
    runs = {run.key: run for experiment in experiments.values() for run in experiment}
    found: dict = {}
    for _ in range(2):  # a run that turns out to be damaged on disk is made again
        absent = [run for run in runs.values() if run not in store and run.key not in frozen.rows]
        if absent and missing == "train":
            make_up(absent, store.open(), workers, device, f"{chapter} ({profile})", scheduler)
        found |= {key: store.get(run) or frozen.get(run) for key, run in runs.items() if not found.get(key)}
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
