"""Finished runs on disk, found again by their configuration: a live store, and the frozen results that the book ships.

A finished run is two files that are never changed: `<key>.parquet` (curves) and `<key>.json` (configuration, outcome,
provenance, checksum), both written to a temporary name, fsynced and renamed. The sidecar comes last and is the commit
mark, so a run that was killed at any moment is either there whole or not there. The sidecar carries a hash of the curves
and a hash of itself, its seal: what does not agree with them is set aside and named.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
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
from lib.files import why, write
from lib.run import Run
from lib.train import Result

ROOT = Path(__file__).resolve().parent.parent
OUTCOME = ("status", "steps", "wall_s", "device")
MADE = ("finished", "torch", "processor")  # where and when a frozen run was made
FORMAT = 2  # of a sidecar; 1 had neither this number nor a seal


def results_folder() -> Path:
    """Where the frozen results lie: environment BOOK_RESULTS, else book/results."""
    return Path(os.environ.get("BOOK_RESULTS") or ROOT / "book" / "results")


def processor() -> str:
    """The name of this machine's processor."""
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def _seal(sidecar: dict) -> str:
    """Hash of all else that the sidecar says."""
    rest = {name: value for name, value in sidecar.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _opened(text: bytes, key: str) -> dict:
    """A sidecar's content; ValueError if it is damaged or another run's, InputError if a later version wrote it."""
    sidecar = json.loads(text)
    sealed = {"format", "seal"} & set(sidecar)
    if sealed and sidecar.get("seal") != _seal(sidecar):
        raise ValueError("the record does not agree with its seal")
    if sealed and not (isinstance(sidecar.get("format"), int) and sidecar["format"] >= 2):
        raise ValueError("the record has no format")
    if sealed and sidecar["format"] > FORMAT:
        raise InputError(
            f"store: run {key} was written in format {sidecar['format']}, and this version reads up to {FORMAT}; "
            "update the book, or set BOOK_STORE to another folder"
        )
    if sidecar["key"] != key:
        raise ValueError(f"it is the record of {sidecar['key']}")
    return sidecar


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
        except OSError as error:
            raise InputError(f"store: cannot lock a run in {self.folder} ({why(error)}); free space or choose another store") from None
        try:
            yield True
        finally:
            lock.release()

    def free(self, run: Run) -> bool:
        """Whether nobody is training the run now."""
        with self.lock(run) as mine:
            return mine

    def put(self, result: Result) -> None:
        """Commit a finished run; one that is there already stays as it is, and says so. InputError if it cannot be written."""
        run = result.run
        if run in self:
            print(f"store: run {run.key} was trained twice; do locks hold between all who use {self.folder}?", file=sys.stderr)
            return
        buffer = io.BytesIO()
        pq.write_table(pa.table(result.curves), buffer, compression="zstd")
        data = buffer.getvalue()
        outcome = {name: getattr(result, name) for name in OUTCOME}
        made = {"finished_at": time.time(), "python": sys.version.split()[0], "torch": torch.__version__}
        made |= {"processor": processor(), "machine": platform.machine(), "sha256": hashlib.sha256(data).hexdigest()}
        sidecar = {"format": FORMAT, "key": run.key, "run": run.model_dump(), "outcome": outcome, "made": made}
        sidecar["seal"] = _seal(sidecar)
        path = self.path(run.key, ".parquet")
        if path.parent.is_symlink():
            raise InputError(f"store: {path.parent} is a link, and what is written there would leave the store; remove it")
        try:
            path.parent.mkdir(exist_ok=True)
            if path.exists() and path.read_bytes() != data:
                self._set_aside(run, "curves without a record")
        except OSError as error:
            raise InputError(f"store: cannot write to {self.folder} ({why(error)}); free space or choose another store") from None
        write(path, data)
        write(path.with_suffix(".json"), json.dumps(sidecar, indent=1).encode())
        for left in path.parent.glob(f"{run.key}.*.tmp"):  # by whoever was killed while writing this run
            left.unlink(missing_ok=True)

    def get(self, run: Run) -> tuple[dict, pd.DataFrame] | None:
        """(outcome, curves) of a finished run, or None. A damaged one is set aside, named, and counts as absent.

        InputError if the disk does not let it be read, or if a later version of the book wrote it: it stays where it is.
        """
        sidecar_path, path = self.path(run.key, ".json"), self.path(run.key, ".parquet")
        if not sidecar_path.exists():
            return None
        try:
            sidecar = _opened(sidecar_path.read_bytes(), run.key)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != sidecar["made"]["sha256"]:
                raise ValueError("checksum differs")
            return {name: sidecar["outcome"][name] for name in OUTCOME}, pq.read_table(io.BytesIO(data)).to_pandas()
        except InputError:
            raise
        except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._set_aside(run, " ".join(str(error).split()))
            return None
        except OSError as error:
            raise InputError(f"store: cannot read run {run.key} in {self.folder} ({why(error)}); mend the disk, or choose another store") from None

    def made(self, run: Run) -> dict:
        """Date, torch and processor of a run that `get` finds here; {} if it is not here."""
        try:
            made = _opened(self.path(run.key, ".json").read_bytes(), run.key)["made"]
        except (OSError, ValueError, KeyError):
            return {}
        day = time.strftime("%Y-%m-%d", time.gmtime(made["finished_at"]))
        return {"finished": day, "torch": made["torch"], "processor": made.get("processor")}

    def _set_aside(self, run: Run, reason: str) -> None:
        """Move a run's files to the folder `damaged`, under names that are free there, and say so."""
        aside = self.folder / "damaged"
        try:
            aside.mkdir(exist_ok=True)
            for suffix in (".json", ".parquet"):
                if os.path.lexists(damaged := self.path(run.key, suffix)):
                    number = sum(1 for _ in aside.glob(f"{damaged.name}*"))
                    os.replace(damaged, aside / (f"{damaged.name}.{number}" if number else damaged.name))
        except OSError as error:
            raise InputError(
                f"store: run {run.key} is damaged ({reason}) and cannot be set aside in {aside} ({why(error)}); make {self.folder} writable"
            ) from None
        print(f"store: run {run.key} is damaged ({reason}); set aside in {aside}, it will be trained again", file=sys.stderr)


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: damaged ({' '.join(str(error).split())[:200]}); fetch it again with `git checkout`")


class Frozen:
    """The results that the repository ships: `<chapter>.<profile>.csv` (one row a run) and `.parquet` (curves)."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or results_folder()
        self.rows, self._made = {}, {}
        for path in sorted(self.folder.glob("*.csv")):
            try:
                table = pd.read_csv(path, usecols=lambda name: name in ("run", *OUTCOME, *MADE), dtype=dict.fromkeys(MADE, str))
                rows = table[["run", *OUTCOME]].to_dict("records")
            except (OSError, ValueError, KeyError) as error:
                raise _unreadable(path, error) from None
            self.rows |= {row["run"]: (path.with_suffix(".parquet"), {n: row[n] for n in OUTCOME}) for row in rows}
            made = table.reindex(columns=["run", *MADE]).astype(object).where(lambda t: t.notna(), None)
            self._made |= {row.pop("run"): row for row in made.to_dict("records")}
        self._curves: dict[Path, dict[str, pd.DataFrame]] = {}

    def get(self, run: Run) -> tuple[dict, pd.DataFrame] | None:
        """(outcome, curves) of a frozen run, or None."""
        if run.key not in self.rows:
            return None
        path, outcome = self.rows[run.key]
        try:
            if path not in self._curves:
                self._curves[path] = dict(list(pq.read_table(path).to_pandas().groupby("run", sort=False)))
            curves = self._curves[path][run.key]
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from None
        curves = curves.drop(columns="run").dropna(axis=1, how="all")
        return outcome, curves.reset_index(drop=True)


    def made(self, run: Run) -> dict:
        """Date, torch and processor of a frozen run, None where they were not kept."""
        return self._made[run.key]


def freeze(runs: Iterable[Run], store: Store, chapter: str, profile: str) -> int:
    """Write every finished run of a grid into book/results for the repository to ship; returns how many.

    Runs that are frozen already and absent from the live store are kept.
    """
    if not all(re.fullmatch(r"\w[\w-]*", name) for name in (chapter, profile)):
        raise InputError(f"freeze: {chapter!r} and {profile!r} name files in {results_folder()}; use letters, digits, _ and -")
    frozen, rows, curves = Frozen(), [], []
    for run in {run.key: run for run in runs}.values():
        found = store.get(run) or frozen.get(run)
        if found:
            made = store.made(run) or frozen.made(run)
            rows.append(run.row() | found[0] | {"wall_s": round(found[0]["wall_s"], 1)} | {name: made[name] for name in MADE})
            curves.append(found[1].assign(run=run.key))
    if not rows:
        raise InputError(f"freeze: no run of {chapter} at profile {profile} has finished; train some first")
    frozen.folder.mkdir(parents=True, exist_ok=True)
    table = pd.concat(curves, ignore_index=True)
    table = table.astype({c: "float32" for c in table.select_dtypes("float64").columns})
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), buffer, compression="zstd")
    write(frozen.folder / f"{chapter}.{profile}.parquet", buffer.getvalue())
    write(frozen.folder / f"{chapter}.{profile}.csv", pd.DataFrame(rows, dtype=object).to_csv(index=False).encode())
    return len(rows)
