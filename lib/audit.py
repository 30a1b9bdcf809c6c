"""Are the results that the book ships what its code gives? Some are drawn at random, trained again and compared.

A run is made again from its line in book/results/<chapter>.<profile>.csv and nothing else. On the machine and versions that
made it, it comes out equal to the bit. Elsewhere trajectories agree to rounding at first and then drift apart, so a run
*agrees* if it ended alike, if its loss passed the line at which a run may end (or half of its way) at the same step within
TIME or one reading, and if the median over readings of the difference in loss is at most LOSS.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from lib import chapters, files
from lib.config import InputError
from lib.emergence import first_below
from lib.run import Run
from lib.store import Frozen, Store, results_folder
from lib.sweep import make_up

TIME = 0.10  # of that step; a GPU's own noise moves it by about 8 %
LOSS = 0.02  # in the run's own unit: nats, or half a squared error


def rebuild(line: dict[str, str]) -> Run:
    """The run of a CSV line, as texts by column; InputError where today's code gives these numbers another meaning."""
    values = {"True": True, "False": False, "": None}

    def value(text: str):
        try:
            return values[text] if text in values else json.loads(text)
        except json.JSONDecodeError:
            return text

    try:
        run = Run.from_row({name: value(text) for name, text in line.items()})
    except (ValueError, KeyError) as error:
        raise InputError(f"audit: run {line.get('run')} cannot be read back: {' '.join(str(error).split())}") from None
    if run.key != line["run"]:
        raise InputError(f"audit: run {line['run']} is called {run.key} today: its line is incomplete, or a version was raised since; freeze it anew")
    return run


def shipped(folder: Path) -> list[dict[str, str]]:
    """Every line of the frozen results, with `chapter` and `profile`; a run that two files hold comes once."""
    lines: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.*.csv")):
        chapter, profile = path.stem.split(".")
        with path.open(newline="") as file:
            lines |= {line["run"]: line | {"chapter": chapter, "profile": profile} for line in csv.DictReader(file)}
    return list(lines.values())


def compare(then: tuple[dict, pd.DataFrame], now: tuple[dict, pd.DataFrame], level: float | None = None) -> dict:
    """Outcomes and curves of a run, shipped and made again: bit-equal or not, how far apart, and whether that agrees.

    It *fell* at the first reading at or below `level`; by default, or if that is never reached, half-way down.
    """
    (was, old), (outcome, new) = then, now
    losses = old["test_loss"].to_numpy(float)
    if level is None or not (losses <= level).any():
        level = (np.nanmax(losses) + np.nanmin(losses)) / 2
    both = old[["step", "test_loss"]].merge(new[["step", "test_loss"]], on="step", suffixes=("_then", "_now"))
    fell = [first_below(curve["step"], curve["test_loss"].to_numpy(float), level) for curve in (old, new)]
    readings = np.searchsorted(old["step"], fell)
    apart = float(np.nanmedian(np.abs(both["test_loss_then"] - both["test_loss_now"])))
    alike = was["status"] == outcome["status"]
    timely = abs(fell[0] - fell[1]) <= TIME * fell[0] or abs(readings[0] - readings[1]) <= 1
    same = [c.select_dtypes("number").astype("float32").reset_index(drop=True) for c in (old, new)]
    equal = alike and was["steps"] == outcome["steps"] and same[0].equals(same[1][same[0].columns])
    return {"steps then": was["steps"], "steps now": outcome["steps"], "fell then": fell[0], "fell now": fell[1],
            "loss apart": apart, "equal": bool(equal), "agrees": bool(alike and timely and apart <= LOSS)}


def audit(count: int = 5, seed: int | None = None, longest: float = 300.0, workers: int = 0, folder: Path | None = None) -> dict:
    """Draw `count` shipped runs of at most `longest` seconds each, train them again, compare: the record, ready for JSON."""
    from lib.bench import machine

    frozen = Frozen(folder)
    lines = shipped(frozen.folder)
    short = [line for line in lines if float(line["wall_s"]) <= longest and line["device"] == "cpu"]
    if not 1 <= count <= len(short):
        raise InputError(f"audit: N = {count}, but {len(short)} of {len(lines)} shipped runs took at most {longest:g} s; choose 1 to {len(short)}")
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    drawn = random.Random(seed).sample(short, count)
    runs = [rebuild(line) for line in drawn]
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(scratch).open()
        make_up(runs, store, workers, label="audit")
        rows = [
            {"chapter": line["chapter"], "profile": line["profile"], "run": run.key, "seconds then": float(line["wall_s"])}
            | compare(frozen.get(run), store.get(run), run.training.stop_below)
            for line, run in zip(drawn, runs, strict=True)
        ]
    return {"machine": machine(), "seed": seed, "shipped": len(lines), "longest": longest, "eligible": len(short),
            "tolerance": {"time": TIME, "loss": LOSS}, "runs": rows}


def load() -> dict:
    """The last audit in the build folder, or else the one that the repository ships; InputError if there is none."""
    for path in (chapters.build_folder() / "audit.json", results_folder() / "audit.json"):
        if path.exists():
            return json.loads(path.read_bytes())
    raise InputError("audit: there is no audit.json; make it with `make audit`")


def write(record: dict, path: Path) -> Path:
    """Keep a record as JSON."""
    files.write(path, (json.dumps(record, indent=1) + "\n").encode())
    return path


def table(record: dict) -> pd.DataFrame:
    """One row an audited run: chapter, profile, run, when it ended and fell then and now, equal to the bit, agrees."""
    return pd.DataFrame(record["runs"]).drop(columns=["seconds then"])
