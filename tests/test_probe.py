"""Probes on attention whose answer is known, interventions against the weights that they stand for."""

import itertools
import math

import numpy as np
import pytest
import torch

from lib import probe
from lib.config import InputError
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import AssociativeRecall, LinearMap
from lib.train import train

TASK = LinearMap(S=5, s=2)
RUN = Run(task=TASK, model=Transformer(layers=2, heads=4, width=16, causal=True, positions="learned"),
          training=Training(eval_size=24, steps=40, every=20, learning_rate=3e-3, stop_below=None), seed=3)


def bound(run=RUN, seed=0):
    """A model with random weights, biases included, on its held-out batch, in float64."""
    batch = probe.held_out(run)
    parameters = run.model.init(run.task, torch.tensor([seed]))
    return {k: v.double() for k, v in parameters.items()}, batch


def pattern_of(rows):
    """One member, sequence and head."""
    return torch.tensor(rows, dtype=torch.float64)[None, None, None]


# -------------------------------------------------------------------------------------------------------------- measures
def test_entropy_of_uniform_and_of_one_place():
    pattern = pattern_of([[0.25] * 4, [0, 1, 0, 0], [0.5, 0, 0, 0.5]])
    assert probe.entropy(pattern).flatten().tolist() == pytest.approx([math.log(4), 0, math.log(2)])


def test_mass_and_overlap_by_hand():
    pattern = pattern_of([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05], [0.25] * 4])
    target = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)[None, None]
    assert probe.mass(pattern, target).flatten().tolist() == pytest.approx([0.7, 0.25, 0])
    assert probe.overlap(pattern, target).flatten()[:2].tolist() == [1.0, 0.5]
    assert probe.overlap(pattern, target).flatten()[2].isnan()
    exact = torch.rand(1, 3, 2, 3, 4).argsort(-1).double()
    assert (probe.overlap(exact, exact[:, :, 0] >= 2)[:, :, 0] == 1).all()


@pytest.mark.parametrize("visible, size, heads", [(8, 3, 1), (8, 3, 8), (15, 7, 4), (31, 16, 16), (6, 6, 2), (9, 1, 5)])
def test_chance_overlap_is_that_of_random_choices(visible, size, heads):
    """20 000 draws: five standard errors."""
    draws = np.random.default_rng(0).random((20_000, heads, visible)).argsort(-1)[..., :size]
    best = (draws < size).mean(-1).max(-1)
    expected = probe.chance_overlap(visible, size, heads)
    assert abs(best.mean() - expected) <= 5 * best.std() / math.sqrt(len(best)) + 1e-12
    assert probe.chance_overlap(visible, size) == pytest.approx(size / visible)


def test_chance_overlap_broadcasts_and_refuses_nonsense():
    both = probe.chance_overlap([8, 9], [3, 2], heads=4)
    assert both == pytest.approx([probe.chance_overlap(8, 3, 4), probe.chance_overlap(9, 2, 4)])
    assert probe.above_chance(both, both) == pytest.approx([0, 0]) and probe.above_chance(1.0, 0.3) == 1
    for bad in ((3, 4, 1), (3, 0, 1), (3, 2, 0)):
        with pytest.raises(InputError):
            probe.chance_overlap(*bad)


TOKENS = torch.tensor([[[7, 3, 7, 5, 3, 7]]])


def test_scores_of_heads_that_do_one_thing():
    """Each of three heads does one thing at every query; at queries without a place to look, it looks at itself."""
    places = torch.tensor([[0, 0, 1, 2, 3, 4],   # the token before
                           [0, 1, 0, 3, 1, 2],   # the last occurrence of its own token
                           [0, 1, 1, 3, 2, 3]])  # what followed that occurrence
    pattern = torch.nn.functional.one_hot(places, 6).double()[None, None]
    assert probe.previous_token(pattern)[0].tolist() == pytest.approx([1, 0, 1 / 5])
    assert probe.match(pattern, TOKENS)[0].tolist() == pytest.approx([0, 1, 0])
    assert probe.induction(pattern, TOKENS)[0].tolist() == pytest.approx([1 / 3, 0, 1])
    pruned = pattern[..., -2:, :]
    assert probe.previous_token(pruned)[0].tolist() == pytest.approx([1, 0, 0])
    assert probe.induction(pruned, TOKENS)[0].tolist() == pytest.approx([0, 0, 1])
    assert probe.match(pruned, torch.arange(6)[None, None])[0].isnan().all()


def test_uniform_causal_attention_scores_what_arithmetic_says():
    pattern = (torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None])[None, None, None]
    assert probe.previous_token(pattern).item() == pytest.approx(sum(1 / n for n in range(2, 7)) / 5)
    assert probe.match(pattern, TOKENS).item() == pytest.approx((1 / 3 + 1 / 5 + 2 / 6) / 3)
    assert probe.induction(pattern, TOKENS).item() == pytest.approx((1 / 3 + 1 / 5 + 2 / 6) / 3)


def test_row_loss_and_probability():
    outputs, targets = torch.randn(2, 7, 5, 2), torch.randint(2, (2, 7, 5))
    rows, right = probe.row_loss(TASK, outputs, targets), probe.probability(outputs, targets)
    torch.testing.assert_close(rows.mean(1), TASK.loss(outputs, targets).mean(1))
    torch.testing.assert_close(rows, -right.log().mean(1))


@pytest.mark.parametrize("S, s", [(6, 3), (6, 5), (5, 5), (7, 1), (1, 1)])
def test_shortest_sets_have_the_right_parity_and_are_all_there_are(S, s):
    """Against a search through all sets of tokens, from small to large, on all inputs."""
    A = LinearMap(S=S, s=s).constants(torch.tensor([2]))["A"][0].numpy().astype(int)
    x = (np.arange(2**S)[:, None] >> np.arange(S)) & 1
    tokens = np.concatenate([x, x @ A.T % 2], axis=1)
    for i, found in enumerate(probe.shortest(A)):
        for size in range(1, S + 1):
            right = [c for c in itertools.combinations(range(S + i), size)
                     if (tokens[:, list(c)].sum(1) % 2 == tokens[:, S + i]).all()]
            if right:
                break
        assert sorted(tuple(np.flatnonzero(f)) for f in found) == right


def test_shortest_of_a_large_map_is_quick_where_rows_are_sparse_or_alike_and_refused_elsewhere():
    def maps(s):
        return LinearMap(S=32, s=s).constants(torch.tensor([0]))["A"][0].numpy()

    assert {found[0].sum() for found in probe.shortest(maps(3))} == {3}
    assert [found[0].sum() for found in probe.shortest(maps(32))] == [32] + [1] * 31
    with pytest.raises(InputError, match="too many"):
        probe.shortest(maps(16))


def test_sensitivity_finds_the_bits_of_a_parity(monkeypatch):
    """A model that is told A depends on its rows and on nothing else."""
    batch = probe.held_out(RUN)

    def forward(self, parameters, inputs, reads, *, pattern=None, tap=None):
        parity = (inputs[:, :, None] * pattern).sum(-1) % 2
        return torch.nn.functional.one_hot(parity, 2).float()

    monkeypatch.setattr(Transformer, "forward", forward)
    found = probe.sensitivity(RUN, {}, batch)
    torch.testing.assert_close(found, batch.pattern[:, 0].float())


# ---------------------------------------------------------------------------------------------------------- intervention
@pytest.mark.parametrize("layer, head", [(0, 0), (0, 3), (1, 2)])
def test_ablation_is_to_zero_the_heads_rows_of_the_output_map(layer, head):
    parameters, batch = bound()
    ablated = probe.ablate(probe.bind(RUN, parameters, batch), [(layer, head)])
    without = {k: v.clone() for k, v in parameters.items()}
    without[f"{layer}.o.weight"][:, head * 4 : head * 4 + 4] = 0
    plain = RUN.model.forward(without, batch.inputs, TASK.reads)
    torch.testing.assert_close(ablated, plain, rtol=1e-9, atol=1e-11)
    assert (ablated - RUN.model.forward(parameters, batch.inputs, TASK.reads)).abs().max() > 1e-4


def test_own_patterns_change_nothing_and_anothers_are_its_queries_and_keys():
    """One layer: a model with another's patterns is the model with that one's queries, keys and embedding in them."""
    run = RUN.model_copy(update={"model": RUN.model.model_copy(update={"layers": 1})})
    (early, batch), (late, _) = bound(run, 0), bound(run, 1)
    late = late | {k: early[k] for k in early if k.startswith(("embed", "position"))}  # alike but for the weights
    forward = probe.bind(run, early, batch)
    outputs, own = probe.record(forward)
    heads = probe.every_head(own)
    assert heads == [(0, h) for h in range(4)]
    torch.testing.assert_close(probe.patch(forward, heads, own), outputs)
    patterns = probe.record(probe.bind(run, late, batch))[1]
    names = {"0.q.weight", "0.q.bias", "0.k.weight"}
    mixed = early | {k: late[k] for k in names}
    torch.testing.assert_close(probe.patch(forward, heads, patterns), run.model.forward(mixed, batch.inputs, TASK.reads))
    half = {k: v.clone() for k, v in early.items()}
    for k in names:
        half[k][..., 4:8] = late[k][..., 4:8]
    torch.testing.assert_close(probe.patch(forward, [(0, 1)], patterns), run.model.forward(half, batch.inputs, TASK.reads))


def test_each_head_is_each_head():
    parameters, batch = bound()
    forward = probe.bind(RUN, parameters, batch)
    outputs, own = probe.record(forward)

    def loss(y):
        return TASK.loss(y, batch.targets).mean(1)

    ablated = probe.each_head(forward, loss)
    assert list(ablated) == probe.every_head(own) and len(set(v.item() for v in ablated.values())) == 8
    assert ablated[1, 2] == loss(probe.ablate(forward, [(1, 2)]))
    assert all(v == loss(outputs) for v in probe.each_head(forward, loss, own).values())


def test_wrong_heads_and_patterns_get_one_line():
    parameters, batch = bound()
    forward = probe.bind(RUN, parameters, batch)
    patterns = probe.record(forward)[1]
    for heads in ([(2, 0)], [(0, 4)], [(0, 0), (0, -1)]):
        with pytest.raises(InputError, match="no such"):
            probe.ablate(forward, heads)
    with pytest.raises(InputError, match="shape"):
        probe.patch(forward, [(0, 0)], {0: patterns[0][:, :3]})
    with pytest.raises(InputError, match="shape"):
        probe.patch(forward, [(0, 0)], {1: patterns[1]})


# ----------------------------------------------------------------------------------------------------------- checkpoints
def test_replay_ends_where_the_run_ended():
    curves = train([RUN])[0].curves
    kept = probe.replay(RUN)
    assert list(kept) == curves["step"] == [0, 20, 40]
    batch = probe.held_out(RUN)
    for step, loss in zip(curves["step"], curves["test_loss"], strict=True):
        outputs = RUN.model.forward(kept[step], batch.inputs, TASK.reads, pattern=batch.pattern)
        assert TASK.loss(outputs, batch.targets).mean().item() == pytest.approx(loss, rel=1e-5)
    early = probe.replay(RUN, [20])
    assert list(early) == [20] and all(torch.equal(v, kept[20][k]) for k, v in early[20].items())
    seen = probe.watch(RUN, steps=[0, 40])
    assert list(seen) == [0, 40] and seen[40].patterns[1].shape == (1, 24, 4, 5, 9)
    torch.testing.assert_close(seen[40].parameters, kept[40])


def test_replay_refuses_steps_that_it_cannot_give():
    with pytest.raises(InputError, match="nearest reading is at 20"):
        probe.replay(RUN, [17])
    stops = RUN.model_copy(update={"training": RUN.training.model_copy(update={"stop_below": 10.0, "tail": 0.0})})
    with pytest.raises(InputError, match="ended at step 0"):
        probe.replay(stops, [0, 40])


def test_probes_find_a_circuit_that_is_there():
    """Biased to the true pattern a model's attention is that pattern: overlap and mass are 1 and entropy is ln s."""
    run = RUN.model_copy(update={"model": Transformer(layers=1, heads=4, width=16, causal=True, score_bias=100.0)})
    parameters, batch = bound(run)
    pattern = probe.record(probe.bind(run, parameters, batch))[1][0]
    assert probe.mass(pattern, batch.pattern).min() > 1 - 1e-9 and probe.overlap(pattern, batch.pattern).min() == 1
    assert (probe.entropy(pattern) <= math.log(2) + 1e-9).all()
    recall = AssociativeRecall(N_pairs=4, N_tokens=12)
    run = Run(task=recall, model=run.model, training=RUN.training)
    parameters, batch = bound(run)
    pattern = probe.record(probe.bind(run, parameters, batch))[1][0]
    assert probe.induction(pattern, batch.inputs).min() > 0.999
