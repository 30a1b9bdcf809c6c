"""Finished runs on disk, found again by their configuration: a live store, and the frozen results that the book ships.

A finished run is two files that are never changed: `<key>.parquet` (curves) and `<key>.json` (configuration, outcome,
provenance, checksum), both written to a temporary name, fsynced and renamed. The sidecar comes last and is the commit
mark, so a run that was killed at any moment is either there whole or not there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import filelock
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lib.config import InputError
from lib.run import Run
from lib.train import Result

ROOT = Path(__file__).resolve().parent.parent
OUTCOME = ("status", "steps", "wall_s", "device")


def results_folder() -> Path:
    """Where the frozen results lie: environment BOOK_RESULTS, else book/results."""
    return Path(os.environ.get("BOOK_RESULTS") or ROOT / "book" / "results")


def _write(path: Path, data: bytes) -> None:
    """Write whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"store: cannot write {path.name} in {path.parent} ({error.strerror}); free space or choose another store") from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Store:
    """A folder of finished runs; default: environment BOOK_STORE, else `.store` in the repository."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder or os.environ.get("BOOK_STORE") or ROOT / ".store")

    def open(self) -> Store:
        """Make the folder; InputError if it cannot be written."""
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            probe = self.folder / "locks" / f"probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"store: cannot write to {self.folder} ({error.strerror}); set BOOK_STORE to a folder you may write"
            ) from None
        return self

    def path(self, key: str, suffix: str) -> Path:
        """Where a run's file lies."""
        return self.folder / key[:2] / f"{key}{suffix}"

    def __contains__(self, run: Run) -> bool:
        return self.path(run.key, ".json").exists()

    @contextmanager
    def lock(self, run: Run):
        """Yield True if this process alone may train the run now; the system frees the lock when its holder dies."""
        lock = filelock.FileLock(self.folder / "locks" / run.key, blocking=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def put(self, result: Result) -> None:
        """Commit a finished run; one that is there already stays as it is."""
        run = result.run
        if run in self:
            return
        buffer = io.BytesIO()
        pq.write_table(pa.table(result.curves), buffer, compression="zstd")
        data = buffer.getvalue()
        outcome = {name: getattr(result, name) for name in OUTCOME}
        made = {"finished_at": time.time(), "python": sys.version.split()[0], "torch": torch.__version__}
        made |= {"machine": platform.machine(), "sha256": hashlib.sha256(data).hexdigest()}
        sidecar = {"key": run.key, "run": run.model_dump(), "outcome": outcome, "made": made}
        path = self.path(run.key, ".parquet")
        path.parent.mkdir(exist_ok=True)
        _write(path, data)
        _write(path.with_suffix(".json"), json.dumps(sidecar, indent=1).encode())

    def get(self, run: Run) -> tuple[dict, pd.DataFrame] | None:
        """(outcome, curves) of a finished run, or None. A damaged one is set aside, named, and counts as absent."""
        sidecar_path, path = self.path(run.key, ".json"), self.path(run.key, ".parquet")
        if not sidecar_path.exists():
            return None
        try:
            sidecar = json.loads(sidecar_path.read_bytes())
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != sidecar["made"]["sha256"]:
                raise ValueError("checksum differs")
            return {name: sidecar["outcome"][name] for name in OUTCOME}, pq.read_table(io.BytesIO(data)).to_pandas()
        except (OSError, ValueError, KeyError, TypeError) as error:
            aside = self.folder / "damaged"
            aside.mkdir(exist_ok=True)
            for damaged in (sidecar_path, path):
                if damaged.exists():
                    os.replace(damaged, aside / damaged.name)
            print(f"store: run {run.key} is damaged ({error}); set aside in {aside}, it will be trained again", file=sys.stderr)
            return None


class Frozen:
    """The results that the repository ships: `<chapter>.<profile>.csv` (one row a run) and `.parquet` (curves)."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or results_folder()
        self.rows = {}
        for path in sorted(self.folder.glob("*.csv")):
            for row in pd.read_csv(path, usecols=["run", *OUTCOME]).to_dict("records"):
                self.rows[row["run"]] = (path.with_suffix(".parquet"), {name: row[name] for name in OUTCOME})
        self._curves: dict[Path, dict[str, pd.DataFrame]] = {}

    def get(self, run: Run) -> tuple[dict, pd.DataFrame] | None:
        """(outcome, curves) of a frozen run, or None."""
        if run.key not in self.rows:
            return None
        path, outcome = self.rows[run.key]
        if path not in self._curves:
            table = pq.read_table(path).to_pandas()
            self._curves[path] = dict(list(table.groupby("run", sort=False)))
        curves = self._curves[path][run.key].drop(columns="run").dropna(axis=1, how="all")
        return outcome, curves.reset_index(drop=True)


def freeze(runs: Iterable[Run], store: Store, chapter: str, profile: str) -> int:
    """Write every finished run of a grid into book/results for the repository to ship; returns how many.

    Runs that are frozen already and absent from the live store are kept.
    """
    frozen, rows, curves = Frozen(), [], []
    for run in {run.key: run for run in runs}.values():
        found = store.get(run) or frozen.get(run)
        if found:
            rows.append(run.row() | found[0] | {"wall_s": round(found[0]["wall_s"], 1)})
            curves.append(found[1].assign(run=run.key))
    if not rows:
        raise InputError(f"freeze: no run of {chapter} at profile {profile} has finished; train some first")
    frozen.folder.mkdir(parents=True, exist_ok=True)
    table = pd.concat(curves, ignore_index=True)
    table = table.astype({c: "float32" for c in table.select_dtypes("float64").columns})
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), buffer, compression="zstd")
    _write(frozen.folder / f"{chapter}.{profile}.parquet", buffer.getvalue())
    _write(frozen.folder / f"{chapter}.{profile}.csv", pd.DataFrame(rows).to_csv(index=False).encode())
    return len(rows)
