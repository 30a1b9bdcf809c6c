"""The fast model equals the textbook one, forward and gradient; it stays at chance where nothing can be learnt."""

import itertools

import pytest
import torch

from lib import streams
from lib.models import MODELS, Toy, Transformer
from lib.plain import PlainLoop, PlainTransformer
from lib.run import Run, Training
from lib.tasks import TASKS, AssociativeRecall, CellularAutomaton, Language, LinearMap, SingleLocation
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
               CellularAutomaton(S=4, states=3, colours=3, pool=5),
               Language(length=7, filler=4, nouns=4, things=2, names=2, places=1, numbers=3, span=2, items=1, gap=1, held_out=2,
                        rates=[0.3, 0.3, 0.3, 0.0])]


@pytest.mark.parametrize("task, switches", [
    *((TASK, s) for s in SWITCHES), *((TASK, s) for s in (dict(activation="relu"), dict(head_dim=3), dict(heads=1), dict(width=4, heads=2))),
    *((task, dict(causal=True, positions=p, layers=n, layer_norm=norm))
      for task in TASKS_SMALL for p in ("learned", "sinusoidal") for n in (1, 2) for norm in (False, True)),
])
@pytest.mark.parametrize("size", [6, 20, 300])
def test_equals_the_textbook_model_forward_and_gradient(task, switches, size):
    """Read-out pruning, composed projections and tables (of projections at size 20, of attention at 300) change nothing."""
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


@pytest.mark.parametrize("ahead", [10.0, 130.0, 170.0])
def test_attention_on_the_table_where_no_sequence_holds_the_largest_score(ahead):
    """Token 1 would win by up to float32's whole range and more, and does not occur; position 2 then wins by 1."""
    task = LinearMap(S=4, s=2)
    model = Transformer(layers=1, heads=1, width=16, causal=True, positions="learned")
    parameters, (inputs, _, _) = setup(model, task, 200)
    for name in ("0.q.weight", "0.q.bias", "0.k.weight", "embed.weight", "position.weight"):
        parameters[name] = torch.zeros_like(parameters[name])
    parameters["0.q.bias"][:, 0], parameters["0.k.weight"][:, 0, 0] = 4.0, 1.0
    parameters["embed.weight"][:, 1, 0], parameters["position.weight"][:, 2, 0] = ahead, 1.0
    parameters["position.weight"][:, :, 1:] = torch.randn(7, 15, generator=torch.Generator().manual_seed(0))
    parameters = {name: value.requires_grad_() for name, value in parameters.items()}
    inputs = torch.zeros_like(inputs)
    fast, slow = (model.forward(parameters, inputs, task.reads, tap=tap) for tap in (None, lambda layer, p: p))
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(y.square().mean(), [*parameters.values()]) for y in (fast, slow)]
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_score_bias_moves_attention_to_the_true_pattern():
    task = LinearMap(S=6, s=2)
    model = Transformer(layers=1, heads=4, width=16, causal=True, score_bias=50.0)
    parameters, batch = setup(model, task, 20)
    seen = {}
    model.forward(parameters, batch.inputs, task.reads, pattern=batch.pattern, tap=lambda layer, p: seen.setdefault(layer, p))
    on_target = (seen[0] * batch.pattern[:, :, None]).sum(-1)
    assert on_target.min() > 0.99


class PlainToy(torch.nn.Module):
    """The toy model as anybody would write it."""

    def __init__(self, task):
        super().__init__()
        self.a, self.W = (torch.nn.Parameter(torch.zeros(*shape)) for shape in ((task.T,), (task.d, task.d)))

    def forward(self, inputs, reads):
        return (self.a.softmax(0) @ inputs @ self.W.T)[:, None]


FIXED = SingleLocation(T=7, d=5, position="fixed", feature=False)
MODELS_SMALL = [
    Transformer(layers=2, heads=4, width=16, causal=True),
    Transformer(layers=1, heads=4, width=16, causal=True, layer_norm=True, positions="learned", embedding="table"),
]


@pytest.mark.parametrize("optimizer, rate", [("adam", 1e-3), ("adamw", 1e-3), ("sgd", 0.1)])
@pytest.mark.parametrize("task, model", [*itertools.product([*TASKS_SMALL, FIXED], MODELS_SMALL), (FIXED, Toy())])
def test_fifty_steps_leave_the_textbook_loop_s_weights(task, model, optimizer, rate):
    """torch.optim's own loop over the nn.Module, same data: equal to float32 rounding, in units of what was learnt."""
    decay = dict(weight_decay=0.1) if optimizer == "adamw" else {}
    training = Training(steps=50, every=50, batch=130, optimizer=optimizer, learning_rate=rate, eval_size=64, **decay)
    run = Run(task=task, model=model, training=training, seed=1)
    loop = PlainLoop(run, PlainToy(task) if isinstance(model, Toy) else None)
    loop.advance(50)
    weights = {}
    curves = train([run], visit=lambda step, parameters, _: weights.update({step: {k: v[0].clone() for k, v in parameters.items()}}))[0].curves
    assert curves["test_loss"][-1] == pytest.approx(loop.test_loss(), rel=1e-4)
    theirs = dict(loop.model.named_parameters())
    for name, ours in weights[50].items():
        same = PlainTransformer.transposed(name, ours) if isinstance(model, Transformer) else ours
        moved = (ours - weights[0][name]).abs().max()
        assert moved > 0
        assert (same - theirs[PlainTransformer.name(name)]).abs().max() < 3e-4 * moved, name


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
