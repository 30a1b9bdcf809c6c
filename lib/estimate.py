"""What a sweep will cost on this machine, measured before anything starts."""

from __future__ import annotations

import os
from collections import Counter

import pandas as pd

from lib.bench import seconds
from lib.run import Run
from lib.store import Frozen, Store
from lib.sweep import ensemble
from lib.train import Steps, resolve_device


def cost(run: Run, device: str = "cpu", alike: int = 1) -> float:
    """Seconds that one worker needs for each of so many runs like this to the end of its budget, readings included."""
    members = min(ensemble(run, device), alike) if alike > 1 else 1
    full, bare = (seconds(run, 1, members, device, eval_size=size) for size in (run.training.eval_size, 1))
    reading = max(0.0, full - bare) / 2  # before the step and after it
    probe = max(2 if device == "cpu" else 2 * Steps.EAGER, min(50, round(0.3 / bare)))  # on a GPU both have a capture in them
    step = (seconds(run, 2 * probe, members, device) - seconds(run, probe, members, device)) / probe
    return (run.training.steps * max(step, 0.0) + len(run.training.evaluations()) * reading) / members


def estimate(experiments: dict[str, list[Run]], *, store: Store | None = None, workers: int = 0, device: str = "auto") -> pd.DataFrame:
    """One row an experiment, and `all`: runs, how many are missing, their member-steps and hours, each at most.

    At most: a run that emerges ends before its budget does. A run that several experiments share counts in the first.
    """
    device, store, frozen = resolve_device(device), store or Store(), Frozen()
    workers = workers or (os.cpu_count() or 1 if device == "cpu" else 1)
    costs: dict[str, float] = {}
    seen: set[str] = set()
    rows = []
    for name, runs in experiments.items():
        own = {run.key: run for run in runs if run.key not in seen}
        seen |= set(own)
        missing = [run for key, run in own.items() if run not in store and key not in frozen.rows]
        alike = Counter(run.alike for run in missing)
        for run in missing:
            if run.alike not in costs:
                costs[run.alike] = cost(run, device, alike[run.alike])
        hours = sum(costs[run.alike] for run in missing) / workers / 3600
        rows.append((name, len(own), len(missing), sum(run.training.steps for run in missing), hours))
    table = pd.DataFrame(rows, columns=["experiment", "runs", "missing", "member-steps", "hours"])
    return pd.concat([table, table.drop(columns="experiment").sum().to_frame().T.assign(experiment="all")], ignore_index=True).astype(
        {"runs": int, "missing": int, "member-steps": int}
    )
