"""The fast model equals the textbook one, forward and gradient; it stays at chance where nothing can be learnt."""

import itertools

import pytest
import torch

from lib import streams
from lib.bench import PlainLoop, PlainTransformer
from lib.models import MODELS, Toy, Transformer
from lib.run import Run, Training
from lib.tasks import TASKS, AssociativeRecall, CellularAutomaton, LinearMap, SingleLocation
from lib.train import train

TASK = SingleLocation(T=7, d=5)
SEEDS = torch.arange(2)


def setup(model, task=TASK, size=6):
    constants = task.constants(SEEDS)
    return model.init(task, SEEDS), task.batch(constants, streams.key(SEEDS, "x"), size)


SWITCHES = [
    dict(layers=n, causal=causal, layer_norm=norm, residual=residual, mlp=mlp)
    for n, causal, norm, residual, mlp in itertools.product((1, 2, 3), (False, True), (False, True), (True, False), (True, False))
]


TASKS_SMALL = [TASK, AssociativeRecall(N_pairs=3, N_tokens=9), LinearMap(S=4, s=2), LinearMap(S=3, s=2, states=3),
               CellularAutomaton(S=4, states=3, colours=3, pool=5)]


@pytest.mark.parametrize("task, switches", [
    *((TASK, s) for s in SWITCHES), *((TASK, s) for s in (dict(activation="relu"), dict(head_dim=3), dict(heads=1), dict(width=4, heads=2))),
    *((task, dict(causal=True, positions=p, layers=n, layer_norm=norm))
      for task in TASKS_SMALL for p in ("learned", "sinusoidal") for n in (1, 2) for norm in (False, True)),
])
@pytest.mark.parametrize("size", [6, 20])
def test_equals_the_textbook_model_forward_and_gradient(task, switches, size):
    """Read-out pruning, composed projections and tables (size 20 has the (token, position) table) change nothing."""
    model = Transformer(**dict(heads=4, width=16) | switches)
    parameters, (inputs, targets, _) = setup(model, task, size)
    parameters = {k: (v.double() + 0.01).requires_grad_() for k, v in parameters.items()}
    inputs, targets = (t.double() if t.is_floating_point() else t for t in (inputs, targets))
    outputs = model.forward(parameters, inputs, task.reads)
    task.loss(outputs, targets).mean(1).sum().backward()
    for m in SEEDS:
        plain = PlainTransformer(model, task).load({k: v[m].detach() for k, v in parameters.items()})
        expected = plain(inputs[m], task.reads)
        torch.testing.assert_close(outputs[m], expected, rtol=1e-9, atol=1e-11)
        task.loss(expected[None], targets[m][None]).mean().backward()
        gradients = dict(plain.named_parameters())
        for k, v in parameters.items():
            torch.testing.assert_close(v.grad[m], plain.transposed(k, gradients[plain.name(k)].grad), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("task", TASKS_SMALL)
def test_tapped_forward_is_the_fast_one_and_sees_normalised_causal_patterns(task):
    model = Transformer(heads=4, width=16, causal=True)
    parameters, (inputs, _, _) = setup(model, task, 20)
    seen = {}
    outputs = model.forward(parameters, inputs, task.reads, tap=lambda layer, p: seen.setdefault(layer, p))
    torch.testing.assert_close(outputs, model.forward(parameters, inputs, task.reads))
    assert seen[0].shape == (2, 20, 4, task.length, task.length) and seen[1].shape[-2:] == (len(task.reads), task.length)
    for pattern in seen.values():
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        assert pattern.triu(task.length - pattern.shape[-2] + 1).abs().max() == 0


def test_score_bias_moves_attention_to_the_true_pattern():
    task = LinearMap(S=6, s=2)
    model = Transformer(layers=1, heads=4, width=16, causal=True, score_bias=50.0)
    parameters, batch = setup(model, task, 20)
    seen = {}
    model.forward(parameters, batch.inputs, task.reads, pattern=batch.pattern, tap=lambda layer, p: seen.setdefault(layer, p))
    on_target = (seen[0] * batch.pattern[:, :, None]).sum(-1)
    assert on_target.min() > 0.99


@pytest.mark.parametrize("model", [Transformer(layers=2, heads=4, width=32), Transformer(layers=1, heads=2, width=32, layer_norm=True)])
def test_fifty_steps_equal_the_textbook_loop(model):
    """The loop's losses after 50 steps against torch.optim.Adam on the nn.Module, same data."""
    training = Training(steps=50, every=50, learning_rate=1e-3, eval_size=64)
    run = Run(task=TASK, model=model, training=training, seed=1)
    loop = PlainLoop(run)
    loop.advance(50)
    assert train([run])[0].curves["test_loss"][-1] == pytest.approx(loop.test_loss(), rel=1e-4)


def test_initialisation_is_that_of_torch_linear():
    parameters = Transformer(width=64, heads=4).init(TASK, SEEDS)
    weight = parameters["0.up.weight"]
    assert weight.abs().max() <= 64**-0.5 and weight.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.02)
    assert parameters["0.up.bias"].abs().max() <= 64**-0.5 and parameters["0.down.bias"].abs().max() <= 256**-0.5


class RandomTargets(SingleLocation):
    """The control: answers that have nothing to do with the sequence."""

    def batch(self, constants, key, size, *, train=True):
        batch = super().batch(constants, key, size, train=train)
        noise = streams.normal(streams.key(key, "noise"), batch.targets.shape[1:]).float() * streams.NORMAL
        return batch._replace(targets=noise / self.d**0.5)


@pytest.mark.parametrize("model", [
    Transformer(width=32, heads=2), Transformer(width=32, heads=2, causal=True), Transformer(width=32, heads=2, layer_norm=True), Toy(),
])
def test_random_targets_stay_at_chance(model):
    """Not one reading below 90 % of chance; the same runs on the true targets fall below (checked for the Transformer)."""
    switches = dict(position="fixed", feature=False) if model.kind == "toy" else {}
    rate = dict(optimizer="sgd", learning_rate=0.3) if model.kind == "toy" else dict(learning_rate=1e-3)
    training = Training(steps=400, every=50, stop_below=None, **rate)
    for task, learns in ((RandomTargets(T=8, d=4, **switches), False), (SingleLocation(T=8, d=4, **switches), True)):
        run = Run.model_construct(task=task, model=model, training=training, seed=0, init_seed=None, data_seed=None, eval_seed=None)
        lowest = min(train([run])[0].curves["test_loss"])
        assert (lowest < 0.25) if learns else (lowest > 0.9 * task.chance_loss)


@pytest.mark.parametrize("task", TASKS_SMALL[2:])
def test_later_tokens_change_no_earlier_answer(task):
    model = Transformer(layers=2, heads=4, width=16, causal=True)
    parameters, (inputs, _, _) = setup(model, task, 20)
    changed = inputs.clone()
    middle = task.reads[len(task.reads) // 2]
    changed[:, :, middle + 1 :] = (changed[:, :, middle + 1 :] + 1) % task.features
    a, b = (model.forward(parameters, x, task.reads) for x in (inputs, changed))
    cut = middle + 1 - task.reads[0]
    torch.testing.assert_close(a[:, :, :cut], b[:, :, :cut])
    assert (a[:, :, cut:] - b[:, :, cut:]).abs().amax(-1).min() > 0


@pytest.mark.parametrize("task", [*TASKS_SMALL, SingleLocation(T=6, d=4, position="fixed", feature=False)])
@pytest.mark.parametrize("model", MODELS)
def test_every_task_and_model_builds_and_takes_a_step(task, model):
    if model is Toy and getattr(task, "position", None) != "fixed":
        return
    run = Run(task=task, model=model(**({} if model is Toy else {"causal": True})), training=Training(steps=1, eval_size=4), seed=0)
    result = train([run])[0]
    assert result.steps == 1 and result.curves["test_loss"][0] != result.curves["test_loss"][1]


def test_every_task_is_among_those_tested():
    assert {type(task) for task in TASKS_SMALL} == set(TASKS)


def test_field_names_are_unique_across_the_parts_of_a_run():
    for task, model in itertools.product(TASKS, MODELS):
        parts = [set(part.model_fields) - {"kind"} for part in (task, model, Training)]
        assert len(set.union(*parts)) == sum(map(len, parts)), (task, model)
