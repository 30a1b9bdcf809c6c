"""The task is what its docstring says, on any grouping."""

import pytest
import torch
from scipy import stats

from lib import streams
from lib.config import InputError
from lib.models import Toy, Transformer
from lib.run import Run
from lib.tasks import SingleLocation

SEEDS = torch.arange(3)


def draw(task, seeds=SEEDS, size=64, **kw):
    constants = task.constants(seeds)
    return constants, task.batch(constants, streams.key(seeds, "data", 1), size, **kw)


@pytest.mark.parametrize("task", [
    SingleLocation(T=9, d=5), SingleLocation(T=9, d=5, B=3), SingleLocation(T=9, d=5, p=0.5),
    SingleLocation(T=9, d=5, B=2, position="fixed", feature=False),
    SingleLocation(T=9, d=5, B=2, position="first", feature=False),
])
def test_targets_are_the_map_of_the_relevant_token(task):
    constants, (inputs, targets, pattern) = draw(task)
    targets, pattern = targets[:, :, 0], pattern[:, :, 0]
    for m, b in [(0, 0), (1, 7), (2, 63)]:
        for r in pattern[m, b].nonzero().flatten():
            assert torch.allclose(targets[m, b], constants["W*"][m].float() @ inputs[m, b, r, : task.d], atol=1e-5)
        if task.feature:
            assert inputs[m, b, :, -1].nonzero().flatten().tolist() == pattern[m, b].nonzero().flatten().tolist()
    if task.position == "fixed":
        assert (pattern == (torch.arange(task.T) >= task.T - task.B)).all()
    if task.position == "first":
        assert (pattern == (torch.arange(task.T) < task.B)).all()


@pytest.mark.parametrize("task", [SingleLocation(T=9, d=64), SingleLocation(T=9, d=7, B=3, p=0.5)])
def test_grouping_changes_no_bit(task):
    together = draw(task)[1]
    for seed in SEEDS:
        for all_members, one in zip(together, draw(task, seed[None])[1], strict=True):
            assert torch.equal(all_members[seed], one[0])


@pytest.mark.gpu
def test_device_changes_no_bit():
    task = SingleLocation(T=33, d=64, B=2, p=0.3)
    for a, b in zip(draw(task)[1], draw(task, SEEDS.cuda())[1], strict=True):
        assert torch.equal(a, b.cpu())


def test_normalisation():
    task = SingleLocation(T=4, d=32)
    constants, batch = draw(task, size=4000)
    assert torch.allclose(constants["W*"].norm(dim=1), torch.ones(3, 32, dtype=torch.float64), atol=1e-5)
    assert batch.inputs[..., :32].var().item() == pytest.approx(1 / 32, rel=0.01)
    chance = task.loss(torch.zeros_like(batch.targets), batch.targets).mean().item()
    assert chance == pytest.approx(task.chance_loss, rel=0.02)


def test_uniform_attention_loss_is_what_least_squares_on_the_mean_token_reaches():
    task = SingleLocation(T=6, d=4, B=2)
    _, (inputs, targets, _) = draw(task, size=40_000)
    mean, y = inputs[0, ..., :4].mean(1), targets[0, :, 0]
    residual = y - mean @ torch.linalg.lstsq(mean, y).solution
    assert 0.5 * residual.square().sum(-1).mean().item() == pytest.approx(task.uniform_attention_loss, rel=0.02)


def test_cross_sample_repetition_is_for_training_data_alone():
    task = SingleLocation(T=5, d=8, p=0.3)
    constants, batch = draw(task, size=3000)
    repeated = (batch.targets[:, :, 0] - (constants["W*"] @ constants["x~"].double()[..., None] * streams.NORMAL / 8**0.5).mT).abs().amax(-1) < 1e-5
    assert stats.binomtest(int(repeated.sum()), repeated.numel(), 0.3).pvalue > 1e-4
    assert (constants["x~"].double() * streams.NORMAL / 8**0.5).norm(dim=1).sub(1).abs().max() < 1e-4
    plain = SingleLocation(T=5, d=8)
    assert torch.equal(draw(task, train=False)[1].inputs, draw(plain)[1].inputs)


def test_relevant_position_is_uniform():
    _, batch = draw(SingleLocation(T=8, d=2), size=10_000)
    assert stats.chisquare(batch.pattern.sum((0, 1, 2))).pvalue > 1e-4


@pytest.mark.parametrize("bad, word", [
    (dict(T=0), "T"), (dict(B=17, T=16), "B"), (dict(p=1.5), "p"), (dict(p=-0.1), "p"), (dict(d="8"), "d"),
    (dict(feature=False), "unsolvable"), (dict(dd=3), "dd"), (dict(p=float("nan")), "p"), (dict(position="last"), "position"),
])
def test_bad_input_gets_one_line(bad, word):
    with pytest.raises(InputError) as error:
        SingleLocation(**bad)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_models_that_cannot_do_the_task_say_so():
    with pytest.raises(InputError, match="heads: 3 heads do not divide width 64"):
        Run(task=SingleLocation(), model=Transformer(heads=3, width=64))
    with pytest.raises(InputError, match="position = 'fixed'"):
        Run(task=SingleLocation(), model=Toy())
