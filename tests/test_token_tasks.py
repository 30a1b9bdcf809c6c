"""The token tasks are what their docstrings say, on any grouping; statistical tests have an error rate of 1e-4 each."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from lib import streams
from lib.config import InputError
from lib.tasks import AssociativeRecall, CellularAutomaton, LinearMap

SEEDS = torch.arange(3)


def draw(task, seeds=SEEDS, size=2000, **kw):
    constants = task.constants(seeds)
    return constants, task.batch(constants, streams.key(seeds, "data", 1), size, **kw)


@pytest.mark.parametrize("task", [
    AssociativeRecall(N_pairs=5, N_tokens=9, B=2, p=0.4), LinearMap(S=7, s=3, states=3), LinearMap(S=5, s=2, shared=True),
    CellularAutomaton(S=6, states=4, pool=7), CellularAutomaton(S=6, states=4, pool=0, k=2, boundary="zero"),
])
def test_grouping_changes_no_bit(task):
    together = draw(task, size=50)[1]
    for seed in SEEDS:
        for all_members, one in zip(together, draw(task, seed[None], size=50)[1], strict=True):
            assert torch.equal(all_members[seed], one[0])


# ------------------------------------------------------------------------------------------------- associative recall
@pytest.mark.parametrize("task", [AssociativeRecall(N_pairs=5, N_tokens=9), AssociativeRecall(N_pairs=5, N_tokens=9, B=2.5, p=0.4)])
def test_recall_is_solved_by_looking_the_key_up(task):
    _, (inputs, targets, pattern) = draw(task, size=300)
    for sequence, answer, where in zip(inputs.flatten(0, 1), targets.flatten(), pattern.flatten(0, 2), strict=True):
        keys, values, query = sequence[:-1:2].tolist(), sequence[1::2].tolist(), sequence[-1].item()
        places = [i for i, key in enumerate(keys) if key == query]
        assert places and {values[i] for i in places} == {answer.item()}
        assert where.nonzero().flatten().tolist() == [2 * i + 1 for i in places]
        others = {k: v for k, v in zip(keys, values, strict=True) if k != query}
        assert len(others) == len(keys) - len(places)  # other keys stand once
        assert len({*others.values(), answer.item()}) == len(others) + 1  # keys to values is one to one


@pytest.mark.parametrize("B", [1, 2.5, 5])
def test_expected_occurrences_are_B_in_training_and_one_in_test(B):
    task = AssociativeRecall(N_pairs=5, N_tokens=9, B=B)
    count = draw(task, size=5000)[1].pattern.sum((-2, -1)).flatten().double()
    assert count.min() >= 1 and abs(count.mean() - B) <= 4 * count.std() / len(count) ** 0.5
    assert (draw(task, train=False)[1].pattern.sum((-2, -1)) == 1).all()


def test_query_frequencies_slots_and_values():
    task = AssociativeRecall(N_pairs=5, N_tokens=9, p=0.4)
    _, batch = draw(task, size=6000)
    counts = torch.bincount(batch.inputs[..., -1].flatten(), minlength=9).numpy()
    expected = np.array([0.4 / 2 + 0.6 / 9] * 2 + [0.6 / 9] * 7) * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    slots = batch.pattern.sum((0, 1, 2)).numpy()[1::2]
    assert stats.chisquare(slots).pvalue > 1e-4
    assert stats.chisquare(torch.bincount(batch.targets.flatten(), minlength=9)).pvalue > 1e-4
    _, test = draw(task, size=6000, train=False)
    assert stats.chisquare(torch.bincount(test.inputs[..., -1].flatten(), minlength=9)).pvalue > 1e-4


# ------------------------------------------------------------------------------------------------------- linear map
@pytest.mark.parametrize("task", [LinearMap(S=6, s=3), LinearMap(S=5, s=2, states=4)])
def test_linear_map_is_parity_of_the_pattern(task):
    constants, (inputs, targets, pattern) = draw(task, size=40)
    assert (constants["A"].sum(-1) == task.s).all()
    whole = torch.cat([inputs, targets[..., -1:]], -1)
    for i, read in enumerate(task.reads):
        assert torch.equal(targets[:, :, i], whole[:, :, read + 1])
    parity = (pattern * inputs[:, :, None]).sum(-1) % 2
    full = pattern.sum(-1) == task.s  # the last state's last bit is no input; rows that need it stand in no pattern
    assert full[:, :, : task.S].all() and torch.equal(parity[full], targets[full])


def test_rows_are_uniform_over_supports_and_drawn_per_run_unless_shared():
    rows = LinearMap(S=4, s=2).constants(torch.arange(3000))["A"].flatten(0, 1)
    index = (rows @ torch.tensor([1.0, 2, 4, 8])).long()
    counts = torch.bincount(index)[[sum(2**i for i in c) for c in itertools.combinations(range(4), 2)]]
    assert counts.sum() == len(rows) and stats.chisquare(counts).pvalue > 1e-4
    shared = LinearMap(S=8, s=3, shared=True).constants(SEEDS)["A"]
    own = LinearMap(S=8, s=3).constants(SEEDS)["A"]
    assert torch.equal(shared[0], shared[1]) and not torch.equal(own[0], own[1])


def test_copying_at_s_equal_S_scores_what_arithmetic_says():
    """All outputs are one bit: the previous output is right but for the first, accuracy 1 - 1/(2S), loss ln 2 / S."""
    task = LinearMap(S=8, s=8)
    assert task.degenerate and not LinearMap(S=8, s=7).degenerate
    _, (inputs, targets, _) = draw(task, size=4000)
    copied = inputs[..., task.S - 1 :]  # what stands at the read position: the last input bit, then the outputs so far
    right = (copied == targets).double()
    assert (right[..., 1:] == 1).all() and abs(right.mean() - (1 - 0.5 / 8)) < 4 * 0.5 / 8 / 12000**0.5
    logits = torch.where(torch.arange(2) == copied[..., None], 40.0, -40.0)
    logits[:, :, 0] = 0
    assert task.loss(logits, targets).mean().item() == pytest.approx(math.log(2) / 8, rel=1e-5)


def test_linear_map_metrics_are_by_row():
    task = LinearMap(S=4, s=2)
    _, (_, targets, _) = draw(task, size=100)
    logits = torch.where(torch.arange(2) == targets[..., None], 40.0, -40.0)
    logits[:, :, 2] = 0
    measured = task.metrics(logits, targets)
    assert [round(measured[f"row_{i}"][0].item(), 4) for i in range(4)] == [0, 0, 0.6931, 0]
    assert measured["solved_rows"].tolist() == [0.75] * 3


# ------------------------------------------------------------------------------------------------ cellular automaton
def elementary(rule: int, cells: list[int]) -> list[int]:
    """Wolfram's numbering, circular."""
    n = len(cells)
    return [rule >> (4 * cells[i - 1] + 2 * cells[i] + cells[(i + 1) % n]) & 1 for i in range(n)]


@pytest.mark.parametrize("rule", [30, 90, 110, 184])
@pytest.mark.parametrize("k", [1, 3])
def test_advance_is_wolframs_elementary_automaton(rule, k):
    task = CellularAutomaton(S=9, colours=2, k=k, states=2)
    table = torch.tensor([rule >> i & 1 for i in range(8)])
    cells = torch.randint(0, 2, (9,), generator=torch.Generator().manual_seed(rule))
    expected = cells.tolist()
    for _ in range(k):
        expected = elementary(rule, expected)
    assert task.advance(cells[None], table[None])[0].tolist() == expected


def test_zero_boundary_has_no_neighbours_beyond_the_ends():
    task = CellularAutomaton(S=5, colours=2, boundary="zero")
    table = torch.tensor([90 >> i & 1 for i in range(8)])
    assert task.advance(torch.tensor([[0, 1, 0, 0, 1]]), table[None]).tolist() == [[1, 0, 1, 1, 0]]
    assert task.pattern()[0].nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("task", [CellularAutomaton(S=6, states=4, k=2), CellularAutomaton(S=7, states=3, k=2, boundary="zero")])
def test_the_pattern_is_what_an_answer_depends_on(task):
    """Change the first state outside the neighbourhood of a cell: its next value stays. Inside, it moves sometimes."""
    constants = task.constants(SEEDS)
    history, table, _ = task.draw(constants, streams.key(SEEDS, "x"), 400)
    neighbourhood = task.pattern()[: task.S, : task.S]
    for cell, other in itertools.product(range(task.S), range(task.S)):
        changed = history[:, :, 0].clone()
        changed[..., other] = (changed[..., other] + 1) % task.colours
        moved = (task.advance(changed, table)[..., cell] != history[:, :, 1, cell]).any()
        assert moved == neighbourhood[cell, other]


def test_rules_come_from_the_pool_or_are_fresh():
    pool = CellularAutomaton(S=4, states=2, colours=2, pool=5)
    _, table, which = pool.draw(pool.constants(SEEDS), streams.key(SEEDS, "x"), 5000)
    assert torch.equal(table, pool.constants(SEEDS)["rules"][torch.arange(3)[:, None], which])
    assert stats.chisquare(torch.bincount(which.flatten(), minlength=5)).pvalue > 1e-4
    fresh = CellularAutomaton(S=4, states=2, colours=2, pool=0)
    _, table, _ = fresh.draw({}, streams.key(SEEDS, "x"), 5000)
    assert stats.chisquare(torch.bincount((table * 2 ** torch.arange(8)).sum(-1).flatten(), minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("make, word", [
    (lambda: LinearMap(S=4, s=5), "s"), (lambda: LinearMap(S=0), "S"), (lambda: LinearMap(states=1), "states"),
    (lambda: AssociativeRecall(N_pairs=9, N_tokens=9), "N_pairs"), (lambda: AssociativeRecall(N_pairs=4, B=5.0), "B"),
    (lambda: AssociativeRecall(p=1.1), "p"), (lambda: CellularAutomaton(S=4, k=2), "k"), (lambda: CellularAutomaton(window=2), "window"),
    (lambda: CellularAutomaton(S=2, window=3), "k"), (lambda: CellularAutomaton(colours=2, window=1, pool=5), "pool"),
    (lambda: CellularAutomaton(boundary="open"), "boundary"), (lambda: CellularAutomaton(colours=64, window=9, S=16), "window"),
])
def test_bad_input_gets_one_line(make, word):
    with pytest.raises(InputError) as error:
        make()
    assert str(error.value).startswith(word) and "\n" not in str(error.value)
