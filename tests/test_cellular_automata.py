"""The best possible loss on cellular automata: known cases, brute force, and no model below it."""

import itertools
import math

import pytest
import torch

from lib import streams
from lib.config import InputError
from lib.models import Transformer
from lib.probe import held_out
from lib.run import Run, Training
from lib.tasks import CellularAutomaton
from lib.train import train

SEEDS = torch.arange(2)


def sample(task, size=50, seeds=SEEDS):
    constants = task.constants(seeds)
    batch = task.batch(constants, streams.key(seeds, "x"), size)
    return constants, batch, task.best_loss(constants, batch)


def test_one_rule_leaves_nothing_to_guess():
    _, batch, best = sample(CellularAutomaton(S=5, states=3, pool=1))
    assert best.shape == batch.targets.shape and best.abs().max() == 0


def test_two_rules_by_hand():
    """Rule 0 turns all cells off, rule 1 all on: the first answer costs ln 2, the others nothing."""
    task = CellularAutomaton(S=5, states=3, colours=2, pool=2)
    constants = {"rules": torch.tensor([[[0] * 8, [1] * 8]])}
    batch = task.batch(constants, streams.key(SEEDS[:1], "x"), 20)
    best = task.best_loss(constants, batch)
    assert best[..., 0] == pytest.approx(math.log(2)) and best[..., 1:].abs().max() == 0


@pytest.mark.parametrize("k, boundary", [(1, "circular"), (2, "zero")])
def test_equals_counting_the_rules_that_are_left(k, boundary):
    task = CellularAutomaton(S=5, states=3, colours=2, pool=12, k=k, boundary=boundary)
    constants, batch, best = sample(task, 6)
    for m, b in itertools.product(range(2), range(6)):
        cells = [*batch.inputs[m, b].tolist(), batch.targets[m, b, -1].item()]
        states = torch.tensor(cells).view(3, 5)
        said = [torch.cat([task.advance(state, rule) for state in states[:-1]]).tolist() for rule in constants["rules"][m]]
        answers = cells[5:]
        for n in range(10):
            left = [rule for rule in said if rule[:n] == answers[:n]]
            right = [rule for rule in left if rule[n] == answers[n]]
            assert best[m, b, n].item() == pytest.approx(math.log(len(left) / len(right)), abs=1e-6)


def test_all_rules_in_the_pool_are_fresh_rules():
    """Window 1 and three colours: the 27 tables that exist, once each, are the uniform law that a fresh table has."""
    pool = CellularAutomaton(S=3, states=3, colours=3, window=1, pool=27)
    fresh = pool.model_copy(update={"pool": 0})
    constants = {"rules": torch.tensor(list(itertools.product(range(3), repeat=3)))[None].expand(2, -1, -1)}
    batch = fresh.batch({}, streams.key(SEEDS, "x"), 40)
    assert torch.allclose(pool.best_loss(constants, batch), fresh.best_loss({}, batch), atol=1e-6)


@pytest.mark.parametrize("pool", [0, 16])
def test_evidence_helps(pool):
    best = sample(CellularAutomaton(S=8, states=6, colours=3, pool=pool), 200)[2].unflatten(-1, (5, 8)).mean((0, 1, 3))
    assert (best.diff() <= 1e-6).all() and best[0] > best[-1]


@pytest.mark.parametrize("pool", [0, 1, 3])
def test_bounds_what_is_learnt_from_below(pool):
    """On 512 sequences, with four standard errors of the difference; and a trained model comes down to it or near it."""
    task = CellularAutomaton(S=4, states=4, colours=2, pool=pool)
    run = Run(task=task, model=Transformer(layers=2, heads=4, width=32, causal=True, positions="learned", embedding="table", layer_norm=True),
              training=Training(optimizer="adamw", learning_rate=3e-3, batch=64, steps=300, every=50, eval_size=512, stop_below=None))
    kept = {}
    train([run], visit=lambda step, parameters, constants: kept.update({step: (parameters, constants)}))
    batch = held_out(run)
    for parameters, constants in kept.values():
        loss = task.token_loss(run.model.forward(parameters, batch.inputs, task.reads), batch.targets)
        excess = (loss - task.best_loss(constants, batch)).mean(-1)[0]
        assert excess.mean() > -4 * excess.std() / len(excess) ** 0.5
    assert excess.mean() < 0.3 * task.chance_loss


def test_fresh_tables_applied_twice_are_refused():
    with pytest.raises(InputError, match="best_loss: not known for fresh tables and k = 2"):
        sample(CellularAutomaton(S=6, states=3, pool=0, k=2))


def copy_and_parities():
    """Entries left * 4 + middle * 2 + right: the middle cell, left XOR right, and the parity of all three."""
    cells = list(itertools.product(range(2), repeat=3))
    return [[m for _, m, _ in cells], [left ^ r for left, _, r in cells], [left ^ m ^ r for left, m, r in cells]]


@pytest.mark.parametrize("which, k, needs", [(0, 1, 1), (1, 1, 2), (2, 1, 3), (0, 2, 1), (1, 2, 2), (2, 2, 3)])
def test_a_parity_is_worth_nothing_until_its_last_cell(which, k, needs):
    """Over two colours a rule applied twice squares its polynomial: as many cells, twice as far apart."""
    task = CellularAutomaton(S=5, states=2, colours=2, pool=1, k=k)
    partial = task.partial_loss({"rules": torch.tensor([[copy_and_parities()[which]]])})
    expected = [math.log(2) if n < needs else 0.0 for n in range(task.span + 1)]
    assert partial[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_part_of_a_neighbourhood_is_worth_the_average_of_the_rules_and_never_less_than_a_smaller_part():
    task = CellularAutomaton(S=6, states=2, colours=3, pool=5)
    constants = task.constants(SEEDS)
    together = task.partial_loss(constants)
    single = task.model_copy(update={"pool": 1})
    alone = [single.partial_loss({"rules": constants["rules"][:, i : i + 1]}) for i in range(5)]
    assert torch.allclose(together, torch.stack(alone).mean(0), atol=1e-6)
    assert (together.diff(dim=1) <= 0).all() and together[:, -1].abs().max() < 1e-6 and (together[:, 0] <= task.chance_loss).all()


def test_part_of_a_neighbourhood_by_counting():
    """One rule, one cell seen: the entropy of the next cell given that cell, counted in many random first states."""
    task = CellularAutomaton(S=8, states=2, colours=3, pool=1)
    constants = task.constants(SEEDS[:1])
    before, after = task.draw(constants, streams.key(SEEDS[:1], "many"), 20_000)[0][0].unbind(1)
    losses = []
    for offset in (-1, 0, 1):
        counts = torch.zeros(9).index_add_(0, (3 * before.roll(-offset, -1) + after).flatten(), torch.ones(before.numel())).view(3, 3)
        law = counts / counts.sum()
        losses.append((torch.special.entr(law).sum() - torch.special.entr(law.sum(1)).sum()).item())
    assert task.partial_loss(constants)[0, 1].item() == pytest.approx(min(losses), abs=0.005)  # 160 000 cells


@pytest.mark.parametrize("options", [{"pool": 0}, {"pool": 2, "k": 6}])
def test_partial_loss_without_a_pool_or_of_too_many_neighbourhoods_is_refused(options):
    task = CellularAutomaton(S=16, states=2, **options)
    with pytest.raises(InputError, match="partial_loss: needs a pool"):
        task.partial_loss(task.constants(SEEDS))
