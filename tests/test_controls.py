"""Controls that find a leak: what cannot be predicted stays at chance, and the same test notices a model that cheats."""

import pytest
import torch

from lib import streams
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import AssociativeRecall, CellularAutomaton, Language, LinearMap
from lib.tasks.base import Batch
from lib.train import train

MODEL = Transformer(layers=2, heads=4, width=32, causal=True, positions="learned", embedding="table")


def random_tokens(task):
    """The task with independent tokens instead of its own: the next token, which is an input later on, is asked for."""

    class Random(type(task)):
        def batch(self, constants, key, size, *, train=True):
            batch = super().batch(constants, key, size, train=train)
            tokens = streams.integers(streams.key(key, "random"), (size, self.length + 1), self.features)
            if isinstance(self, AssociativeRecall):  # the answer is no input: draw it at random
                return batch._replace(targets=tokens[..., -1:])
            return Batch(tokens[..., :-1], tokens[..., self.reads[0] + 1 :], batch.pattern)

    return Random.model_construct(**task.model_dump())


def lowest_loss(task, model=MODEL):
    training = Training(steps=300, every=50, learning_rate=3e-3, batch=64, eval_size=512, stop_below=None)
    run = Run.model_construct(task=task, model=model, training=training, seed=0, init_seed=None, data_seed=None, eval_seed=None)
    return min(train([run])[0].curves["test_loss"]) / task.chance_loss


TASKS = [AssociativeRecall(N_pairs=2, N_tokens=6), LinearMap(S=5, s=1), CellularAutomaton(S=5, states=3, colours=3, pool=1),
         Language(length=12, filler=8, nouns=8, things=4, names=4, places=1, numbers=5, span=2, items=2, gap=1)]


@pytest.mark.parametrize("task", TASKS)
def test_random_tokens_stay_at_chance(task):
    """512 held-out sequences, at least 512 answers: chance to within 3 %; the task's own tokens are learnt."""
    assert lowest_loss(random_tokens(task)) > 0.97
    assert lowest_loss(task) < 0.9


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_model_that_reads_ahead_is_caught(task):
    """Without the causal mask the next token is in sight, and the control says so."""
    assert lowest_loss(random_tokens(task), MODEL.model_copy(update={"causal": False})) < 0.9


@pytest.mark.parametrize("causal", [False, True])
def test_permuting_positions_changes_what_it_must(causal):
    """Without a position table and a mask, the order of what is looked at means nothing; with either, it does."""
    task, seeds = AssociativeRecall(N_pairs=4, N_tokens=9), torch.arange(2)
    model = MODEL.model_copy(update={"causal": causal})
    parameters = model.init(task, seeds)
    inputs = task.batch(task.constants(seeds), streams.key(seeds, "x"), 8).inputs
    order = torch.tensor([3, 0, 6, 1, 7, 5, 2, 4, 8])  # the query, read last, stays

    def moved():
        a, b = (model.forward(parameters, x, task.reads) for x in (inputs, inputs[..., order]))
        return (a - b).abs().max().item()

    assert moved() > 1e-3
    parameters["position.weight"] = torch.zeros_like(parameters["position.weight"])
    assert moved() > 1e-3 if causal else moved() < 1e-5
