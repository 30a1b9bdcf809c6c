"""What the site's run browser shows: every run's curves and emergence, and the attention of those that chapters followed.

A chapter hands over attention that it has computed (`keep`); the site writes one script a chapter (`export`), which the page
loads when the chapter is chosen. A script and not a data file, since a page that is opened from disk may not read files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import torch

from lib import chapters, probe
from lib.claims import build_folder
from lib.config import InputError
from lib.emergence import emergence
from lib.files import write
from lib.run import Run
from lib.store import results_folder
from lib.sweep import Sweep, sweep
from lib.tasks.base import Batch
from lib.train import train

POINTS = 80  # of a curve
BRIEF = 250  # a chapter with more runs than this has its main curves only
MAPS = 8  # of a run; with more heads, a map a layer
MAIN = ("test_loss", "train_loss", "accuracy")


def keep(chapter: str, run: Run, maps: Mapping[int, Sequence], truth, names: Sequence[str], most: int = 50) -> None:
    """Keep a run's attention for the run browser, in the build folder.

    maps   step -> attention (map, query, position), from 0 to 1; of more than `most` steps some are left out
    truth  the true pattern, bool (query, position)
    names  one a map, such as "head 3"
    """
    path = build_folder() / "attention" / f"{chapter}.json"
    write(path, json.dumps(kept(path) | {run.key: _entry(maps, truth, names, most)}).encode())


def _entry(maps: Mapping[int, Sequence], truth, names: Sequence[str], most: int) -> dict:
    """One run's attention as it is kept."""
    steps = sorted(maps)
    steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))]
    values = np.stack([np.asarray(maps[step], dtype=float) for step in steps])
    truth = np.asarray(truth, dtype=bool)
    if values.ndim != 4 or values.shape[2:] != truth.shape or values.shape[1] != len(names):
        raise InputError(f"keep: maps {values.shape[1:]} need a true pattern of the same lines and columns, not {truth.shape}, and a name each")
    return {"steps": steps, "shape": list(values.shape), "names": list(names), "maps": _packed(255 * values), "truth": _packed(truth)}


def look(run: Run) -> dict:
    """Train a run again and take its attention at the first step, at its emergence and at the last, as it is kept.

    The steps are those of this training: on another kind of processor it may go another way than the one whose curve is shipped.
    Mean over held-out sequences where the true pattern is the same in all, else in the first. A map a head, or a layer where there are more than
    MAPS; for a task that is read once, a map a layer with a line a head.
    """
    seen: dict[int, dict] = {}
    result = train([run], "cpu", lambda step, parameters, _: seen.update({step: {name: value.clone() for name, value in parameters.items()}}))[0]
    curves = pd.DataFrame(result.curves).assign(run=run.key)
    rows = pd.DataFrame([run.row() | {name: getattr(result, name) for name in ("status", "steps", "wall_s", "device")}])
    jump = emergence(Sweep(rows, curves, 1), **line(run))["emergence"].iloc[0]
    steps = {min(seen), max(seen)} | ({int(jump)} if np.isfinite(jump) else set())
    batch, reads = probe.held_out(run), list(run.task.reads)
    same = bool((batch.pattern == batch.pattern[:, :1]).all())
    few = Batch(*(part[:, : 256 if same else 1] for part in batch))
    maps, each = {}, len(reads) > 1 and run.model.layers * run.model.heads <= MAPS
    for step, parameters in ((step, seen[step]) for step in steps):
        found = [p[0].mean(0) for p in probe.record(probe.bind(run, parameters, few))[1].values()]  # (head, query, position)
        found = [p if p.shape[1] == len(reads) else p[:, reads] for p in found]  # the last layer is asked at the reads alone
        maps[step] = torch.cat(found) if each else torch.stack([p.mean(0) if len(reads) > 1 else p[:, 0] for p in found])
    layers, heads = range(1, run.model.layers + 1), range(1, run.model.heads + 1)
    names = [f"layer {layer}, head {head}" for layer in layers for head in heads] if each else [f"layer {layer}" for layer in layers]
    truth = few.pattern[0, 0]
    return _entry(maps, truth if len(reads) > 1 else truth.expand(run.model.heads, -1), names, len(maps))


def frozen(chapter: str, profile: str) -> Path:
    """The attention that the repository ships with a chapter's results: before, at and after the jump of every run of its first experiment."""
    return results_folder() / f"{chapter}.{profile}.attention.json"


def first(chapter: str, profile: str) -> list[Run]:
    """The finished runs of a chapter's first experiment; none of a model without attention to look at."""
    runs = next(iter(chapters.grid(chapter, profile).values()), [])
    there = sweep({"first": runs}, chapter=chapter, profile=profile, missing="skip")["first"].rows
    return [run for run in runs if run.model.kind != "toy" and len(there) and run.key in set(there["run"])]


def kept(path: Path) -> dict:
    """Attention that was kept in a file, by the runs' keys; none if there is no file."""
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError):
        raise InputError(f"{path}: not the attention that a chapter kept; delete it and run the chapter again") from None


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(np.clip(np.rint(values), 0, 255).astype(np.uint8).tobytes()).decode()


def line(run: Run) -> dict:
    """When a run of this task counts as emerged, for `lib.emergence`: the line of the task's own chapter."""
    task = run.task
    return {
        "single_location": lambda: dict(below=0.4 if task.p else 0.1),
        "linear_map": lambda: dict(below=0.01),
        "cellular_automaton": lambda: dict(below=1.3 / np.log(4) * task.chance_loss),
        "associative_recall": lambda: dict(above=(1 + 1 / task.N_pairs) / 2, metric="accuracy"),
        "language": lambda: dict(above=0.75, metric="induction_accuracy"),
    }[task.kind]()


def _numbers(values) -> list:
    """Four digits a number; None where there is none."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float)]


def _run(run: Run, rows: pd.DataFrame, curves: pd.DataFrame, metrics: list[str]) -> dict:
    """One run: configuration, outcome, emergence and thinned curves."""
    rule, row = line(run), rows.iloc[0]
    status = row["status"] + (", degenerate (s = S)" if getattr(run.task, "degenerate", False) else "")
    wait = emergence(Sweep(rows, curves, 1), **rule)["emergence"].iloc[0]
    wanted = set(np.unique(np.linspace(0, len(curves) - 1, min(POINTS, len(curves))).round().astype(int)))
    shown = curves.iloc[sorted(wanted | set(np.flatnonzero(curves["step"] == wait)))]
    there = [name for name in metrics if name in shown and shown[name].notna().any()]
    return {
        "key": run.key, "seed": run.seed, "status": status, "steps": int(row["steps"]), "budget": int(row["budget"]),
        "emergence": None if np.isnan(wait) else int(wait), "line": {"metric": "test_loss"} | rule, "chance": round(float(run.task.chance_loss), 4),
        "curves": {"step": [int(step) for step in shown["step"]]} | {name: _numbers(shown[name]) for name in there},
    }  # fmt: skip


def _plain(value):
    return value.item() if hasattr(value, "item") else value


def collect(chapter: str, profile: str, overrides: dict | None = None) -> dict | None:
    """What the browser shows of a chapter, ready for JSON; None for one whose runs have no curves to show."""
    experiments = {name: runs for name, runs in chapters.grid(chapter, profile, overrides).items() if runs and runs[0].model.kind != "toy"}
    found, tables = {}, {}
    for name, result in sweep(experiments, chapter=chapter, profile=profile, missing="skip").items():
        if not len(result.rows):
            continue
        rows, curves = result.rows.set_index("run", drop=False), dict(list(result.curves.groupby("run", sort=False)))
        brief = sum(map(len, experiments.values())) > BRIEF
        metrics = [c for c in result.curves if c not in ("run", "step") and (not brief or c in MAIN)]
        varied = [c for c in rows if c not in ("run", "seed", "status", "steps", "wall_s", "device") and rows[c].astype(str).nunique() > 1]
        mine = [run for run in {run.key: run for run in experiments[name]}.values() if run.key in rows.index]
        for run in mine:
            if run.key not in found:
                found[run.key] = _run(run, rows.loc[[run.key]], curves[run.key], metrics)
        tables[name] = {"varied": varied, "runs": [[run.key, [_plain(rows.at[run.key, c]) for c in varied]] for run in mine]}
    if not found:
        return None
    attention = kept(frozen(chapter, profile)) | kept(build_folder() / "attention" / f"{chapter}.json")
    attention = {key: value for key, value in attention.items() if key in found}
    return {"chapter": chapter, "profile": profile, "experiments": tables, "runs": found, "attention": attention}


def export(executed: Path, folder: Path) -> list[str]:
    """Write `<folder>/<chapter>.js` for every executed chapter with runs, and `index.js`; returns their names."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in chapters.names():
        given = nbformat.read(executed / f"{chapter}.ipynb", as_version=4).metadata.get("papermill", {}).get("parameters", {})
        overrides = {name: value for name, value in given.items() if name not in ("profile", "missing", "workers", "device")}
        if data := collect(chapter, given.get("profile", "quick"), overrides):
            text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
            (folder / f"{chapter}.js").write_text(f"bookRuns({text});\n", encoding="utf-8")
            written.append(chapter)
    (folder / "index.js").write_text(f"window.bookChapters = {json.dumps(written)};\n", encoding="utf-8")
    return written
