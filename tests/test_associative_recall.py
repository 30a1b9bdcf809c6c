"""Recall: what its samplers say beyond one query at a time, what its baselines score, and bad input to its chapter.

Statistical tests have an error rate of 1e-4 each.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from lib import probe, streams
from lib.__main__ import main
from lib.tasks import AssociativeRecall

SEEDS = torch.arange(3)


def draw(task, size=5000, **kw):
    return task.batch({}, streams.key(SEEDS, "recall"), size, **kw)


def test_occurrences_are_one_and_a_binomial():
    """One slot holds the query's pair for certain, each of the others with (B - 1)/(N_pairs - 1), independently."""
    task = AssociativeRecall(N_pairs=5, N_tokens=9, B=2.5)
    others = draw(task).pattern.sum((-2, -1)).flatten().numpy() - 1
    observed = np.bincount(others, minlength=5)
    assert stats.chisquare(observed, stats.binom(4, 1.5 / 4).pmf(range(5)) * observed.sum()).pvalue > 1e-4


@pytest.mark.parametrize("task", [AssociativeRecall(N_pairs=3, N_tokens=5), AssociativeRecall(N_pairs=3, N_tokens=5, B=2, p=0.5)])
def test_a_value_says_nothing_of_its_key(task):
    """Keys and values are tied anew in every sequence: the answer is uniform whatever the query."""
    batch = draw(task)
    table = np.zeros((5, 5))
    np.add.at(table, (batch.inputs[..., -1].flatten().numpy(), batch.targets.flatten().numpy()), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4 and stats.chisquare(table.sum(0)).pvalue > 1e-4


def test_at_p_one_the_query_is_one_of_two_tokens_and_in_test_data_any():
    task = AssociativeRecall(N_pairs=3, N_tokens=7, p=1.0)
    counts = torch.bincount(draw(task).inputs[..., -1].flatten(), minlength=7).numpy()
    assert counts[2:].sum() == 0 and stats.chisquare(counts[:2]).pvalue > 1e-4
    assert stats.chisquare(torch.bincount(draw(task, train=False).inputs[..., -1].flatten(), minlength=7)).pvalue > 1e-4


def test_naming_a_value_of_the_context_scores_one_in_N_pairs_and_ln_N_pairs():
    """The guessing level: each slot holds the answer equally often, and equal odds on the values cost ln N_pairs."""
    task = AssociativeRecall(N_pairs=4, N_tokens=12)
    inputs, targets, _ = draw(task, train=False)
    right = inputs[..., 1:-1:2] == targets
    assert (right.sum(-1) == 1).all() and stats.chisquare(right.sum((0, 1))).pvalue > 1e-4
    logits = torch.zeros(*inputs.shape[:2], 1, 12).scatter_(-1, inputs[..., None, 1:-1:2], 40.0)
    assert task.loss(logits, targets).mean().item() == pytest.approx(task.guessing_loss, rel=1e-5)
    assert task.guessing_loss == pytest.approx(np.log(4)) and task.chance_loss == pytest.approx(np.log(12))


def test_repetition_lets_the_most_frequent_value_pass_for_recall():
    """Without a look at the query: right where the query's pair stands twice or more, and one in N_pairs on test data."""
    task = AssociativeRecall(N_pairs=6, N_tokens=40, B=3)
    for train_data in (True, False):
        inputs, targets, pattern = draw(task, train=train_data)
        right = (inputs[..., 1:-1:2].mode(-1).values == targets[..., 0]).flatten().numpy()
        repeated = (pattern.sum((-2, -1)) > 1).flatten().numpy()
        assert right[repeated].all()
        assert stats.binomtest(int(right[~repeated].sum()), int((~repeated).sum()), 1 / 6).pvalue > 1e-4


def test_the_two_parts_of_the_circuit_are_found_where_they_are():
    """Hand-built attention: values that look one back, a query that looks at the answer; and uniform attention."""
    task = AssociativeRecall(N_pairs=4, N_tokens=12)
    batch = draw(task, size=50, train=False)
    uniform = torch.full((3, 50, 1, 9, 9), 1.0).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    copying = torch.eye(9).roll(-1, 1).tril(-1).expand(3, 50, 1, 9, 9)
    assert (probe.previous_token(copying) == 1).all()
    selecting = batch.pattern[:, :, None].float()
    assert (probe.score(selecting, batch.pattern) == 1).all()
    torch.testing.assert_close(probe.score(uniform[..., -1:, :], batch.pattern), torch.full((3, 1), 1 / 9))


@pytest.mark.parametrize("arguments, named", [
    ("N_pairs 60", "N_pairs: 60 distinct keys"), ("N_pairs 0", "N_pairs: "), ("B_grid [1,9]", "B: 9.0 expected occurrences"),
    ("B_grid [0.5]", "B: "), ("p_grid [0,1.5]", "p: "), ("pairs_grid [48]", "N_pairs: 48 distinct keys"), ("tokens_grid [8]", "N_tokens: of 8 tokens"),
    ("heads 3", "heads: 3"), ("N_pair 4", "did you mean N_pairs?"), ("seeds 1.5", "seeds: "), ("steps 0", "steps: "),
])
def test_the_chapter_says_what_is_wrong_with_its_input(arguments, named, capsys, tmp_path, monkeypatch):
    for name in ("STORE", "BUILD"):
        monkeypatch.setenv(f"BOOK_{name}", str(tmp_path / name))
    assert main(["run", "associative_recall", "-p", *arguments.split(" ")]) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
