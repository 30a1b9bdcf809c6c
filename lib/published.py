"""What the book ships: which runs, made when and where, at what cost, and what every column of their files means."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from lib import chapters, drawn, measured
from lib.models import MODELS
from lib.run import Training
from lib.store import MADE, OUTCOME, Frozen, results_folder
from lib.tasks import TASKS

KINDS = {kind.model_fields["kind"].default: kind for kind in (*TASKS, *MODELS)}
COLUMNS = {  # of a frozen CSV, beside the parameters of its task, its model and its training
    "run": "the run's key: a hash of its configuration and of the versions of task, model and loop",
    "task, model": "their kinds; each has parameters of its own",
    "seed": "of the data, the initial weights and the held-out data",
    "init_seed, data_seed, eval_seed": "of one of them, where it is set apart from `seed`",
    "budget": "steps after which the run is censored",
    "status": "finished or diverged",
    "steps": "steps that it took: fewer than the budget where it ended early",
    "wall_s": "seconds that it took, on one core or on one GPU",
    "device": "cpu or cuda",
    "finished, torch, processor": "day, version and hardware; empty where they were not kept",
}
CURVES = {  # of a frozen Parquet file, beside what the task and the model measure
    "run, step": "which run, after how many steps",
    "train_loss": "mean over the steps since the last reading, on the batches that were trained on",
    "test_loss": "on held-out sequences that never change within a run",
}


def files() -> list[Path]:
    """The frozen tables, one a chapter and profile."""
    return sorted(results_folder().glob("*.*.csv"))


def read(path: Path) -> pd.DataFrame:
    """One row a frozen run."""
    return pd.read_csv(path, dtype=dict.fromkeys(MADE, str))


def summary() -> pd.DataFrame:
    """One row a file: chapter, profile, runs, `early` (ended before the budget), diverged, steps, core_hours, made, torch."""
    rows = []
    for path in files():
        chapter, profile = path.stem.split(".")
        runs = read(path)
        days, versions = (sorted(runs[name].dropna().unique()) for name in ("finished", "torch"))
        rows.append({
            "chapter": chapter, "profile": profile, "runs": len(runs), "early": int((runs["steps"] < runs["budget"]).sum()),
            "diverged": int((runs["status"] == "diverged").sum()), "steps": int(runs["steps"].sum()),
            "core_hours": runs.loc[runs["device"] == "cpu", "wall_s"].sum() / 3600,
            "made": " to ".join(dict.fromkeys(days[:1] + days[-1:])) or "not kept", "torch": ", ".join(versions) or "not kept",
        })  # fmt: skip
    return pd.DataFrame(rows)


def ahead(profiles: tuple[str, ...] = ("laptop", "paper")) -> pd.DataFrame:
    """What these profiles ask for, a line a chapter and profile: runs, how many are frozen, and the steps of the others at most."""
    known, rows = Frozen().rows, []
    for chapter in chapters.names():
        for profile in profiles:
            runs = {run.key: run for experiment in chapters.grid(chapter, profile).values() for run in experiment}
            if runs:
                left = [run for key, run in runs.items() if key not in known]
                rows.append({"chapter": chapter, "profile": profile, "runs": len(runs), "frozen": len(runs) - len(left),
                             "steps left": sum(run.training.steps for run in left)})
    return pd.DataFrame(rows)


def downloads() -> str:
    """Markdown: links to the frozen files, which the site keeps in `results`."""
    kinds = {"csv": "runs (CSV)", "parquet": "curves (Parquet)", "measured.npz": "what was measured inside (NumPy)"}

    def links(stem: str) -> str:
        there = {f"{stem}.{kind}": text for kind, text in kinds.items()}
        return ", ".join(f"{{download}}`{text} <results/{name}>`" for name, text in there.items() if (results_folder() / name).exists())

    return "\n".join(f"- {path.stem.replace('.', ', ')}: {links(path.stem)}" for path in files())


def processors() -> list[str]:
    """The processors that the frozen runs name."""
    return sorted({name for path in files() for name in read(path)["processor"].dropna()})


def unknown(path: Path) -> set[str]:
    """Columns of a frozen table and of its curves that nothing here explains."""
    runs, known = read(path), {name for names in COLUMNS for name in names.split(", ")} | set(OUTCOME) | set(MADE)
    kinds = [KINDS[kind] for column in ("task", "model") for kind in runs[column].unique()]
    known |= {field for part in (*kinds, Training) for field in part.model_fields}
    curves = set(pq.read_schema(path.with_suffix(".parquet")).names) - {name for names in CURVES for name in names.split(", ")}
    named = re.findall(r"`([^`]+)`", " ".join(text for kind in kinds for text in _measures(kind).values()))
    patterns = [re.sub(r"<\w+>", r"\\w+", re.sub("_i$", r"_\\d+", name)) for name in named]
    return (set(runs) - known) | {name for name in curves if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def _measures(kind: type) -> dict[str, str]:
    """What a task or a model measures at every reading, from the docstring of the method that does."""
    for name in ("metrics", "observe"):
        if method := getattr(kind, name, None):
            return {name: " ".join(inspect.getdoc(method).split())}
    return {}


def dictionary() -> str:
    """Markdown: the columns of a figure's CSV, of a frozen table and of its curves, from the docstrings that define them."""
    def block(text: str) -> str:
        return f"```text\n{inspect.cleandoc(text).split('>>>')[0].rstrip()}\n```"

    def lines(columns: dict[str, str]) -> str:
        return "\n".join(f"- `{name}`: {text}" for name, text in columns.items())

    parts = ["**A figure's CSV**", block(drawn.__doc__.split("\n\n", 1)[1]), "**A table of runs (CSV)**", lines(COLUMNS)]
    parts += ["and the parameters, by the names that they have in the code:"]
    parts += [f"*{kind}*\n\n{block(part.__doc__)}" for kind, part in {"training": Training, **KINDS}.items()]
    parts += ["**Their curves (Parquet)**", lines(CURVES), "and what is measured at every reading:"]
    parts += [lines({kind: text for kind, part in KINDS.items() for text in _measures(part).values()})]
    parts += ["**What was measured inside models (NumPy archive)**", measured.__doc__.split("\n\n")[-1]]
    return "\n\n".join(parts)


