"""Workers, kills and other processes change no table, and no run is trained twice."""

import os
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
import torch

import lib.sweep
from lib import bench
from lib.config import InputError
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Store
from lib.sweep import batches, sweep
from lib.tasks import SingleLocation

ROOT = Path(__file__).resolve().parents[1]


def grid(seeds=3, steps=60):
    return [Run(task=SingleLocation(T=T, d=4), model=Transformer(layers=1, heads=2, width=16),
                training=Training(steps=steps, every=20, eval_size=32), seed=s) for T in (4, 8) for s in range(seeds)]


def table(store, runs, **kw):
    result = sweep({"a": runs}, chapter="x", store=store, **kw)["a"]
    return result.rows.drop(columns="wall_s"), result.curves


def same(a, b):
    return a[0].equals(b[0]) and a[1].equals(b[1])


def test_worker_count_changes_nothing(tmp_path):
    assert same(table(tmp_path / "one", grid(), workers=1), table(tmp_path / "two", grid(), workers=2))


def test_experiments_share_runs(tmp_path):
    runs = grid(2)
    both = sweep({"a": runs, "b": runs[:1] + runs[:1]}, chapter="x", store=tmp_path, workers=1)
    assert len(both["a"].rows) == 4 and len(both["b"].rows) == both["b"].wanted == 1


def test_batches_hold_only_runs_alike():
    groups = list(batches(grid(3), lambda run: 2))
    assert sorted(map(len, groups)) == [1, 1, 2, 2] and all(len({r.alike for r in g}) == 1 for g in groups)
    assert [g[0] for g in batches(grid(3), lambda run: 1)] == grid(3)


def test_out_of_memory_halves_the_stack_and_loses_nothing(tmp_path, monkeypatch):
    """A device on which two members fit; the third's attempt dies after one member of the first stack had ended."""
    real, sizes = lib.sweep.train, []

    def small_device(runs, device, done):
        sizes.append(len(runs))
        if len(runs) > 2:
            if len(sizes) == 1:
                real(runs[:1], device, done=done)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(runs, device, done=done)

    runs = [run for run in grid(6) if run.task.T == 4]
    monkeypatch.setattr(lib.sweep, "train", small_device)
    monkeypatch.setattr(lib.sweep, "ensemble", lambda run, device: 6)
    stacked = table(tmp_path / "stacked", runs, workers=1)
    assert sizes == [6, 2, 3, 1, 2]
    monkeypatch.undo()
    alone = table(tmp_path / "alone", runs, workers=1)
    assert stacked[0].equals(alone[0])
    readings = [curves[["step", "test_loss"]].to_numpy() for _, curves in (stacked, alone)]
    assert abs(readings[0] - readings[1]).max() < 1e-4


def test_one_run_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def tiny_device(runs, device, done):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lib.sweep, "train", tiny_device)
    with pytest.raises(InputError, match="single_location: one run alone does not fit.*lower batch or width"):
        table(tmp_path, grid(1), workers=1)


def test_memory_of_a_sweep_does_not_grow_with_its_runs():
    few, many = (bench.memory(few=4, many=n) for n in (4, 24))
    assert many["ratio"] < 1.05, (few, many)


CELLS = {  # a chapter as small as one can be, with the grid above
    "imports": f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    "from lib.chapters import check\nfrom lib.sweep import sweep\nfrom test_sweep import grid",
    "parameters": "missing: str = 'train'  # or skip\nworkers: int = 2",
    "check": "check(globals())",
    "grid": "experiments = {'a': grid(8, 300)}",
    "sweep": "rows = sweep(experiments, chapter='small', missing=missing, workers=workers)['a'].rows\nprint(len(rows))",
}


def start(tmp_path, store, *arguments, command="run", before=(), cells=CELLS, **environment):
    """`python -m lib run` on that chapter, as `make quick` does for every chapter, or another command on it."""
    book = tmp_path / "book"
    if not book.exists():
        book.mkdir(parents=True)
        cells = [nbformat.v4.new_code_cell(source, metadata={"tags": [tag]}) for tag, source in cells.items()]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), book / "small.ipynb")
    environment = os.environ | {
        "BOOK_DIR": str(book), "BOOK_STORE": str(store), "BOOK_BUILD": str(tmp_path / "build"), "PYTHONPATH": str(ROOT),
    } | environment
    chapter = () if command == "build" else ("small",)
    line = [*before, sys.executable, "-m", "lib", command, *chapter, *arguments]
    return subprocess.Popen(
        line, start_new_session=True, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal, wherever these tests were started from
    )  # fmt: skip


def alive(group: int) -> bool:
    return bool(subprocess.run(["pgrep", "-g", str(group)], capture_output=True).stdout)


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a sweep or of a nanny; one that has just ended is none."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return found


def deaf(folder):
    """Start a process, and sleep, deaf to requests to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    (Path(folder) / str(child.pid)).touch()
    time.sleep(300)


def test_a_pool_that_is_given_up_is_gone_with_all_that_it_started(tmp_path):
    pool = lib.sweep.worker_pool(2)
    workers = [psutil.Process(pid) for pid in pool._processes]
    asked = [pool.submit(deaf, tmp_path) for _ in range(2)]
    deadline = time.monotonic() + 60
    while len(children := list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [psutil.Process(int(child.name)) for child in children]
    lib.sweep.give_up(pool)
    pool.shutdown()
    assert not psutil.wait_procs([*workers, *children], timeout=20)[1]
    assert all(isinstance(future.exception(), BrokenProcessPool) for future in asked)


def test_two_processes_on_one_store_share_the_work(tmp_path):
    store = tmp_path / "store"
    processes = [start(tmp_path, store) for _ in range(2)]
    assert [p.communicate()[1] for p in processes] == ["", ""] and [p.returncode for p in processes] == [0, 0]
    assert len(list(store.rglob("*.json"))) == len(grid(8, 300))
    assert not list(store.rglob("*.tmp"))


def _die(runs, folder, device):
    """A worker that is killed on its first job, once."""
    flag = Path(folder) / "died"
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return REAL_WORK(runs, folder, device)


from lib import sweep as sweep_module  # noqa: E402

REAL_WORK = sweep_module._work


def test_a_killed_worker_costs_only_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "_work", _die)
    rows, _ = table(tmp_path, grid(), workers=2)
    assert len(rows) == 6 and (tmp_path / "died").exists()


PROGRESS = """
import sys
sys.path[:0] = [{tests!r}]
from test_sweep import grid, sweep
sweep({{"a": grid(1, 20)}}, chapter="few", store={store!r}, workers=1)
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_and_silence_elsewhere(tmp_path, terminal):
    """Runs done, emerged, censored and the time left; nothing at all where nobody looks."""
    reader, writer = os.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, (24, 120))
    script = PROGRESS.format(tests=str(ROOT / "tests"), store=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], stderr=writer, check=True, cwd=ROOT)
    os.close(writer)
    said = b""
    try:
        while chunk := os.read(reader, 65536):
            said += chunk
    except OSError:  # a terminal without a writer
        pass
    if terminal:
        assert b"few (quick)" in said and b"2/2" in said and b"censored=2" in said and b"emerged=0" in said
    else:
        assert said == b""


def test_store_default_is_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_STORE", str(tmp_path))
    assert Store().folder == tmp_path


if __name__ == "__main__":
    pytest.main([__file__])
