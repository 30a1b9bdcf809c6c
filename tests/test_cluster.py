"""A sweep on a real scheduler and real worker processes, on loopback: kills, late workers, TLS; the table is the serial one."""

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time

import distributed
import psutil
import pytest
from test_faults import all_gone, committed, first_commit, one_line
from test_sweep import CELLS, ROOT, grid, same, start, table, workers_of

from lib import cluster
from lib.config import InputError
from lib.store import Store
from lib.sweep import ATTEMPTS
from lib.train import train

WORK = cluster._work
trustme = pytest.importorskip("trustme")


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Cluster:
    """`dask scheduler` and `dask worker` as a user starts them."""

    def __init__(self, folder, **environment):
        self.folder, self.processes, self.scheduler, self.port = folder, [], None, port()
        self.environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self.tls = "DASK_DISTRIBUTED__COMM__TLS__CA_FILE" in environment
        self.address = f"{'tls' if self.tls else 'tcp'}://127.0.0.1:{self.port}"
        self.file = str(folder / "scheduler.json")

    def _start(self, *arguments, before=()):
        log = open(self.folder / "cluster.log", "ab")
        line = [*before, sys.executable, "-m", "dask", *arguments, "--dashboard-address", "127.0.0.1:0"]
        self.processes.append(subprocess.Popen(line, env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.folder))
        return self.processes[-1]

    def start_scheduler(self):
        protocol = ("--protocol", "tls") if self.tls else ()
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--scheduler-file", self.file, *protocol)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.1)
        raise TimeoutError

    def start_worker(self, *arguments, threads=1, again=False):
        """A worker; `again`: in a loop that starts it anew when it ends, as the page has it for Slurm."""
        loop = ("sh", "-c", 'while :; do "$@"; sleep 1; done', "loop") if again else ()
        return self._start("worker", self.address, "--nthreads", str(threads), "--host", "127.0.0.1", *arguments, before=loop)

    def listens(self) -> set[str]:
        """Addresses at which its processes wait for connections."""
        with_children = [p for process in self.processes for p in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))]
        return {c.laddr.ip for p in with_children for c in p.net_connections() if c.status == psutil.CONN_LISTEN}

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    each.kill()
            process.wait()
        self.processes = []


@pytest.fixture
def dask(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def more_than(count, store, process):
    wait_for(lambda: len(committed(store)) > count or process.poll() is not None)


def worker_of(nanny) -> psutil.Process:
    children = []

    def there():
        children[:] = workers_of(nanny.pid)
        return children

    wait_for(there)
    return children[0]


def test_workers_and_schedulers_die_and_come_late_and_every_run_ends_once(tmp_path, dask, faults):
    """The sweep starts without a worker; one comes, is killed in mid-run and again; the scheduler is killed and started again."""
    store, runs, kills = tmp_path / "store", grid(8, 300), faults.times(1, 3)
    for _ in range(faults.times(1, 4)):
        shutil.rmtree(store, ignore_errors=True)
        dask.start_scheduler()
        process = start(tmp_path, store, "--scheduler", dask.file, command="sweep")
        time.sleep(1)
        assert process.poll() is None and not committed(store)
        nanny = dask.start_worker()
        faults.count("a worker that comes late")
        kept = {}
        for _ in range(kills):
            more_than(len(kept), store, process)
            worker_of(nanny).kill()  # its nanny starts another
            faults.count("kill -9 of a cluster's worker in mid-run")
            assert kept.items() <= committed(store).items()
            kept = committed(store)
        more_than(len(kept), store, process)
        dask.start_worker(again=True)
        faults.count("a worker that comes late")
        assert dask.listens() == {"127.0.0.1"}
        dask.scheduler.kill()
        faults.count("kill -9 of the scheduler")
        assert process.poll() is None, "too fast a machine: the sweep was over"
        nanny.wait(60)  # workers leave when their scheduler is gone; one is started again by its loop, and is all there is then
        kept = committed(store)
        dask.start_scheduler()
        said = process.communicate(timeout=400)[1]
        assert process.returncode == 0, said
        assert [line[:25] for line in said.splitlines()] == ["sweep: lost the scheduler", "sweep: the scheduler is t"], said
        assert kept.items() <= committed(store).items() and len(committed(store)) == len(runs)
        assert not list(store.rglob("*.tmp")) and not list((store / "locks").glob("seen.*"))
        assert "trained twice" not in (tmp_path / "cluster.log").read_text(errors="replace")
        dask.close()
    assert same(table(store, runs, missing="skip"), table(tmp_path / "serial", runs, workers=1))


def test_a_cluster_made_here_gives_the_same_table_and_a_figure_of_its_scaling(tmp_path, faults):
    """--scheduler dask with one worker and with two; in the soak long enough to be timed."""
    runs = grid(4, 60) if not faults.full else grid(12, 2000)
    tables = []
    for workers in (1, 2) if faults.full else (2,):
        if faults.full:  # the same cluster, once to start and once to be timed
            table(tmp_path / f"warm{workers}", runs[:2], scheduler="dask", workers=workers)
        began = time.perf_counter()
        tables.append(table(tmp_path / str(workers), runs, scheduler="dask", workers=workers))
        seconds = time.perf_counter() - began
        faults.measure(what="sweep on dask workers", workers=workers, runs=len(runs), seconds=seconds)
    assert same(tables[-1], table(tmp_path / "serial", runs, workers=1) if len(tables) == 1 else tables[0])


def _dies(runs, folder, device):
    """In place of `_work`, on a worker: the run of seed 1 takes its worker with it."""
    if runs[0].seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return WORK(runs, folder, device)


def test_a_run_that_takes_its_worker_with_it_each_time_is_named_and_stops_no_other(tmp_path, dask, faults):
    (tmp_path / "preload.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\nimport test_cluster\nfrom lib import cluster\ncluster._work = test_cluster._dies"
    )
    dask.start_scheduler()
    dask.start_worker("--preload", str(tmp_path / "preload.py"))
    with pytest.raises(InputError, match=r"single_location: a worker process died .*and 1 runs more"):
        table(tmp_path / "store", grid(3, 20), scheduler=dask.address)
    faults.count("a run that kills its cluster's worker, each time", 2 * 4)
    rows, _ = table(tmp_path / "store", grid(3, 20), missing="skip")
    assert sorted(rows.seed) == [0, 0, 2, 2]
    assert not list((tmp_path / "store" / "locks").glob("seen.*"))


@pytest.mark.parametrize("begun, attempts, became", [(0, 2, "censored"), (ATTEMPTS, 1, "died"), (0, 1 + ATTEMPTS, "died")])
def test_a_run_that_only_waited_where_another_died_is_handed_in_again(tmp_path, monkeypatch, begun, attempts, became):
    """The scheduler blames all that a dead worker held; the book those that it had begun, or that it blames every time."""
    store, (run, *_) = Store(tmp_path).open(), grid(1, 20)
    cluster._begun(tmp_path, "seen.x", run.key).write_bytes(b"." * begun)
    handed = []

    class Future:
        status = "finished"

        def __init__(self, number):
            self.number = number

        def result(self):
            if became == "died" or self.number < attempts:
                raise cluster.KilledWorker("task", None, 3)
            return [(run.key, became)]

    class Client:
        status = "closed"

        def submit(self, *_, **__):
            handed.append(Future(len(handed) + 1))
            return handed[-1]

        def scheduler_info(self, **_):
            return {"workers": {}}

    monkeypatch.setattr(cluster, "_ended", lambda futures, client: iter(list(futures)))
    ended = [outcome.became for outcomes in cluster._on(Client(), [run], store, "seen.x", "cpu") for outcome in outcomes.values()]
    assert ended == [became] and len(handed) == attempts


def test_kill_9_of_a_sweep_takes_its_own_cluster_along(tmp_path, faults):
    if not faults.full:
        pytest.skip("kills of the sweep are sampled without a cluster; with one in `make soak`")
    for _ in range(4):
        store = tmp_path / "store"
        process = start(tmp_path, store, "--scheduler", "dask", command="sweep")
        first_commit(store, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        faults.count("kill -9 of a sweep with a cluster of its own")
        assert all_gone(process.pid)
        shutil.rmtree(store)


def test_ctrl_c_on_a_cluster(tmp_path, faults, dask):
    dask.start_scheduler()
    dask.start_worker()
    process = start(tmp_path, tmp_path / "store", "--scheduler", dask.address, command="sweep")
    first_commit(tmp_path / "store", process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    faults.count("Ctrl-C on a cluster")
    assert process.returncode == 130 and "the next call goes on" in said and len(said.strip().splitlines()) == 1
    kept = committed(tmp_path / "store")
    process = start(tmp_path, tmp_path / "store", "--scheduler", dask.address, command="sweep")  # its worker is still of use
    assert process.communicate()[1] == "" and process.returncode == 0
    assert kept.items() <= committed(tmp_path / "store").items()
    # a GPU is asked for as a resource: of this worker in vain
    with pytest.raises(InputError, match="no worker offers a GPU; start workers with --resources GPU=1"):
        table(tmp_path / "gpu", grid(1, 20), scheduler=dask.address, device="cuda")
    dask.start_worker("--resources", "GPU=1", "--name", "with-gpu")
    wait_for(lambda: "with-gpu" in _workers(dask.address))
    with pytest.raises(InputError, match="cuda was asked for and no CUDA device is visible"):  # it went to the one that says it has one
        table(tmp_path / "gpu", grid(1, 20), scheduler=dask.address, device="cuda")


def _workers(address):
    with distributed.Client(address, set_as_default=False) as client:
        return {str(w["name"]) for w in client.scheduler_info(n_workers=-1)["workers"].values()}


def test_what_is_wrong_with_a_worker_is_said_in_one_line(tmp_path, dask, monkeypatch):
    dask.start_scheduler()
    worker = dask.start_worker(threads=2)
    with pytest.raises(InputError, match="has 2 threads; start workers with --nthreads 1"):
        table(tmp_path / "store", grid(1, 20), scheduler=dask.address)
    for each in [*psutil.Process(worker.pid).children(), worker]:
        each.kill()
    dask.start_worker()
    monkeypatch.setattr(type(grid()[0].task), "version", 99)  # here, and not on the worker
    with pytest.raises(InputError, match=r"has another version of the book \(single_location\); update it"):
        table(tmp_path / "store", grid(1, 20), scheduler=dask.address)


@pytest.mark.parametrize(("scheduler", "said"), [
    ("tcp://127.0.0.1:9", "cannot reach tcp://127.0.0.1:9"), ("tls://127.0.0.1:9", "ssl_context.*TLS"),
    ("tcp://192.0.2.1:8786", "beyond this machine and not encrypted; use TLS"), ("nowhere.json", "no scheduler file"),
    ("http://127.0.0.1:1", "no address"), ("tcp://:x", "no address"), ("tcp://[", "no address"), (".", "no scheduler file"),
])  # fmt: skip
def test_a_scheduler_that_is_not_there_gets_one_line(tmp_path, capfd, monkeypatch, scheduler, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said) as error:
        table(tmp_path / "store", grid(1, 20), scheduler=scheduler)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""
    assert not committed(tmp_path / "store") and not list((tmp_path / "store/locks").glob("seen.*"))


def test_a_scheduler_file_is_data(tmp_path):
    file = tmp_path / "s.json"
    for content in ("", "[]", "{}", '{"address": 3}', '{"address": "inproc://x/1"}', '{"address": null}', "[" * 99999):
        file.write_text(content)
        with pytest.raises(InputError, match="scheduler: "):
            cluster.address(str(file))
    file.write_text('{"address": "tcp://127.0.0.1:8786"}')
    assert cluster.address(str(file)) == "tcp://127.0.0.1:8786"


# ----------------------------------------------------------------------------------------------------------------- TLS
def authority(folder, name):
    """A certificate authority and one certificate of it, as Dask's configuration by environment."""
    ca, own = trustme.CA(), folder / name
    own.mkdir()
    ca.cert_pem.write_to_path(own / "ca.pem")
    leaf = ca.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(own / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(own / "cert.pem")
    variables = {"CA_FILE": own / "ca.pem"}
    for role in ("CLIENT", "SCHEDULER", "WORKER"):
        variables |= {f"{role}__CERT": own / "cert.pem", f"{role}__KEY": own / "key.pem"}
    tls = {f"DASK_DISTRIBUTED__COMM__TLS__{variable}": str(path) for variable, path in variables.items()}
    return tls | {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"}


def test_with_tls_the_cluster_refuses_plain_connections_and_strangers(tmp_path, faults):
    own, other = authority(tmp_path, "own"), authority(tmp_path, "other")
    dask = Cluster(tmp_path, **own)
    try:
        dask.start_scheduler()
        dask.start_worker()
        few = CELLS | {"grid": "experiments = {'a': grid(1, 20)}"}
        process = start(tmp_path, tmp_path / "store", "--scheduler", dask.file, command="sweep", cells=few, **own)
        assert (process.communicate()[1], process.returncode) == ("", 0)
        assert len(committed(tmp_path / "store")) == 2

        process = start(tmp_path, tmp_path / "own cluster", "--scheduler", "dask", command="sweep", cells=few, **own)  # one made here uses TLS, too
        assert (process.communicate()[1], process.returncode) == ("", 0)
        assert len(committed(tmp_path / "own cluster")) == 2
        bare = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"}
        process = start(tmp_path, tmp_path / "none", "--scheduler", "dask", command="sweep", cells=few, **bare)
        said = process.communicate()[1]
        assert process.returncode == 2 and one_line(said) and "see TLS on the page" in said, said

        plain = dask.address.replace("tls", "tcp")
        cases = {"plain": (plain, {}), "TLS of another authority": (dask.address, other), "no certificate": (dask.address, {})}
        cases = dict(list(cases.items())[: faults.times(2, 3)])
        for what, (address, environment) in cases.items():
            process = start(tmp_path, tmp_path / "none", "--scheduler", address, command="sweep", **environment)
            said = process.communicate()[1]
            faults.count(f"a client that connects with {what} to a cluster with TLS" if what != "plain" else "a plain client to a cluster with TLS")
            assert process.returncode == 2 and one_line(said) and re.search("cannot reach|TLS", said), said
        process = start(tmp_path, tmp_path / "none", "--scheduler", plain, command="sweep", **own)
        said = process.communicate()[1]  # told to use TLS, it does not even try
        assert process.returncode == 2 and one_line(said) and "encryption required" in said
        assert not committed(tmp_path / "none")

        with pytest.raises((OSError, TimeoutError)):  # Dask's own plain handshake gets no answer
            asyncio.run(cluster._greet(plain))
        stranger = ssl.create_default_context(cafile=tmp_path / "own/ca.pem")
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", dask.port), 5) as raw:  # who trusts it and shows no certificate
            with stranger.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
                secure.settimeout(5)
                if secure.recv(1) == b"":
                    raise ConnectionResetError
    finally:
        dask.close()


# ------------------------------------------------------------------------------------------------- what limits a cluster
def test_what_the_scheduler_and_the_store_take_for_each_run(tmp_path, faults):
    """Tasks that do nothing, through a real scheduler to one worker; and commits of one process to the store."""
    count = faults.times(50, 3000)
    with cluster._client("dask", 1, 5.0) as client:
        client.submit(abs, -1).result()
        began = time.perf_counter()
        assert sum(client.gather(client.map(abs, range(count), pure=False))) == count * (count - 1) // 2
        faults.measure(what="tasks that do nothing, one worker", workers=1, runs=count, seconds=time.perf_counter() - began)
    store, result, count = Store(tmp_path).open(), train(grid(1, 20)[:1])[0], faults.times(20, 300)
    results = [result._replace(run=result.run.model_copy(update={"seed": seed})) for seed in range(count)]
    began = time.perf_counter()
    for each in results:
        with store.lock(each.run) as mine:
            assert mine
            store.put(each)
    faults.measure(what="commits to the store, one process", workers=1, runs=count, seconds=time.perf_counter() - began)
    assert all(each.run in store for each in results)
