"""Jumps of the capabilities in the book's own runs: how abrupt, how early, and the two checkpoints around one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats

from lib import probe
from lib.config import InputError
from lib.language.heads import Measure
from lib.run import Run
from lib.tasks.base import Batch


def parameters(run: Run) -> int:
    """How many numbers the run's model has."""
    return sum(math.prod(shape) for shape in run.model.shapes(run.task).values())


def rise(steps, values, base: float | None = None, shares: tuple[float, float] = (0.1, 0.9)) -> tuple[float, float]:
    """The first readings at which a curve has made these shares of its way from `base` (its start) to its end.

    NaN where it ends no higher than its base; a falling curve is given with its sign changed.

    >>> rise([0, 10, 20, 30, 40], [0.0, 0.05, 0.5, 1.0, 1.0])
    (20.0, 30.0)
    """
    steps, values = np.asarray(steps, float), np.asarray(values, float)
    base = values[0] if base is None else base
    if not values[-1] > base:
        return math.nan, math.nan
    return tuple(float(steps[np.argmax(values >= base + share * (values[-1] - base))]) for share in shares)


def logrank(one: pd.DataFrame, other: pd.DataFrame) -> float:
    """p value, two-sided, that two tables of `lib.emergence` have one survival curve; censored runs count while watched.

    NaN where a table is empty, or no run of either has emerged.
    """
    emerged = [table["emerged"].to_numpy(bool) for table in (one, other)]
    if not len(one) or not len(other) or not any(e.any() for e in emerged):
        return math.nan
    until = [table["observed_until"].to_numpy(float) for table in (one, other)]
    samples = [stats.CensoredData(uncensored=t[e], right=t[~e]) for t, e in zip(until, emerged, strict=True)]
    return float(stats.logrank(*samples).pvalue)


def around(curve: pd.DataFrame, capability: str, accuracy: float, back: float) -> tuple[int, int] | None:
    """(before, after): the first reading of one run whose accuracy is reached, and the earlier one nearest to `back` times its step.

    None where the run never gets there, or is there at its first reading.
    """
    if not 0 <= back < 1:
        raise InputError(f"back: must be a share of the step of emergence, from 0 to below 1, not {back:g}")
    steps = curve["step"].to_numpy()
    hits = np.flatnonzero(curve[f"{capability}_accuracy"] >= accuracy)
    if not len(hits) or not hits[0]:
        return None
    earlier, after = steps[: hits[0]], steps[hits[0]]
    return int(earlier[np.argmin(abs(earlier - back * after))]), int(after)


class Prompts(NamedTuple):
    """A run's held-out prompts of one capability, the positions of their answers, and the mean probability of the right words."""

    batch: Batch
    positions: torch.Tensor
    measure: Measure


def prompts(run: Run, capability: str, device: str = "cpu") -> Prompts:
    """The prompts on which `<capability>_probability` was read."""
    held_out = probe.held_out(run, device)
    found = [(i, position) for i, name, position in run.task.answers(run.training.eval_size) if name == capability]
    if not found:
        raise InputError(f"capability: the run has no prompts of {capability!r}; raise its rate or eval_size")
    which, positions = torch.tensor(found, device=held_out.inputs.device).unbind(1)
    batch = Batch(*(part[:, which] for part in held_out))
    each = torch.arange(len(which), device=which.device)
    right = batch.targets[:, each, positions]

    def measure(outputs: torch.Tensor) -> float:
        return probe.probability(outputs[:, each, positions], right).mean().item()

    return Prompts(batch, positions, measure)
