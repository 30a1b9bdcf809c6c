"""Power laws of times, by least squares on logarithms, with intervals; and a fit that uses the censored runs, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy.special import log_ndtr, ndtri, stdtrit
from statsmodels.duration.hazard_regression import PHReg

from lib.config import InputError


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class PowerLaw:
    """time = constant * prod_k factor_k ** exponent_k.

    r2 on the logarithms of the runs that emerged; n runs in the fit, of which `censored` never emerged.
    """

    constant: Estimate
    exponents: dict[str, Estimate]
    columns: dict[str, str]
    r2: float
    n: int
    censored: int

    def predict(self, table: pd.DataFrame) -> np.ndarray:
        """The law's time for each row of `table`."""
        logs = math.log(self.constant.value)
        for name, column in self.columns.items():
            logs = logs + self.exponents[name].value * np.log(np.asarray(table[column], float))
        return np.exp(logs)

    def formula(self, symbol: str = "t") -> str:
        """LaTeX, without the dollar signs."""
        factors = r" \, ".join(f"{name}^{{{e.value:.2f}}}" for name, e in self.exponents.items())
        return rf"{symbol} = {self.constant.value:.2f} \, {factors}"


def _design(table: pd.DataFrame, time: str, factors: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    for column in (time, *factors.values()):
        if column not in table:
            raise InputError(f"fit: the table has no column {column!r}")
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(table[list(factors.values())].to_numpy(float))
        y = np.log(table[time].to_numpy(float))
    if not (np.isfinite(logs).all() and np.isfinite(y).all()):
        raise InputError(f"fit: {time} and {', '.join(factors.values())} must be positive and finite in every row")
    return sm.add_constant(logs, has_constant="add"), y


def _fits(x: np.ndarray, y: np.ndarray, emerged: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Coefficients (draws, p) for each row of `counts` (draws, n), which says how often each run was drawn.

    Least squares; where a run is censored, maximum likelihood of log-normal times, of which a censored one is known only to
    lie beyond y (Tobin 1958), by Newton's method in (coefficients / sigma, 1 / sigma), in which it is concave (Olsen 1978).
    NaN where the emerged runs of a draw do not determine them.
    """
    found = np.full((len(counts), x.shape[1]), np.nan)
    root = np.sqrt(counts * emerged)
    determined = np.linalg.matrix_rank(root[..., None] * x) == x.shape[1]
    root, counts = root[determined], counts[determined]
    start = (np.linalg.pinv(root[..., None] * x) @ (root * y)[..., None])[..., 0]
    if emerged.all():
        found[determined] = start
        return found
    seen = (counts * emerged).sum(1)
    spread = np.sqrt((counts * emerged * np.square(y - start @ x.T)).sum(1) / seen) + 1e-3
    theta = np.column_stack([start, np.ones(len(start))]) / spread[:, None]
    w = np.column_stack([-x, y])  # z = theta @ w.T is the distance of y from the law in units of sigma

    def log_likelihood(theta, z):
        with np.errstate(invalid="ignore"):
            value = (counts * np.where(emerged, -np.square(z) / 2, log_ndtr(-z))).sum(1) + seen * np.log(theta[:, -1])
        return np.where(theta[:, -1] > 0, value, -np.inf)

    for _ in range(100):
        z = theta @ w.T
        mills = np.exp(-np.square(z) / 2 - log_ndtr(-z)) / math.sqrt(2 * math.pi)
        gradient = -(counts * np.where(emerged, z, mills)) @ w
        gradient[:, -1] += seen / theta[:, -1]
        weights = counts * np.where(emerged, 1, mills * (mills - z))
        hessian = np.einsum("rn,np,nq->rpq", weights, w, w, optimize=True)
        hessian[:, -1, -1] += seen / np.square(theta[:, -1])
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        open_ = ((gradient * step).sum(1) > 1e-10) & (theta[:, -1] < 1e6)  # beyond: the law goes through every emerged run
        if not open_.any():
            break
        step[~open_], before = 0, log_likelihood(theta, z)
        for _ in range(40):
            worse = log_likelihood(theta + step, (theta + step) @ w.T) < before - 1e-9 * np.abs(before)
            if not worse.any():
                break
            step[worse] /= 2
        theta = theta + step
    found[determined] = theta[:, :-1] / theta[:, -1:]
    return found


def widened(value, draws, n: int, fitted: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends of a 95 % interval about `value` from bootstrap draws of n runs in which `fitted` means were estimated.

    Draws from few runs scatter too little, by sqrt((n - fitted) / n), and how much they scatter is uncertain itself. So the
    draws' percentiles 2.5 and 97.5 are moved away from `value` by the inverse of the first and, for the second, by the ratio
    of Student's quantile to the normal one. NaN where n = fitted: one run each says nothing of their scatter.
    """
    wider = math.sqrt(n / (n - fitted)) * stdtrit(n - fitted, 0.975) / ndtri(0.975) if n > fitted else math.nan
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return value + wider * (low - value), value + wider * (high - value)


def power_law(
    table: pd.DataFrame,
    time: str,
    factors: dict[str, str],
    *,
    observed: str | None = None,
    seed_column: str | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> PowerLaw:
    """Fit log time = log C + sum_k exponent_k log factor_k, one row a run; `factors` maps a display name to its column.

    observed     column that is False where `time` is only how long a run was watched. Without it every row counts as seen
                 and the fit is the papers' least squares; with it the censored rows enter by maximum likelihood.
    seed_column  intervals by bootstrap over seeds within each cell of the factors, or over all runs where a cell has one
                 alone, `widened` for how few they are; without it the regression's own t intervals.
    """
    x, y = _design(table, time, factors)
    emerged = np.ones(len(y), bool) if observed is None else table[observed].to_numpy(bool)
    names = ["constant", *factors]
    if np.linalg.matrix_rank(x[emerged]) < len(names):
        raise InputError(
            f"fit: {int(emerged.sum())} emerged runs do not determine {', '.join(factors)}; each must take two values or more"
        )
    best = _fits(x, y, emerged, np.ones((1, len(y))))[0]
    if seed_column is None:
        if not emerged.all():
            raise InputError("fit: censored runs need seed_column, the interval is a bootstrap over seeds")
        low, high = sm.OLS(y, x).fit().conf_int().T if len(y) > len(names) else (best * np.nan, best * np.nan)
    else:
        cells = list(table.groupby(list(factors.values())).indices.values())
        if min(map(len, cells)) == 1:
            cells = [np.arange(len(y))]
        generator = np.random.default_rng(seed)
        drawn = np.hstack([generator.choice(cell, (resamples, len(cell))) for cell in cells])
        draws = _fits(x, y, emerged, np.apply_along_axis(np.bincount, 1, drawn, minlength=len(y)))
        low, high = widened(best, draws[np.isfinite(draws).all(1)], len(y), max(len(cells), len(names)))
    residual = y[emerged] - x[emerged] @ best
    r2 = 1 - residual @ residual / np.square(y[emerged] - y[emerged].mean()).sum()
    estimates = {name: Estimate(*map(float, (best[i], low[i], high[i]))) for i, name in enumerate(names)}
    constant = Estimate(*(math.exp(v) for v in estimates.pop("constant")))
    return PowerLaw(constant, estimates, dict(factors), float(r2), len(y), int((~emerged).sum()))


def both_fits(table: pd.DataFrame, factors: dict[str, str], **kw) -> dict[str, PowerLaw]:
    """The papers' least squares on the runs that emerged, and the fit that uses the censored runs, too.

    `table` is `lib.emergence.emergence`'s; intervals by bootstrap over seeds.
    """
    fits = {"least squares": table[table["emerged"]], "maximum likelihood": table}
    return {
        name: power_law(rows, "observed_until", factors, observed="emerged", seed_column="seed", **kw)
        for name, rows in fits.items()
    }


def parts(table: pd.DataFrame, names: list[str]) -> dict[str, pd.DataFrame]:
    """The rows of the lower and of the upper half of each column's values, both with the middle, to fit apart.

    A law whose exponents move from one to the other is a local slope. A column with fewer than three values has no parts.
    """
    found = {}
    for name in names:
        values = sorted(table[name].unique())
        half = len(values) // 2 + 1
        for part in (values[:half], values[-half:]) if len(values) > 2 else ():
            found[f"{name} from {part[0]:g} to {part[-1]:g}"] = table[table[name].isin(part)]
    return found


def hazard_exponent(table: pd.DataFrame, factor: str, *, groups: str = "seed") -> Estimate:
    """β of hazard ∝ factor^β, by Cox's partial likelihood (Efron's for ties); censored runs count for as long as watched.

    The hazard is the rate at which runs emerge that have not yet. n independent searchers have n times the hazard of one,
    so β = 1, whatever one searcher's distribution of times is. `table` is `lib.emergence.emergence`'s; rows with the same
    `groups` may depend on one another: the 95 % interval is Student's about errors that are robust to it, for so many groups.
    """
    for column in (factor, groups):
        if column not in table:
            raise InputError(f"hazard_exponent: the table has no column {column!r}")
    values = table[factor].to_numpy(float)
    if not ((values > 0).all() and np.ptp(values) > 0 and table["emerged"].any()):
        raise InputError(f"hazard_exponent: {factor} must take two positive values or more, and at least one run must emerge")
    model = PHReg(table["observed_until"].to_numpy(float), np.log(values), status=table["emerged"].to_numpy(int), ties="efron")
    alike = pd.factorize(table[groups])[0]
    found, n = model.fit(groups=alike), alike.max() + 1
    value, error = float(found.params[0]), float(found.bse[0]) * math.sqrt(n / (n - 1)) if n > 1 else math.nan
    reach = float(stdtrit(n - 1, 0.975)) * error
    return Estimate(value, value - reach, value + reach)


def summary(laws: dict[str, PowerLaw]) -> pd.DataFrame:
    """One row a law: its constant and exponents with intervals, R², n, censored."""
    rows = {
        name: {"constant": str(law.constant)}
        | {f"exponent of {factor}": str(e) for factor, e in law.exponents.items()}
        | {"R²": f"{law.r2:.3f}", "runs": law.n, "censored": law.censored}
        for name, law in laws.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")
