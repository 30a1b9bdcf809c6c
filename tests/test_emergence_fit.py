"""Emergence, survival and power laws, on data whose answer is known."""

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats
from scipy.special import stdtrit

from lib.config import InputError
from lib.emergence import counts, emergence, first_below, median_emergence, solve_rate, survival
from lib.fit import _fits, hazard_exponent, parts, power_law
from lib.sweep import Sweep


def made_sweep():
    rows = pd.DataFrame({"run": ["a", "b", "c"], "d": [8, 8, 8], "steps": [30, 30, 10], "status": ["finished", "finished", "diverged"]})
    curves = pd.DataFrame({"run": list("aaaabbbbcc"), "step": [0, 10, 20, 30] * 2 + [0, 10],
                           "test_loss": [0.5, 0.4, 0.1, 0.2, 0.5, 0.5, 0.4, 0.3, 0.5, np.nan]})
    return Sweep(rows, curves, 3)


def test_emergence_and_censoring():
    table = emergence(made_sweep(), below=0.1)
    assert table["emergence"].tolist()[0] == 20 and table["emergence"].isna().tolist() == [False, True, True]
    assert table["observed_until"].tolist() == [20, 30, 10] and table["emerged"].tolist() == [True, False, False]
    cell = median_emergence(table, ["d"])
    assert cell["emergence"].tolist() == [np.inf] and cell["censored"].tolist() == [2] and cell["runs"].tolist() == [3]
    with pytest.raises(InputError, match="'accuracy' was not recorded"):
        emergence(made_sweep(), metric="accuracy")


def test_emergence_above_a_threshold():
    """An accuracy emerges when it rises: at the reading that equals the threshold, too; NaN is never there."""
    sweep = made_sweep()
    sweep.curves["accuracy"] = 1 - sweep.curves["test_loss"]
    table = emergence(sweep, above=0.6, metric="accuracy")
    assert table["emergence"].fillna(-1).tolist() == [10, 20, -1] and table["observed_until"].tolist() == [10, 20, 10]
    falling = emergence(sweep, below=0.4)
    assert falling["emergence"].equals(table["emergence"])
    with pytest.raises(InputError, match="below = 0.1 or above = 0.9, not both") as error:
        emergence(sweep, below=0.1, above=0.9)
    assert "\n" not in str(error.value)


def test_first_below_counts_equality_and_absence():
    assert first_below([0, 5, 9], [0.5, 0.1, 0.0], 0.1) == 5
    assert np.isnan(first_below([0, 5], [0.5, 0.2], 0.1))


def test_survival_is_kaplan_meier():
    table = pd.DataFrame({"emerged": [True, False, True, True], "observed_until": [1.0, 2.0, 3.0, 4.0]})
    steps, fraction = survival(table)
    assert dict(zip(steps, fraction, strict=True)) == pytest.approx({0: 1, 1: 3 / 4, 2: 3 / 4, 3: 3 / 8, 4: 0})


def synthetic(noise=0.2, seeds=6, budget=np.inf, generator=None):
    generator = generator or np.random.default_rng(0)
    table = pd.DataFrame([(d, T, s) for d in (8, 16, 32, 64) for T in (16, 32, 64, 128) for s in range(seeds)], columns=["d", "T", "seed"])
    time = 0.76 * table["d"] ** 1.29 * table["T"] ** 0.8 * np.exp(noise * generator.standard_normal(len(table)))
    return table.assign(t=np.minimum(time, budget), emerged=time <= budget)


def test_exact_law_is_recovered_exactly():
    law = power_law(synthetic(noise=0.0), "t", {"d": "d", "T": "T"})
    assert [law.constant.value, law.exponents["d"].value, law.exponents["T"].value, law.r2] == pytest.approx([0.76, 1.29, 0.8, 1])
    assert law.predict(pd.DataFrame({"d": [10], "T": [20]}))[0] == pytest.approx(0.76 * 10**1.29 * 20**0.8)
    assert law.formula() == r"t = 0.76 \, d^{1.29} \, T^{0.80}" and (law.n, law.censored) == (96, 0)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_intervals_cover(seeds):
    """95 % intervals of both kinds hold the truth in 95 % of 200 repetitions (within 90 and 98.5: else p < 1e-3), however few the seeds; with one, at least."""
    generator, hits = np.random.default_rng(1), {"ols": 0, "bootstrap": 0}
    for _ in range(200):
        table = synthetic(seeds=seeds, generator=generator).query("d < 64 and T < 64")
        for name, kw in {"ols": {}, "bootstrap": dict(seed_column="seed", resamples=100)}.items():
            e = power_law(table, "t", {"d": "d", "T": "T"}, **kw).exponents["d"]
            hits[name] += e.low <= 1.29 <= e.high
    assert 180 <= min(hits.values()) and (seeds == 1 or max(hits.values()) <= 197), hits


def test_censored_runs_count():
    """With a budget that censors the slow half the plain fit of what emerged is biased; the censored fit is not."""
    table = synthetic(noise=0.4, budget=1500, seeds=30)
    censored = (~table["emerged"]).mean()
    assert 0.2 < censored < 0.7
    law = power_law(table, "t", {"d": "d", "T": "T"}, observed="emerged", seed_column="seed", resamples=20)
    naive = power_law(table[table["emerged"]], "t", {"d": "d", "T": "T"})
    assert abs(law.exponents["d"].value - 1.29) < 0.05 < 0.1 < 1.29 - naive.exponents["d"].value
    assert law.censored == (~table["emerged"]).sum() and law.exponents["d"].low < law.exponents["d"].value < law.exponents["d"].high


def test_every_draw_is_fitted_as_a_general_optimiser_fits_its_likelihood_alone():
    """A resampled set of runs at a time, its likelihood written down from scipy's distributions."""
    table = synthetic(noise=0.5, budget=1500, seeds=3)
    x, y, emerged = np.column_stack([np.ones(len(table)), np.log(table[["d", "T"]])]), np.log(table["t"]).to_numpy(), table["emerged"].to_numpy()
    counts = np.random.default_rng(0).multinomial(len(y), np.full(len(y), 1 / len(y)), 20)
    counts[-1] = counts[-1] * ~emerged  # nothing emerged in the last draw: no law
    for n, found in zip(counts[:-1], _fits(x, y, emerged, counts), strict=False):
        def negative(theta, n=n):
            law = stats.norm(x @ theta[:-1], np.exp(theta[-1]))
            return -(n * np.where(emerged, law.logpdf(y), law.logsf(y))).sum()

        best = optimize.minimize(negative, [*found + 0.3, 0.0], method="BFGS", options=dict(gtol=1e-8))
        np.testing.assert_allclose(found, best.x[:-1], atol=1e-4)
    assert np.isnan(_fits(x, y, emerged, counts)[-1]).all() and not emerged.all()


@pytest.mark.parametrize("change, match", [
    (lambda t: t.drop(columns="T"), "no column 'T'"), (lambda t: t.assign(t=0.0), "positive"), (lambda t: t[t["T"] == 16], "two values"),
])
def test_bad_tables_get_one_line(change, match):
    with pytest.raises(InputError, match=match):
        power_law(change(synthetic()), "t", {"d": "d", "T": "T"})


def test_one_run_a_cell_still_has_an_honest_interval():
    """With a single seed nothing varies within a cell: the bootstrap then draws over all runs."""
    law = power_law(synthetic(seeds=1), "t", {"d": "d", "T": "T"}, seed_column="seed", resamples=200)
    assert law.exponents["d"].high - law.exponents["d"].low > 0.05


def test_counts():
    table = emergence(made_sweep(), below=0.1).assign(seed=[0, 1, 1])
    assert counts(table) == {"seeds": 2, "censored": 2}


def test_solve_rate_is_wilsons():
    """None of n: from 0 to z²/(n + z²); all of n: the mirror image; a half: symmetric."""
    table = pd.DataFrame({"heads": [1] * 4 + [2] * 4 + [4] * 4, "emerged": [False] * 4 + [True, False] * 2 + [True] * 4})
    rate = solve_rate(table, ["heads"]).set_index("heads")
    z2 = 1.959964**2
    assert rate["share"].tolist() == [0, 0.5, 1] and rate["emerged"].tolist() == [0, 2, 4] and (rate["runs"] == 4).all()
    assert rate.loc[1, ["low", "high"]].tolist() == pytest.approx([0, z2 / (4 + z2)], abs=1e-6)
    assert rate.loc[4, ["low", "high"]].tolist() == pytest.approx([4 / (4 + z2), 1], abs=1e-6)
    assert rate.loc[2, "low"] + rate.loc[2, "high"] == pytest.approx(1)


def drawn(exponent, seeds, budget, generator):
    """Emergence with hazard heads^exponent times that of a Weibull distribution, seen until the budget."""
    table = pd.DataFrame([(h, seed) for h in (1, 2, 4, 8) for seed in range(seeds)], columns=["heads", "seed"])
    time = (generator.exponential(size=len(table)) / table["heads"] ** exponent) ** 0.5
    return table.assign(emerged=time <= budget, observed_until=np.minimum(time, budget))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_hazard_exponent_finds_what_was_drawn(exponent):
    """Unbiased with half of the runs of one head censored."""
    generator = np.random.default_rng(0)
    found = [hazard_exponent(drawn(exponent, 40, 0.8, generator), "heads").value for _ in range(30)]
    assert np.mean(found) == pytest.approx(exponent, abs=0.08)


@pytest.mark.parametrize("seeds", [4, 8])
def test_intervals_of_the_hazard_exponent_cover(seeds):
    """In 95 % of 100 repetitions (below 87: p < 1e-3), however few the seeds; the normal quantile would not with four."""
    generator, hits, narrow = np.random.default_rng(2), 0, 0
    for _ in range(100):
        e = hazard_exponent(drawn(0.7, seeds, 0.5, generator), "heads")
        hits, width = hits + (e.low <= 0.7 <= e.high), (e.high - e.value) / stdtrit(seeds - 1, 0.975) * 1.96 * ((seeds - 1) / seeds) ** 0.5
        narrow += abs(e.value - 0.7) <= width
    assert hits >= 87 and (seeds > 4 or narrow < 87), (hits, narrow)


def test_the_minimum_of_n_draws_has_n_times_the_hazard():
    generator = np.random.default_rng(1)
    times = {n: generator.gamma(3, size=(200, n)).min(1) for n in (1, 2, 4, 8)}
    table = pd.DataFrame([(n, seed, time) for n, draws in times.items() for seed, time in enumerate(draws)], columns=["n", "seed", "observed_until"])
    estimate = hazard_exponent(table.assign(emerged=True), "n")
    assert estimate.low < 1 < estimate.high and estimate.high - estimate.low < 0.3


def test_hazard_exponent_says_what_it_cannot_do():
    table = drawn(1.0, 5, 0.8, np.random.default_rng(0))
    for wrong, message in ((table.query("heads == 2"), "two positive values"), (table.assign(heads=0), "two positive values"),
                           (table.assign(emerged=False), "at least one run"), (table.drop(columns="heads"), "no column 'heads'")):
        with pytest.raises(InputError, match=message) as error:
            hazard_exponent(wrong, "heads")
        assert "\n" not in str(error.value)


def test_parts_are_the_halves_of_a_grid_with_its_middle():
    table = pd.DataFrame([(T, d) for T in (8, 16, 32, 64, 128) for d in (4, 8)], columns=["T", "d"])
    found = parts(table, ["T", "d"])
    assert list(found) == ["T from 8 to 32", "T from 32 to 128"]
    assert [sorted(rows["T"].unique()) for rows in found.values()] == [[8, 16, 32], [32, 64, 128]]
    bent = table.assign(time=np.where(table["T"] <= 32, table["T"], table["T"] ** 2 / 32.0))
    slopes = [power_law(rows, "time", {"T": "T"}).exponents["T"].value for rows in parts(bent, ["T"]).values()]
    assert slopes == pytest.approx([1, 2])
