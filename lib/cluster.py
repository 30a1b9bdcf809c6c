"""Sweeps on a cluster: dask.distributed's scheduler hands runs to its workers, which write them to the store that all share.

A job travels as JSON, a worker makes it a run again and refuses one that it would name differently. TLS is Dask's own, set
by its configuration (`distributed.comm.tls`); beyond this machine a plain connection must be asked for, since whoever reaches
a scheduler may run code on its workers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from lib.config import InputError
from lib.run import Run
from lib.store import Store
from lib.sweep import ATTEMPTS, Outcome, _work, batches, ensemble, uninterrupted
from lib.train import resolve_device

try:
    import distributed
    from distributed.comm import connect
    from distributed.scheduler import KilledWorker
except ImportError:
    raise InputError("scheduler: dask.distributed is not installed; `pip install -c constraints.txt -e '.[cluster]'`") from None

PATIENCE = 600.0  # seconds to wait for a scheduler that was there and is gone
BEAT = 5.0  # seconds without news after which the scheduler is asked for a sign of life
SHOW = 60.0  # seconds that a shared disk may take to show a worker a new file


class Lost(Exception):
    """The scheduler is gone."""


# ------------------------------------------------------------------------------------------------------- on the worker
def remote_work(job: list[tuple[str, str]], folder: str, seen: str, device: str) -> list[tuple[str, str]]:
    """What a worker does: train a job's runs, [(key, JSON)], into the shared store; returns [(key, what became of it)]."""
    worker = distributed.get_worker()
    if worker.state.nthreads != 1:
        raise InputError(f"scheduler: worker {worker.name} has {worker.state.nthreads} threads; start workers with --nthreads 1")
    deadline = time.monotonic() + SHOW
    while not (Path(folder) / "locks" / seen).exists():
        if time.monotonic() > deadline:
            raise InputError(f"scheduler: worker {worker.name} does not see the store {folder}; put it on a disk that all share")
        time.sleep(0.2)
    runs = [Run.model_validate_json(text) for _, text in job]
    for run, (key, _) in zip(runs, job, strict=True):
        if run.key != key:
            raise InputError(f"scheduler: worker {worker.name} has another version of the book ({run.task.kind}); update it")
    device = resolve_device(device)
    for run in runs:
        with suppress(OSError), _begun(folder, seen, run.key).open("ab") as file:  # a disk that takes nothing shows below
            file.write(b".")
    done = [_work(batch, folder, device) for batch in batches(runs, lambda run: ensemble(run, device))]
    return [(outcome.run.key, outcome.became) for outcomes in done for outcome in outcomes]


def _begun(folder: Path | str, seen: str, key: str) -> Path:
    """A file with one byte for each time that a worker began this run for this sweep."""
    return Path(folder) / "locks" / f"{seen}.{key}"


# ------------------------------------------------------------------------------------------------------- on the client
def _here(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        address = socket.getaddrinfo(host, None)[0]
        if ipaddress.ip_address(address[4][0]).is_loopback:
            return True
        with socket.socket(address[0]) as probe:
            probe.bind((address[4][0], 0))
        return True
    except OSError:
        return False


def address(scheduler: str) -> str:
    """The address that a --scheduler names, itself or in a scheduler file; InputError for a plain one beyond this machine."""
    if "://" not in scheduler:
        try:
            with open(scheduler, "rb") as file:
                scheduler = json.loads(file.read(1 << 20))["address"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"scheduler: {scheduler!r} is no scheduler file ({type(error).__name__}); give dask, tcp://HOST:PORT, "
                "tls://HOST:PORT, or the file that `dask scheduler --scheduler-file` wrote"
            ) from None
    try:
        parts = urlsplit(scheduler)
        known = parts.scheme in ("tcp", "tls") and parts.hostname and parts.port
    except (ValueError, AttributeError, TypeError):
        known = False
    if not known:
        raise InputError(f"scheduler: {scheduler!r} is no address; give tcp://HOST:PORT or tls://HOST:PORT")
    if parts.scheme == "tcp" and not os.environ.get("BOOK_PLAIN") and not _here(parts.hostname):
        raise InputError(
            f"scheduler: {scheduler} is beyond this machine and not encrypted; use TLS (page Rerun it), or --plain on a network of your own"
        )
    return scheduler


async def _greet(at: str) -> None:
    """Connect and leave; OSError if nobody is there or certificates do not agree, TypeError or RuntimeError if TLS is not set up."""
    comm = await connect(at, timeout=5, **distributed.Security().get_connection_args("client"))
    await comm.close()


@contextmanager
def _client(scheduler: str, workers: int, patience: float):
    """A client of the cluster; Lost if its scheduler does not answer within `patience` seconds."""
    for name in logging.root.manager.loggerDict:  # what they would say of a lost connection is said below, in one line
        if name.partition(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with ExitStack() as stack:
        if scheduler == "dask":
            security = distributed.Security()
            try:
                with uninterrupted():
                    local = distributed.LocalCluster(
                        n_workers=workers or os.cpu_count() or 1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
                        protocol="tls://" if security.require_encryption else "tcp://", security=security, silence_logs=logging.CRITICAL + 1,
                    )  # fmt: skip
            except (RuntimeError, OSError) as error:
                why = " ".join(str(error.__cause__ or error).split())
                raise InputError(f"scheduler: dask cannot start a cluster here: {why}; if TLS is asked for, see TLS on the page Rerun it") from None
            scheduler = stack.enter_context(local).scheduler_address
        at, deadline = address(scheduler), time.monotonic() + patience
        while True:
            try:
                asyncio.run(_greet(at))
                client = distributed.Client(at, timeout=10, set_as_default=False)
                break
            except OSError as error:  # nobody there, or a refused certificate
                if time.monotonic() > deadline:
                    raise Lost(f"{at} ({' '.join(str(error.__cause__ or error).split())[:160] or 'no answer'})") from None
                time.sleep(0.5)
                at = address(scheduler)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(f"scheduler: {at}: {' '.join(str(error).split())}; see TLS on the page Rerun it") from None
        try:
            yield client
        finally:
            client.close(timeout=2)


def _jobs(runs: list[Run], client, device: str) -> tuple[list[list[Run]], str, dict]:
    """(jobs, device, what a worker must offer): one run a job on a CPU; on GPUs runs alike, an equal share each."""
    offers = [w.get("resources", {}).get("GPU", 0) for w in client.scheduler_info(n_workers=-1)["workers"].values()]
    gpus = int(sum(offers))
    if device == "cuda" and not gpus:
        raise InputError("scheduler: no worker offers a GPU; start workers with --resources GPU=1, or set device = 'cpu'")
    if device == "cpu" or not gpus:
        return [[run] for run in runs], "cpu", {}
    count: dict[str, int] = {}
    for run in runs:
        count[run.alike] = count.get(run.alike, 0) + 1
    return list(batches(runs, lambda run: math.ceil(count[run.alike] / gpus))), "cuda", {"GPU": 1}


def _ended(futures, client) -> Iterator:
    """Futures as they end; Lost if the scheduler is gone."""
    left = set(futures)
    while left:
        try:
            for future in distributed.as_completed(left, loop=client.loop, timeout=BEAT):
                if future.cancelled() or future.status in ("lost", "cancelled"):
                    raise Lost
                left.discard(future)
                yield future
        except TimeoutError:  # no news: is it there?
            try:
                if client.status != "running":
                    raise Lost
                client.sync(client.scheduler.identity, n_workers=0, callback_timeout=6 * BEAT)
            except (OSError, TimeoutError):
                raise Lost from None


def results(runs: list[Run], store: Store, workers: int, device: str, scheduler: str) -> Iterator[list[Outcome]]:
    """Each job's outcomes as they come. A worker that dies is replaced, a scheduler that dies is waited for.

    InputError for a cluster that cannot be reached, a worker of another version, or one that does not see the store.
    """
    seen, store = f"seen.{uuid.uuid4().hex}", Store(store.folder.resolve())
    left, patience = {run.key: run for run in runs}, 5.0
    (store.folder / "locks" / seen).touch()
    try:
        while left:
            try:
                with _client(scheduler, workers, patience) as client:
                    if patience == PATIENCE:
                        print("sweep: the scheduler is there again", file=sys.stderr)
                    patience = PATIENCE
                    for outcomes in _on(client, list(left.values()), store, seen, device):
                        for key in outcomes:
                            left.pop(key, None)
                        yield list(outcomes.values())
                    break
            except Lost as lost:
                if str(lost):
                    raise InputError(f"scheduler: cannot reach {lost}; finished runs are kept, start it and call again") from None
                print(f"sweep: lost the scheduler; finished runs are kept, waiting {PATIENCE:.0f} s for it", file=sys.stderr)
                left = {key: run for key, run in left.items() if run not in store}
    finally:
        for mark in (store.folder / "locks").glob(f"{seen}*"):
            mark.unlink(missing_ok=True)


def _on(client, runs: list[Run], store: Store, seen: str, device: str, left: int = ATTEMPTS) -> Iterator[dict[str, Outcome]]:
    """{key: outcome} of each job on this cluster; a job that took its worker with it too often has died.

    The scheduler also gives up on jobs that only waited on workers that died. Those are handed in again, so many times.
    """
    futures, again = {}, []
    try:
        jobs, device, needs = _jobs(runs, client, device)
        for job in jobs:
            told = [(run.key, run.model_dump_json()) for run in job]
            futures[client.submit(remote_work, told, str(store.folder), seen, device, pure=False, resources=needs)] = job
    except OSError:
        raise Lost from None
    try:
        for future in _ended(futures, client):
            job = {run.key: run for run in futures.pop(future)}
            try:
                ended = {key: Outcome(job[key], became) for key, became in future.result()}
            except KilledWorker:
                if left and all(_times(_begun(store.folder, seen, key)) < ATTEMPTS for key in job):
                    again += job.values()
                    continue
                ended = {key: Outcome(run, "died") for key, run in job.items()}
            except (OSError, CancelledError):  # a result that cannot be fetched any more; what it tells of is in the store
                if future.status == "error":
                    raise
                raise Lost from None
            except ImportError as error:
                raise InputError(f"scheduler: a worker cannot import {error.name}; give it this book's environment") from None
            yield ended
    finally:
        if client.status == "running":
            with suppress(OSError, CancelledError):
                client.cancel(list(futures), force=True)
    if again:
        yield from _on(client, again, store, seen, device, left - 1)


def _times(mark: Path) -> int:
    """How often a run was begun: the size of its mark."""
    return mark.stat().st_size if mark.exists() else 0
