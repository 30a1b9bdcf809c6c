"""Streams depend on (seed, name, step) alone, and have the distributions they state."""

import numpy as np
import pytest
import torch
from scipy import stats

from lib import streams

SEEDS = torch.arange(4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_splitmix_matches_the_published_generator():
    """First outputs of SplitMix64 for seed 1234567, as Vigna's reference code prints them."""
    gamma = 0x9E3779B97F4A7C15
    state = torch.tensor([(1234567 + gamma * i) % 2**64 for i in range(1, 4)], dtype=torch.uint64).view(torch.int64)
    mixed = streams._mix(state).view(torch.uint64).tolist()
    assert mixed == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draw", [
    lambda k: streams.bits(k, 70_000), lambda k: streams.normal(k, (7, 10_001)), lambda k: streams.uniform(k, (501,)),
    lambda k: streams.coins(k, (501,), 0.3), lambda k: streams.choose(k, (9,), 12, 5), lambda k: streams.integers(k, (99,), 7),
])
def test_grouping_and_device_change_no_bit(draw, device):
    together = draw(streams.key(SEEDS.to(device), "name", 3)).cpu()
    for seed in SEEDS:
        alone = draw(streams.key(seed[None], "name", 3))
        assert torch.equal(together[seed], alone[0])


def test_a_longer_draw_begins_with_the_shorter():
    k = streams.key(SEEDS, "a")
    assert torch.equal(streams.bits(k, 100)[:, :40], streams.bits(k, 40))


def test_name_step_and_seed_all_matter():
    keys = {streams.key(torch.tensor([s]), n, t).item() for s in range(9) for n in ("a", "b", "c") for t in range(9)}
    assert len(keys) == 9 * 3 * 9


def test_step_may_be_a_tensor():
    assert torch.equal(streams.key(SEEDS, "a", torch.tensor(5)), streams.key(SEEDS, "a", 5))


def test_normal_law():
    """Kolmogorov-Smirnov at 1e-4, moments to four standard errors; independent across seeds and neighbours."""
    x = streams.normal(streams.key(SEEDS, "n"), (250_000,)).double().numpy() * streams.NORMAL
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-4
    n = x.size
    assert abs(x.mean()) < 4 / n**0.5 and abs(x.var() - 1) < 4 * (2 / n) ** 0.5 and abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert np.abs(np.corrcoef(x) - np.eye(4)).max() < 4 / 250_000**0.5
    assert abs(np.corrcoef(x[:, 1:].ravel(), x[:, :-1].ravel())[0, 1]) < 4 / n**0.5


def test_integers_coins_and_choice_are_uniform():
    k = streams.key(torch.arange(1), "u")
    counts = np.bincount(streams.integers(k, (70_000,), 7)[0], minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.binomtest(int(streams.coins(k, (50_000,), 0.3).sum()), 50_000, 0.3).pvalue > 1e-4
    chosen = streams.choose(k, (30_000,), 6, 3)[0]
    assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()
    assert stats.chisquare(np.bincount(chosen.flatten(), minlength=6)).pvalue > 1e-4
    assert not streams.coins(k, (1000,), 0.0).any() and streams.coins(k, (1000,), 1.0).all()
