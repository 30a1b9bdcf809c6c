"""Faults, each injected for real: what is finished stays, what is damaged is named, and the table is the undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import Faults
from test_sweep import CELLS, ROOT, alive, grid, same, start, table, workers_of

import lib.sweep
from lib.config import InputError
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Store, _seal
from lib.sweep import sweep
from lib.tasks import SingleLocation
from lib.train import train

CHANCE = random.Random(1)
ONE = ("-p", "workers", "1")  # in this process: where workers are not the question


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The table of the chapter's grid, made by one process that nobody disturbs."""
    return table(tmp_path_factory.mktemp("serial"), grid(8, 300), workers=1)


def committed(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.glob("??/*.json")}


def first_commit(store: Path, process) -> None:
    while not committed(store) and process.poll() is None:
        time.sleep(0.02)


def all_gone(group: int) -> bool:
    deadline = time.monotonic() + 30
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(group)


def one_line(said: str) -> bool:
    return said.count("\n") == 1 and "Traceback" not in said


# ---------------------------------------------------------------------------------------------------------- processes
@pytest.mark.parametrize(("command", "sample", "full"), [("run", 1, 8), ("sweep", 1, 45)])
def test_kill_9_of_the_command_loses_and_repeats_nothing(tmp_path, faults, serial, command, sample, full):
    """Kills of the command alone at random moments, its workers and kernel must follow; then once to the end."""
    store, kept = tmp_path / "store", {}
    kills, took = faults.times(sample, full), 3.0
    for kill in range(kills):
        if len(kept) > 12:  # nearly done: begin anew, after a look at what is there
            assert same_so_far(store, serial)
            shutil.rmtree(store)
            kept = {}
        process, began = start(tmp_path, store, command=command), time.monotonic()
        if kill == 0:  # the first is killed soon after its first commit, and tells how long that takes
            first_commit(store, process)
            took = time.monotonic() - began
        else:
            time.sleep(CHANCE.uniform(0.5, 1.5) * took)
        if process.poll() is None:
            process.kill()
            faults.count(f"kill -9 of `python -m lib {command}`")
        process.wait()
        assert all_gone(process.pid), "workers or the kernel outlived their parent"
        now = committed(store)
        assert kept.items() <= now.items(), "a finished run was lost or made again"
        kept = now
    process = start(tmp_path, store, command=command)
    assert (process.communicate()[1], process.returncode) == ("", 0)
    assert kept.items() <= committed(store).items() and not list(store.rglob("*.tmp"))
    assert same(table(store, grid(8, 300), missing="skip"), serial)


def same_so_far(store, serial) -> bool:
    rows, _ = table(store, grid(8, 300), missing="skip")
    return rows.equals(serial[0][serial[0].run.isin(rows.run)].reset_index(drop=True))


def test_kill_9_of_workers_costs_their_own_runs_alone(tmp_path, faults, serial):
    kills = 0
    while kills < faults.times(3, 60):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        process, kept = start(tmp_path, tmp_path / "store", command="sweep"), {}
        first_commit(tmp_path / "store", process)
        while process.poll() is None:
            workers = workers_of(process.pid)
            if workers and kills < faults.times(3, 60):
                CHANCE.choice(workers).kill()
                kills += 1
                faults.count("kill -9 of a worker of the process pool")
            now = committed(tmp_path / "store")
            assert kept.items() <= now.items(), "a finished run was lost or made again"
            kept = now
            time.sleep(CHANCE.uniform(1, 6))
        said = process.stderr.read()
        if process.returncode:  # one run met three kills: it is named, the others are there, and the next call makes it
            assert "a worker process died 3 times" in said and one_line(said)
            process = start(tmp_path, tmp_path / "store", command="sweep")
            assert process.wait() == 0
        assert same(table(tmp_path / "store", grid(8, 300), missing="skip"), serial)


def _die(runs, folder, device):
    """A worker that dies in the runs of one seed, always."""
    if runs[0].seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return WORK(runs, folder, device)


WORK = lib.sweep._work


def test_a_run_that_takes_its_worker_with_it_is_named_and_stops_no_other(tmp_path, monkeypatch, faults):
    monkeypatch.setattr(lib.sweep, "_work", _die)
    with pytest.raises(InputError, match=r"single_location: a worker process died 3 times.*and 1 runs more"):
        table(tmp_path, grid(), workers=2)
    faults.count("a run that kills its worker, each time", 2 * lib.sweep.ATTEMPTS)
    rows, _ = table(tmp_path, grid(), missing="skip")
    assert sorted(rows.seed) == [0, 0, 2, 2]


def test_ctrl_c_ends_cleanly_keeps_what_is_done_and_says_how_to_go_on(tmp_path, faults, serial):
    store = tmp_path / "store"
    for again in range(faults.times(1, 8)):
        command = ("sweep", "run")[again % 2]
        shutil.rmtree(store, ignore_errors=True)
        process = start(tmp_path, store, command=command)
        first_commit(store, process)
        time.sleep(CHANCE.uniform(0, 1))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        said = process.communicate()[1]
        faults.count("Ctrl-C")
        assert process.returncode == 130 and "finished runs are kept, the next call goes on" in said
        assert len(said.strip().splitlines()) == 1 and all_gone(process.pid)
        kept = committed(store)
        assert kept and same_so_far(store, serial)
        process = start(tmp_path, store, command=command)
        assert process.wait() == 0 and kept.items() <= committed(store).items()


def test_two_processes_on_one_store_one_of_them_killed(tmp_path, faults, serial):
    """What the killed one held, the other takes over."""
    for _ in range(faults.times(1, 4)):
        store = tmp_path / "store"
        shutil.rmtree(store, ignore_errors=True)
        processes = [start(tmp_path, store, command="sweep") for _ in range(2)]
        first_commit(store, processes[0])
        processes[0].kill()
        faults.count("two processes on one store, one of them killed")
        assert processes[1].communicate()[1] == "" and processes[1].returncode == 0
        processes[0].wait()
        assert same(table(store, grid(8, 300), missing="skip"), serial)


# --------------------------------------------------------------------------------------------------------------- disks
def confined(script: str) -> tuple[str, ...]:
    """A command line before another, which it runs in mounts of its own; the test is skipped where the kernel refuses."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    alone = ("unshare", "--mount", *user)
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody make mounts of their own (unshare --mount)")
    return (*alone, "bash", "-c", script, "confined")


@pytest.mark.parametrize("limit", ["size=90k", "nr_inodes=40"][: 1 + Faults.full])
def test_a_full_disk_is_said_in_one_line_and_the_sweep_goes_on_once_there_is_room(tmp_path, faults, serial, limit):
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    script = f"""mount -t tmpfs -o {limit} tmpfs {store} && "$@"; code=$?; cp -a {store} {out}
    mount -o remount,size=100m,nr_inodes=10000 {store} && "$@"; cp -a {store} {out}2; exit $code"""
    process = start(tmp_path, store, *ONE, command="sweep", before=confined(script))
    said = process.communicate()[1]
    faults.count("disk full" if "size" in limit else "disk out of inodes")
    assert process.returncode == 2 and one_line(said), said
    assert str(store) in said and "No space left on device" in said and "free space" in said
    assert committed(out) and not list(out.rglob("*.tmp")) and same_so_far(out, serial)
    assert not (out / "damaged").exists()
    now = {path.name for path in committed(tmp_path / "out2")}
    assert {path.name for path in committed(out)} <= now
    assert same(table(tmp_path / "out2", grid(8, 300), missing="skip"), serial)


def test_a_read_only_store_is_read_and_refuses_in_one_line(tmp_path, faults):
    store, runs = tmp_path / "store", grid(8, 300)
    for result in (result for run in runs[:2] for result in train([run])):
        Store(store).open().put(result)
    script = f'mount --bind {store} {store} && mount -o remount,bind,ro {store} && "$@"'
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    process = start(tmp_path, store, *ONE, command="sweep", before=confined(script))
    said = process.communicate()[1]
    faults.count("read-only store")
    assert process.returncode == 2 and one_line(said) and "Read-only file system" in said and "BOOK_STORE" in said
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    process = start(tmp_path, store, "-p", "missing", "skip", before=confined(script))
    assert process.communicate()[1] == "" and process.returncode == 0

    path = Store(store).path(runs[0].key, ".parquet")
    path.write_bytes(path.read_bytes()[:-1])
    process = start(tmp_path, store, *ONE, command="sweep", before=confined(script))
    said = process.communicate()[1]
    faults.count("read-only store with a damaged run")
    assert process.returncode == 2 and one_line(said) and "Read-only file system" in said


# --------------------------------------------------------------------------------------------------------------- files
RUNS = [Run(task=SingleLocation(T=4, d=2), model=Transformer(layers=1, heads=1, width=8),
            training=Training(steps=20, eval_size=8), seed=s) for s in range(2)]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store").open()
    for run in RUNS:
        store.put(train([run])[0])
    return store


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path, _) -> None:
    path.write_bytes(path.read_bytes()[: CHANCE.randrange(1, path.stat().st_size)])


def swapped(path: Path, _) -> None:
    shutil.copyfile(next(p for p in path.parent.parent.glob(f"??/*{path.suffix}") if p != path), path)


FILES = {
    "a bit flipped": lambda path, bit: flip(path, bit),
    "cut short": cut,
    "emptied": lambda path, _: path.write_bytes(b""),
    "another run's": swapped,
    "replaced by a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a hundred thousand brackets": lambda path, _: path.write_bytes(b"[" * 100_000),
}


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
@pytest.mark.parametrize("how", FILES)
def test_a_damaged_file_is_set_aside_and_named_and_never_trusted(store, faults, capsys, how, suffix):
    """Every damage: the run counts as absent, or, where only blanks of the record changed, says what it said."""
    intact, path = store.get(RUNS[0]), store.path(RUNS[0].key, suffix)
    pair = {s: store.path(RUNS[0].key, s).read_bytes() for s in (".json", ".parquet")}
    for _ in range(faults.times(10, 2000 if how in ("a bit flipped", "cut short") else 20)):
        FILES[how](path, CHANCE.randrange(8 * len(pair[suffix])))
        found, said = store.get(RUNS[0]), capsys.readouterr().err
        faults.count(f"{'curves' if suffix == '.parquet' else 'record'}: {how}")
        if found is None:
            assert f"run {RUNS[0].key} is damaged" in said and one_line(said) and RUNS[0] not in store
        else:
            assert suffix == ".json" and said == "" and found[0] == intact[0] and found[1].equals(intact[1])
            assert json.loads(path.read_bytes()) == json.loads(pair[".json"])
        for s, data in pair.items():
            store.path(RUNS[0].key, s).write_bytes(data)
        assert store.get(RUNS[0])[1].equals(intact[1])
    if how != "a bit flipped":
        FILES[how](path, 0)
        assert sweep({"a": RUNS}, chapter="x", store=store)["a"].curves.equals(sweep({"a": RUNS}, chapter="x", store=store)["a"].curves)
        assert list((store.folder / "damaged").iterdir()) and store.get(RUNS[0])[1].equals(intact[1])


def test_curves_whose_record_is_missing_are_made_again(store, faults, capsys):
    path = store.path(RUNS[0].key, ".parquet")
    path.with_suffix(".json").unlink()
    path.write_bytes(path.read_bytes()[:-3])
    faults.count("record missing, curves cut short")
    sweep({"a": RUNS}, chapter="x", store=store)
    said = capsys.readouterr().err
    assert "curves without a record" in said and one_line(said) and len(list((store.folder / "damaged").iterdir())) == 1


def test_a_record_of_a_later_version_is_refused_and_left_alone(store, faults):
    path = store.path(RUNS[0].key, ".json")
    later = json.loads(path.read_bytes()) | {"format": 3, "novelty": [1]}
    path.write_text(json.dumps(later | {"seal": _seal(later)}))
    before = {p: p.read_bytes() for p in store.folder.rglob("*.*")}
    faults.count("record of a later version")
    with pytest.raises(InputError, match="written in format 3, and this version reads up to 2; update the book"):
        sweep({"a": RUNS}, chapter="x", store=store)
    assert before == {p: p.read_bytes() for p in store.folder.rglob("*.*")}


def test_records_from_before_the_seal_are_still_read(store):
    path = store.path(RUNS[0].key, ".json")
    old = {name: value for name, value in json.loads(path.read_bytes()).items() if name not in ("format", "seal")}
    intact = store.get(RUNS[0])
    path.write_text(json.dumps(old, indent=1))
    assert store.get(RUNS[0])[0] == intact[0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_damaged_frozen_results_are_named(store, tmp_path, monkeypatch, faults, suffix):
    from lib.store import freeze

    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path / "results"))
    freeze(RUNS, store, "x", "laptop")
    path = tmp_path / f"results/x.laptop{suffix}"
    path.write_bytes(path.read_bytes()[:30])
    faults.count("frozen results cut short")
    with pytest.raises(InputError, match=f"x.laptop{suffix}: damaged.*git checkout"):
        sweep({"a": RUNS}, chapter="x", store=tmp_path / "absent", missing="skip")


# --------------------------------------------------------------------------------------------------------------- clock
JUMPING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {                     /* every 20 looks: ten years on, a year back, the truth */
    static _Atomic unsigned looks;
    static const long by[] = {315360000L, -31536000L, 0L};
    return by[looks++ / 20 % 3];
}
int clock_gettime(clockid_t id, struct timespec *t) {
    long code = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += shift();
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    long code = syscall(SYS_gettimeofday, t, zone);
    t->tv_sec += shift();
    return code;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
"""


def test_a_clock_that_jumps_changes_nothing(tmp_path, faults, serial):
    if not (cc := shutil.which("cc") or shutil.which("gcc")) or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler, to give the processes another clock")
    (tmp_path / "clock.c").write_text(JUMPING)
    clock = str(tmp_path / "clock.so")
    subprocess.run([cc, "-shared", "-fPIC", "-O1", "-o", clock, str(tmp_path / "clock.c"), "-ldl"], check=True)
    look = "import time; seen = [time.time() for _ in range(100)]; print(max(seen) - min(seen) > 3e8)"
    environment = os.environ | {"LD_PRELOAD": clock}
    assert subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True).stdout == "True\n"
    for again in range(faults.times(1, 4)):
        began = time.monotonic()
        process = start(tmp_path, tmp_path / str(again), *(ONE if again == 0 else ()), command="sweep", LD_PRELOAD=clock)
        assert (process.communicate()[1], process.returncode) == ("", 0)
        faults.count("sweep under a clock that jumps by years, back and forth")
        rows = sweep({"a": grid(8, 300)}, chapter="x", store=tmp_path / str(again), missing="skip")["a"].rows
        assert ((0 < rows.wall_s) & (rows.wall_s < time.monotonic() - began)).all()
        assert same(table(tmp_path / str(again), grid(8, 300), missing="skip"), serial)


# ----------------------------------------------------------------------------------------------------------- notebooks
@pytest.mark.parametrize(("cell", "why"), [("raise OSError('as asked')", "OSError: as asked"),
                                            ("import os; os.kill(os.getpid(), 9)", "Kernel died")])  # fmt: skip
def test_a_chapter_that_fails_fails_the_build_names_its_cell_and_is_kept(tmp_path, faults, cell, why):
    for _ in range(faults.times(1, 3)):
        cells = CELLS | {"parameters": "workers: int = 1  # processes\nmissing: str = 'train'", "grid": "experiments = {'a': grid(1, 20)}", "end": cell, "after": "print('never')"}
        process = start(tmp_path, tmp_path / "store", command="build", cells=cells)
        said = process.communicate()[1]
        faults.count("a notebook that raises" if "raise" in cell else "a kernel that dies")
        assert process.returncode == 1 and f"small: cell [6] ({cell}) failed: {why}" in said
        kept = (tmp_path / "build/chapters/small.ipynb").read_text()
        assert "2\\n" in kept and len(committed(tmp_path / "store")) == 2 and not (tmp_path / "build/html").exists()


# ---------------------------------------------------------------------------------------------- memory and bad numbers
HUNGRY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
sys.path[:0] = [{tests!r}]
from test_sweep import grid, sweep
if __name__ == "__main__":
    runs = grid(2, 60)
    big = runs[1].model_copy(update={{"training": runs[1].training.model_copy(update={{"batch": 1 << 20, "eval_size": 1 << 20}}),
                                      "task": runs[1].task.model_copy(update={{"T": 4096}})}})
    try:
        sweep({{"a": [big, *runs]}}, chapter="x", store={store!r}, workers={workers})
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("workers", [2, 1][: 1 + Faults.full])
def test_a_run_out_of_memory_is_named_and_stops_no_other(tmp_path, faults, workers):
    """A run that asks for more than the address space has; the others are trained all the same."""
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY.format(tests=str(ROOT / "tests"), store=str(tmp_path / "store"), workers=workers))
    for _ in range(faults.times(1, 3)):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        faults.count("out of memory in one run")
        assert one_line(done.stdout) and "one run alone does not fit" in done.stdout and done.stderr == "", done.stderr
        assert len(committed(tmp_path / "store")) == 4


def test_nan_in_one_member_ends_that_member_alone(faults):
    runs = [run for run in grid(4, 60) if run.task.T == 4]
    clean = train(runs)
    for _ in range(faults.times(3, 50)):
        member, when, name = CHANCE.randrange(4), CHANCE.choice([0, 20, 40]), CHANCE.choice(["embed.weight", "0.up.weight", "read.bias"])

        def poison(step, parameters, constants, member=member, when=when, name=name):
            if step == when:
                parameters[name][member].view(-1)[0] = torch.nan

        results = train(runs, visit=poison)
        faults.count("NaN in one member")
        assert [r.status for r in results] == ["diverged" if i == member else "finished" for i in range(4)]
        assert results[member].steps == when + 20
        for i, (mine, theirs) in enumerate(zip(results, clean, strict=True)):
            if i != member:
                assert torch.allclose(torch.tensor(mine.curves["test_loss"]), torch.tensor(theirs.curves["test_loss"]), atol=1e-5)


def test_a_run_that_diverges_is_recorded_and_stops_no_other(tmp_path, faults):
    runs = grid(2, 60)
    wild = runs[0].model_copy(update={"training": runs[0].training.model_copy(update={"learning_rate": 1e30})})
    rows, curves = table(tmp_path, [wild, *runs], workers=1)
    faults.count("a run that diverges")
    assert rows.status.tolist() == ["diverged", *["finished"] * 4]
    assert same((rows[1:].reset_index(drop=True), curves[curves.run != wild.key].reset_index(drop=True)), table(tmp_path, runs, missing="skip"))
