"""When did it jump? Emergence steps with censoring, and survival curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import CensoredData, ecdf
from statsmodels.stats.proportion import proportion_confint

from lib.config import InputError
from lib.sweep import Sweep


def first_below(steps, values, below: float) -> float:
    """First step whose value is at or below `below`; NaN if there is none."""
    hits = np.flatnonzero(np.asarray(values) <= below)
    return float(np.asarray(steps)[hits[0]]) if len(hits) else float("nan")


def emergence(
    sweep: Sweep, below: float | None = None, metric: str = "test_loss", *, above: float | None = None
) -> pd.DataFrame:
    """The sweep's rows with `emergence` (step, NaN where censored), `emerged`, and `observed_until` (step).

    Emergence is the first reading with `metric` at or below `below`, or at or above `above`; a loss of 0.1 if neither is
    given (Zucchet et al. 2025, appendix D). A run that never gets there, one that diverged included, is censored at its
    last step: `observed_until` is then all that is known.
    """
    if below is not None and above is not None:
        raise InputError(f"emergence: give below = {below:g} or above = {above:g}, not both")
    if len(sweep.curves) and metric not in sweep.curves:
        raise InputError(f"metric: {metric!r} was not recorded; there are {sorted(set(sweep.curves) - {'run', 'step'})}")
    sign, threshold = (-1, -above) if above is not None else (1, 0.1 if below is None else below)
    curves = sweep.curves.groupby("run", sort=False)
    steps = {run: first_below(c["step"], sign * c[metric], threshold) for run, c in curves}
    rows = sweep.rows.assign(emergence=sweep.rows["run"].map(steps).astype(float))
    emerged = rows["emergence"].notna()
    return rows.assign(emerged=emerged, observed_until=rows["emergence"].where(emerged, rows["steps"]).astype(float))


def survival(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Kaplan-Meier estimate of the fraction of runs that have not emerged by a step; returns (steps, fraction)."""
    emerged = table["emerged"].to_numpy(bool)
    until = table["observed_until"].to_numpy(float)
    curve = ecdf(CensoredData(uncensored=until[emerged], right=until[~emerged])).sf
    return np.r_[0.0, curve.quantiles], np.r_[1.0, curve.probabilities]


def median_emergence(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Median emergence step of each cell, infinite where fewer than half of its runs emerged, with `runs` and `censored`."""
    steps = table.assign(emergence=table["emergence"].fillna(np.inf))
    cells = steps.groupby(by, sort=True)
    return cells.agg(
        emergence=("emergence", "median"), runs=("emerged", "size"), censored=("emerged", lambda e: int((~e).sum()))
    ).reset_index()


def solve_rate(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Share of each cell's runs that emerged, with its 95 % interval (Wilson), `emerged` and `runs`."""
    cells = table.groupby(by, sort=True)["emerged"].agg(emerged="sum", runs="size")
    low, high = proportion_confint(cells["emerged"], cells["runs"], method="wilson")
    return cells.assign(share=cells["emerged"] / cells["runs"], low=low, high=high).reset_index()


def counts(table: pd.DataFrame) -> dict[str, int]:
    """How many seeds an experiment's table holds, and how many of its runs were censored."""
    return {"seeds": int(table["seed"].nunique()), "censored": int((~table["emerged"]).sum())}
