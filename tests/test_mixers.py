"""Every token mixer equals its loop over time and an independent reference, and sees no later token."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from test_controls import MODEL, lowest_loss, random_tokens
from torch.func import functional_call

from lib import streams
from lib.config import InputError
from lib.models import Transformer
from lib.models.mixers import MIXERS, gated_deltanet, parts
from lib.models.mixers import mamba as selective
from lib.run import Run, Training
from lib.tasks import AssociativeRecall, CellularAutomaton, LinearMap
from lib.train import train

SEEDS = torch.arange(2)
LONGEST = 255  # positions of the longest sequence that the book trains on: 16 states of 16 cells
CAUSAL = [name for name in MIXERS if name != "mlp_mixer_unmasked"]
TASKS = [AssociativeRecall(N_pairs=3, N_tokens=9), LinearMap(S=4, s=2), LinearMap(S=3, s=2, states=3),
         CellularAutomaton(S=4, states=3, colours=3, pool=5)]


def model(mixer, **values):
    return Transformer(**dict(layers=1, heads=2, width=8, causal=mixer != "mlp_mixer_unmasked", mixer=mixer) | values)


def length_of(positions):
    return LinearMap(S=(positions + 1) // 2, s=1)


def setup(config, positions, batch, scale=0.5, dtype=torch.float64):
    """Random weights, not the initial ones (gates differ between positions), and inputs, both (member, ...)."""
    draw = torch.Generator().manual_seed(positions)
    shapes = MIXERS[config.mixer].shapes(config, length_of(positions))
    block = {k: torch.randn(2, *s, generator=draw, dtype=dtype) * scale for k, s in shapes.items()}
    block = {k: v.requires_grad_() for k, v in block.items()}
    h = torch.randn(2, batch, positions, config.width, generator=draw, dtype=dtype)
    return block, h.requires_grad_()


def same_forward_and_gradient(mixed, expected, inputs, **tolerance):
    """Of a random sum of the outputs with respect to every input; a gradient in units of its largest entry."""
    weight = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1), dtype=mixed.dtype)
    torch.testing.assert_close(mixed, expected, **tolerance)
    a, b = (torch.autograd.grad((y * weight).sum(), inputs.values()) for y in (mixed, expected))
    for name, ours, theirs in zip(inputs, a, b, strict=True):
        assert (unit := theirs.abs().max()) > 0, name
        torch.testing.assert_close(ours / unit, theirs / unit, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ------------------------------------------------------------------------------------------------ parallel = sequential
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("positions, batch, values", [
    (3, 1, {}), (17, 2, dict(heads=4)), (31, 2, dict(width=16, heads=8)), (65, 1, dict(heads=1)), (129, 1, dict(layer_norm=True)), (LONGEST, 1, {}),
])
def test_parallel_equals_sequential(mixer, positions, batch, values):
    config, module = model(mixer, **values), MIXERS[mixer]
    block, h = setup(config, positions, batch)
    mixed, expected = (f(config, block, h) for f in (module.mix, module.mix_sequential))
    assert mixed.shape == h.shape
    same_forward_and_gradient(mixed, expected, block | {"h": h}, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mixer, values", [("mamba", dict(state=3)), ("gated_deltanet", dict(head_dim=3)), ("xlstm", dict(head_dim=3))])
def test_parallel_equals_sequential_at_sizes_of_their_own(mixer, values):
    config, module = model(mixer, **values), MIXERS[mixer]
    block, h = setup(config, 21, 2)
    same_forward_and_gradient(*(f(config, block, h) for f in (module.mix, module.mix_sequential)), block | {"h": h}, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_scan_has_the_value_and_gradient_of_its_recurrence(length, size):
    draw = torch.Generator().manual_seed(length)
    decay, x = (torch.randn(2, 1, length, n, generator=draw, dtype=torch.float64, requires_grad=True) for n in (1, 3))
    torch.testing.assert_close(parts.scan(decay, x, size), parts.scan_sequential(decay, x))
    assert torch.autograd.gradcheck(lambda decay, x: parts.scan(decay, x, size), (decay, x))


@pytest.mark.parametrize("piece", [1, 2 * 2 * 10 * 16 * 3, 1 << 30])  # one sequence at a time; two and one; all
@pytest.mark.parametrize("size", [1, 3, 10])
def test_selective_scan_in_pieces_of_the_batch_and_chunks_of_time(piece, size, monkeypatch):
    monkeypatch.setattr(selective, "PIECE", piece)
    monkeypatch.setattr(selective, "chunk", lambda x: size)
    draw = torch.Generator().manual_seed(size)
    step, u, b, c = (torch.randn(2, 3, 10, n, generator=draw, dtype=torch.float64, requires_grad=True) for n in (16, 16, 3, 3))
    rate = torch.randn(2, 3, 16, generator=draw, dtype=torch.float64, requires_grad=True)
    inputs = dict(step=step, u=u, b=b, c=c, rate=rate)
    mixed, expected = (f(**inputs | {"rate": -rate.exp(), "step": step.exp()}) for f in (selective.selective_scan, selective.selective_scan_sequential))
    same_forward_and_gradient(mixed, expected, inputs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_short_convolution_is_torch_conv1d(length):
    draw = torch.Generator().manual_seed(length)
    x, weight, bias = (torch.randn(*s, generator=draw, dtype=torch.float64, requires_grad=True) for s in ((2, 3, length, 5), (2, 4, 5), (2, 5)))

    def expected(x, bias):
        padded = F.pad(x.transpose(2, 3), (3, 0))
        members = [F.conv1d(p, w.T[:, None], b, groups=5) for p, w, b in zip(padded, weight, bias, strict=True)]
        return torch.stack(members).transpose(2, 3)

    torch.testing.assert_close(parts.short_convolution(x, weight), expected(x, torch.zeros_like(bias)))
    torch.testing.assert_close(parts.short_convolution(x, weight, bias), expected(x, bias))
    assert torch.autograd.gradcheck(parts.short_convolution, (x, weight, bias))


def test_inverse_of_a_unit_triangular_matrix():
    lower = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril(-1).requires_grad_()
    eye = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(gated_deltanet._Inverse.apply(lower) @ (eye + lower), eye.expand_as(lower), rtol=0, atol=1e-7)
    small = (0.3 * lower.detach()[0, :, :4, :4]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gated_deltanet._Inverse.apply(x.tril(-1)), (small,))


# -------------------------------------------------------------------------------------------------------- the references
def mamba(config, w, h):
    """transformers' MambaMixer by its recurrent path."""
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    sizes = dict(hidden_size=config.width, state_size=config.state, time_step_rank=-(-config.width // 16), num_hidden_layers=1)
    return MambaMixer(MambaConfig(expand=2, conv_kernel=4, **sizes), 0), {
        "in_proj.weight": w["in.weight"].T, "conv1d.weight": w["conv.weight"].T[:, None], "conv1d.bias": w["conv.bias"],
        "x_proj.weight": w["select.weight"].T, "dt_proj.weight": w["step.weight"].T, "dt_proj.bias": w["step.bias"],
        "A_log": w["log_rate"], "D": w["skip"], "out_proj.weight": w["out.weight"].T,
    }


def rwkv(config, w, h):
    """transformers' RwkvSelfAttention by its loop over time."""
    from transformers.models.rwkv.modeling_rwkv import RwkvConfig, RwkvSelfAttention

    k, v, r = w["shift"][:, None, None].unbind(0)
    names = dict(key="k", value="v", receptance="r", output="out")
    return RwkvSelfAttention(RwkvConfig(hidden_size=config.width, num_hidden_layers=2)), {
        "time_mix_key": k, "time_mix_value": v, "time_mix_receptance": r, "time_decay": w["decay"], "time_first": w["bonus"],
    } | {f"{theirs}.weight": w[f"{ours}.weight"].T for theirs, ours in names.items()}


def xlstm(config, w, h):
    """transformers' xLSTMLayer by its chunks, of 8 positions, which have a backward of their own."""
    from transformers.models.xlstm.modeling_xlstm import xLSTMConfig, xLSTMLayer

    precision = dict(autocast_kernel_dtype="float32", mode="train", chunk_size=8)
    reference = xLSTMLayer(xLSTMConfig(hidden_size=config.width, num_heads=config.heads, qk_dim_factor=1.0, **precision))
    q, k, v, gate = (x.T for x in w["in.weight"].chunk(4, -1))
    return reference, {
        "q.weight": q, "k.weight": k, "v.weight": v, "ogate_preact.weight": gate, "out_proj.weight": w["out.weight"].T,
        "igate_preact.weight": w["input_gate.weight"].T, "igate_preact.bias": w["input_gate.bias"],
        "fgate_preact.weight": w["forget_gate.weight"].T, "fgate_preact.bias": w["forget_gate.bias"],
        "multihead_norm.weight": w["norm.scale"],
    }


def deltanet(config, w, h):
    """transformers' Qwen3NextGatedDeltaNet by its chunks."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    heads, dim = config.heads, config.width // config.heads
    sizes = dict(linear_num_value_heads=heads, linear_num_key_heads=heads, linear_key_head_dim=dim, linear_value_head_dim=dim)
    reference = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=config.width, num_hidden_layers=1, layer_types=["linear_attention"], **sizes), 0)
    by_head = [x.unflatten(-1, (heads, dim)) for x in (*w["in.weight"].chunk(3, -1), w["gate.weight"])]
    return reference, {
        "in_proj_qkvz.weight": torch.cat(by_head, -1).flatten(1).T,
        "in_proj_ba.weight": torch.stack([w["beta.weight"], w["alpha.weight"]], -1).flatten(1).T,
        "conv1d.weight": w["conv.weight"].T[:, None], "dt_bias": w["alpha.bias"], "A_log": w["log_rate"],
        "norm.weight": w["norm.scale"], "out_proj.weight": w["out.weight"].T,
    }


@pytest.mark.parametrize("mixer, reference", [("mamba", mamba), ("rwkv", rwkv), ("xlstm", xlstm), ("gated_deltanet", deltanet)])
@pytest.mark.parametrize("positions", [15, 95])
def test_equals_the_implementation_in_transformers(mixer, reference, positions):
    """Same weights: forward and the gradient of every parameter and of the input. The references compute in float32."""
    config = model(mixer, width=16)
    block, h = setup(config, positions, 2, scale=0.3, dtype=torch.float32)
    expected = []
    for m in SEEDS:
        module, weights = reference(config, {k.removeprefix("mix."): v[m] for k, v in block.items()}, h[m])
        assert set(weights) == set(dict(module.named_parameters()))
        x = F.pad(h[m], (0, 0, 0, -positions % 8)) if mixer == "xlstm" else h[m]  # whole chunks; what is added comes later
        y = functional_call(module, weights, (x,))
        expected.append((y[0] if isinstance(y, tuple) else y)[:, :positions])
    mixed = MIXERS[mixer].mix(config, block, h)
    assert mixed.std() > 1e-3
    same_forward_and_gradient(mixed, torch.stack(expected), block | {"h": h}, rtol=1e-4, atol=1e-5)


def test_linear_rnn_equals_its_closed_form():
    """No library has this one: s_t = sum over s of the product of the gates after s, times what s let in."""
    config = model("linear_rnn")
    block, h = setup(config, 9, 2)
    rows = []
    for m in SEEDS:
        value, gate = (h[m] @ block["mix.in.weight"][m]).chunk(2, -1)
        a = 1 / (1 + (-(h[m] @ block["mix.forget.weight"][m] + block["mix.forget.bias"][m])).exp())
        states = [sum(a[:, s + 1 : t + 1].prod(1) * (1 - a[:, s]) * value[:, s] for s in range(t + 1)) for t in range(9)]
        gated = torch.stack(states, 1) * gate / (1 + (-gate).exp())
        rows.append(gated @ block["mix.out.weight"][m] + block["mix.out.bias"][m])
    same_forward_and_gradient(MIXERS["linear_rnn"].mix(config, block, h), torch.stack(rows), block | {"h": h})


@pytest.mark.parametrize("mixer", ["mlp_mixer", "mlp_mixer_unmasked"])
def test_mlp_mixer_equals_torch_linear_along_the_positions(mixer):
    """Each head's channels through torch's own linear map over the positions, its matrix masked by hand."""
    config = model(mixer)
    block, h = setup(config, 9, 2)
    seen = [[float(s <= t or mixer == "mlp_mixer_unmasked") for s in range(9)] for t in range(9)]
    mask = torch.tensor(seen, dtype=torch.float64)
    rows = []
    for m in SEEDS:
        weight, bias = block["mix.positions.weight"][m], block["mix.positions.bias"][m]
        channels = h[m].transpose(1, 2).chunk(2, 1)
        mixed = [F.linear(x, w.T * mask, b) for x, w, b in zip(channels, weight, bias, strict=True)]
        rows.append(torch.cat(mixed, 1).transpose(1, 2))
    same_forward_and_gradient(MIXERS[mixer].mix(config, block, h), torch.stack(rows), block | {"h": h})


# -------------------------------------------------------------------------------------------------------------- controls
def moved_earlier(mixer, positions, place):
    """By how much earlier and later outputs move when the input at `place` does."""
    config = model(mixer)
    block, h = setup(config, positions, 2)
    changed = h.detach().clone()
    changed[:, :, place] += 3.0
    with torch.no_grad():
        moved = (MIXERS[mixer].mix(config, block, changed) - MIXERS[mixer].mix(config, block, h)).abs().amax((0, 1, 3))
    return moved[:place].max().item(), moved[place:].max().item()


@pytest.mark.parametrize("positions, place", [(31, 1), (31, 16), (31, 30), (LONGEST, 64), (LONGEST, 200)])
@pytest.mark.parametrize("mixer", MIXERS)
def test_later_positions_change_no_earlier_output(mixer, positions, place):
    earlier, later = moved_earlier(mixer, positions, place)
    assert later > 1e-3
    assert earlier > 1e-3 if mixer == "mlp_mixer_unmasked" else earlier < 1e-12


CONTROL = LinearMap(S=4, s=1)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_random_tokens_stay_at_chance(mixer):
    """Chance to within 3 %; the task's own tokens are learnt."""
    small = MODEL.model_copy(update=dict(mixer=mixer, layers=1, width=16, heads=2))
    assert lowest_loss(random_tokens(CONTROL), small) > 0.97
    assert lowest_loss(CONTROL, small) < 0.9


def test_the_unmasked_mixer_is_caught():
    small = MODEL.model_copy(update=dict(mixer="mlp_mixer_unmasked", causal=False, layers=1, width=16, heads=2))
    assert lowest_loss(random_tokens(CONTROL), small) < 0.9


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_gradients_are_finite_at_the_longest_sequence(mixer, size):
    """float32, from the initial weights; inputs of order one, and far larger than any that training meets."""
    task = length_of(LONGEST + 1)
    assert task.length == LONGEST
    config = model(mixer, width=32)
    parameters = {k.removeprefix("0."): v for k, v in config.init(task, SEEDS).items() if ".mix." in k}
    inputs = {k: v.requires_grad_() for k, v in parameters.items()}
    inputs["h"] = (torch.randn(2, 2, LONGEST, 32, generator=torch.Generator().manual_seed(0)) * size).requires_grad_()
    mixed = MIXERS[mixer].mix(config, parameters, inputs["h"])
    assert mixed.isfinite().all()
    for name, gradient in zip(inputs, torch.autograd.grad(mixed.square().mean(), inputs.values()), strict=True):
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name


# --------------------------------------------------------------------------------------------------- in the Transformer
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_takes_a_step_on_every_token_task_and_members_do_not_meet(mixer, task):
    config = model(mixer, layers=2, layer_norm=True, positions="learned")
    runs = [Run(task=task, model=config, training=Training(steps=2, every=1, eval_size=4, learning_rate=1e-2), seed=seed) for seed in (0, 1)]
    together, alone = train(runs), [train([run])[0] for run in runs]
    for a, b in zip(together, alone, strict=True):
        assert a.steps == 2 and len(set(a.curves["test_loss"])) == 3
        assert a.curves["test_loss"] == pytest.approx(b.curves["test_loss"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_captured_step_is_the_step(mixer):
    """Replayed on CUDA, where the scans run in chunks, against the CPU."""
    training = Training(steps=30, every=10, eval_size=32, stop_below=None, learning_rate=1e-3)
    runs = [Run(task=LinearMap(S=40, s=2), model=model(mixer, width=16), training=training, seed=seed) for seed in (0, 1)]
    for on_cpu, on_gpu in zip(train(runs), train(runs, "cuda"), strict=True):
        assert on_gpu.curves["test_loss"] == pytest.approx(on_cpu.curves["test_loss"], rel=5e-3)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_the_whole_model_is_causal_and_reads_where_it_is_asked(mixer):
    task = LinearMap(S=5, s=2)
    config = model(mixer, layers=2)
    parameters = config.init(task, SEEDS)
    inputs = task.batch(task.constants(SEEDS), streams.key(SEEDS, "x"), 4).inputs
    changed = inputs.clone()
    changed[..., -1] = 1 - changed[..., -1]
    a, b = (config.forward(parameters, x, task.reads) for x in (inputs, changed))
    torch.testing.assert_close(a[:, :, :-1], b[:, :, :-1])
    assert (a[:, :, -1] - b[:, :, -1]).abs().min() > 0
    everywhere = config.forward(parameters, inputs, range(task.length))
    torch.testing.assert_close(everywhere[:, :, task.reads[0] :], a)


@pytest.mark.parametrize("mixer", MIXERS)
def test_initial_values_depend_on_the_seed_alone(mixer):
    config, task = model(mixer), LinearMap(S=4, s=2)
    together = config.init(task, SEEDS)
    assert {k: v.shape[1:] for k, v in together.items()} == config.shapes(task)
    for name, values in config.init(task, SEEDS[1:]).items():
        assert values.dtype == torch.float32 and torch.equal(values[0], together[name][1]), name


def test_the_gates_start_where_they_should():
    task, wide = LinearMap(S=4, s=2), dict(width=256)
    bias = model("linear_rnn", **wide).init(task, SEEDS)["0.mix.forget.bias"]
    spans = 1 / (1 - bias.double().sigmoid())
    assert 2 <= spans.min() < 2.2 and 400 < spans.max() <= 512.01 and spans.log().median() == pytest.approx(math.log(32), abs=0.3)
    mamba = model("mamba", state=4, **wide).init(task, SEEDS)
    steps = F.softplus(mamba["0.mix.step.bias"])
    assert 0.99e-3 < steps.min() < 1.1e-3 and 0.09 < steps.max() < 0.1001
    torch.testing.assert_close(mamba["0.mix.log_rate"].exp(), torch.tensor([1.0, 2, 3, 4]).expand(2, 512, 4))
    deltanet = model("gated_deltanet", heads=64, **wide).init(task, SEEDS)
    rates, steps = deltanet["0.mix.log_rate"].exp(), F.softplus(deltanet["0.mix.alpha.bias"])
    assert 0.01 <= rates.min() < 1 and 15 < rates.max() <= 16 and 0.99e-3 < steps.min() < 2e-3 and 0.05 < steps.max() < 0.1001
    decay = model("rwkv", **wide).init(task, SEEDS)["0.mix.decay"]
    assert decay[:, 0].tolist() == [-5, -5] and decay[:, -1].tolist() == [3, 3] and (decay.diff() > 0).all()
    xlstm = model("xlstm", **wide).init(task, SEEDS)
    assert xlstm["0.mix.forget_gate.bias"].tolist() == [[3, 6], [3, 6]] and xlstm["0.mix.input_gate.bias"].abs().max() < 0.5


# ------------------------------------------------------------------------------------------------------------- bad input
def test_the_registry_holds_what_a_configuration_may_name():
    assert ("attention", *MIXERS) == get_args(Transformer.model_fields["mixer"].annotation)


def test_a_run_with_attention_keeps_its_key():
    run = Run(task=CONTROL, model=Transformer(causal=True))
    assert "mixer" not in run.alike and "state" not in run._part("model")


@pytest.mark.parametrize("values, line", [
    (dict(mixer="hyena"), "mixer: input should be 'attention', 'mlp_mixer'"),
    (dict(mixer="mlp_mixer", causal=True, heads=3), "heads: 3 heads do not divide width 8"),
    (dict(mixer="mlp_mixer", causal=True, heads=3, head_dim=2), "head_dim: mixer mlp_mixer has no head dimension of its own; leave it out"),
    (dict(mixer="xlstm", causal=True, heads=3), "heads: 3 heads do not divide width 8"),
    (dict(mixer="xlstm", causal=True, heads=8), "heads: mixer xlstm normalises each head"),
    (dict(mixer="gated_deltanet", causal=True, head_dim=1), "heads: mixer gated_deltanet normalises each head"),
    (dict(mixer="mamba"), "causal: mixer mamba is causal; set causal = true"),
    (dict(mixer="mlp_mixer_unmasked", causal=True), "causal: mixer mlp_mixer_unmasked reads ahead; set causal = false"),
    (dict(mixer="rwkv", causal=True, score_bias=1.0), "score_bias: mixer rwkv has no attention scores"),
    (dict(mixer="rwkv", causal=True, state=4), "state: mixer rwkv has none"),
    (dict(state=4), "state: mixer attention has none"),
])
def test_what_a_mixer_cannot_do_is_said_in_one_line(values, line):
    with pytest.raises(InputError) as error:
        Run(task=CONTROL, model=Transformer(**dict(width=8, heads=2) | values))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_no_pattern_to_tap_and_no_longer_sequence():
    config = model("mlp_mixer")
    parameters = config.init(CONTROL, SEEDS)
    inputs = torch.zeros(2, 1, 9, dtype=torch.int64)
    with pytest.raises(InputError, match="^tap: mixer mlp_mixer has no attention pattern"):
        config.forward(parameters, inputs[..., :7], CONTROL.reads, tap=lambda layer, p: p)
    with pytest.raises(InputError, match="^mixer mlp_mixer: made for 7 positions, given 9"):
        config.forward(parameters, inputs, range(8, 9))
