"""A run's numbers depend on its own configuration and seed alone."""

import json
import math
from pathlib import Path

import pytest
import torch

from lib.config import InputError
from lib.models import Toy, Transformer
from lib.models.mixers import MIXERS
from lib.plain import PlainLoop, PlainTransformer
from lib.run import Run, Training
from lib.store import Store
from lib.sweep import _fit, sweep
from lib.tasks import TASKS, AssociativeRecall, CellularAutomaton, Language, LinearMap, SingleLocation
from lib.train import IDLE, Steps, _weights, resolve_device, start, train

GOLDEN = Path(__file__).parent / "golden.json"
SMALL = dict(task=SingleLocation(T=6, d=4), model=Transformer(layers=2, heads=2, width=16))
FAST = Training(steps=600, learning_rate=3e-3, every=20, eval_size=64, stop_below=0.25, tail=0.0)
CASES = {
    "single_location × transformer": Run(**SMALL, training=Training(steps=30, every=10, eval_size=32, learning_rate=1e-3)),
    "single_location × transformer, norm, mask, B, p": Run(
        task=SingleLocation(T=8, d=4, B=2, p=0.3), model=Transformer(layers=1, width=16, layer_norm=True, causal=True),
        training=Training(optimizer="adamw", weight_decay=0.1, warmup=10, steps=30, every=10, eval_size=32, learning_rate=1e-3)),
    "single_location × toy": Run(
        task=SingleLocation(T=6, d=4, position="fixed", feature=False), model=Toy(start="normal"),
        training=Training(optimizer="sgd", learning_rate=0.5, steps=30, every=10, eval_size=32)),
    "language × transformer": Run(
        task=Language(length=16), model=Transformer(layers=2, heads=2, width=16, causal=True, layer_norm=True, positions="learned", embedding="table"),
        training=Training(optimizer="adamw", steps=30, every=10, eval_size=32, learning_rate=1e-3)),
}
SHORT = Training(optimizer="adamw", weight_decay=0.01, steps=30, every=10, eval_size=32, learning_rate=3e-3)
NORMED = Transformer(layers=2, heads=2, width=16, causal=True, layer_norm=True, positions="learned", embedding="table")
CASES |= {
    f"{name} × transformer": Run(task=task, model=model, training=SHORT) for name, task, model in (
        ("associative_recall", AssociativeRecall(N_pairs=3, N_tokens=12, B=1.5, p=0.3), Transformer(layers=2, heads=2, width=16, causal=True)),
        ("linear_map", LinearMap(S=4, s=2), NORMED.model_copy(update=dict(layers=1))),
        ("linear_map, one map, bias", LinearMap(S=4, s=2, shared=True), NORMED.model_copy(update=dict(score_bias=2.0))),
        ("cellular_automaton, pool", CellularAutomaton(S=5, states=3, pool=4), NORMED),
        ("cellular_automaton, fresh rules", CellularAutomaton(S=5, states=3, pool=0), NORMED))
}
CASES |= {
    f"associative_recall × {mixer}": Run(
        task=AssociativeRecall(N_pairs=3, N_tokens=12), training=SHORT,
        model=NORMED.model_copy(update=dict(mixer=mixer, causal=not mixer.endswith("unmasked")))) for mixer in MIXERS
}


def members(n, **training):
    return [Run(**SMALL, training=FAST.model_copy(update=training), seed=s) for s in range(n)]


def test_every_task_and_every_mixer_is_on_record():
    runs = CASES.values()
    assert {type(run.task) for run in runs} == {*TASKS}
    assert {run.model.mixer for run in runs if run.model.kind == "transformer"} == {"attention", *MIXERS}


@pytest.mark.parametrize("name", CASES)
def test_golden_trajectory(name):
    """The first steps are those on record; a change of meaning must raise a version and renew tests/golden.json."""
    golden = json.loads(GOLDEN.read_text())[name]
    run = CASES[name]
    assert run.key == golden["key"]
    assert len({*golden["test_loss"]}) > 1, "nothing is learnt here"
    assert train([run])[0].curves["test_loss"] == pytest.approx(golden["test_loss"], rel=2e-4)


def test_same_seed_is_bit_equal_and_another_seed_differs():
    first, again, other = train(members(1))[0], train(members(1))[0], train(members(2)[1:])[0]
    assert {**first.curves, "train_loss": first.curves["train_loss"][1:]} == {**again.curves, "train_loss": again.curves["train_loss"][1:]}
    assert first.curves["test_loss"][0] != other.curves["test_loss"][0]


def test_grouping_and_early_exit_of_others_change_no_run():
    """Four members side by side, which end at different steps, against each alone."""
    together = train(members(4))
    assert len({r.steps for r in together}) > 1
    for r in together:
        alone = train([r.run])[0]
        assert alone.steps == r.steps and alone.curves["step"] == r.curves["step"]
        assert r.curves["test_loss"] == pytest.approx(alone.curves["test_loss"], rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_two_members_of_every_kind_learn_side_by_side_what_each_learns_alone(name):
    runs = [CASES[name].model_copy(update=dict(seed=seed)) for seed in (0, 1)]
    side_by_side = train(runs)
    for one, run in zip(side_by_side, runs, strict=True):
        assert one.curves["test_loss"] == pytest.approx(train([run])[0].curves["test_loss"], rel=2e-4)
    assert side_by_side[0].curves["test_loss"] != side_by_side[1].curves["test_loss"]


def test_a_stack_need_not_close_up_at_once(monkeypatch):
    """On a GPU, members that have ended may stay for a while; their results are not touched again."""
    expected = [(r.steps, r.status) for r in train(members(4))]
    monkeypatch.setitem(IDLE, "cpu", 0.9)
    ended = []
    assert [(r.steps, r.status) for r in train(members(4), done=ended.append)] == expected
    assert sorted(r.run.seed for r in ended) == [0, 1, 2, 3] and [r.steps for r in ended] == sorted(r.steps for r in ended)


@pytest.mark.gpu
@pytest.mark.parametrize("task", [AssociativeRecall(N_pairs=3, N_tokens=9), LinearMap(S=4, s=2), CellularAutomaton(S=4, states=3), Language(length=16)])
@pytest.mark.parametrize("training", [dict(), dict(optimizer="sgd", learning_rate=0.1, warmup=10), dict(optimizer="adamw", warmup=10)])
def test_a_captured_step_is_the_step(task, training):
    """Replayed on CUDA, against the CPU."""
    runs = [Run(task=task, model=Transformer(layers=2, heads=2, width=16, causal=True), seed=s,
                training=Training(steps=60, every=10, eval_size=32, stop_below=None, **training)) for s in range(3)]
    for on_cpu, on_gpu in zip(train(runs), train(runs, "cuda"), strict=True):
        assert on_gpu.curves["test_loss"] == pytest.approx(on_cpu.curves["test_loss"], rel=5e-3)


@pytest.mark.gpu
def test_a_stack_closes_up_and_is_captured_anew():
    """Members end at different steps; who stays goes on as on the CPU."""
    on_cpu, on_gpu = train(members(4)), train(members(4), "cuda")
    assert len({r.steps for r in on_gpu}) > 1
    for a, b in zip(on_cpu, on_gpu, strict=True):
        n = min(len(a.curves["test_loss"]), len(b.curves["test_loss"])) // 2  # rounding grows on the way to the jump
        assert b.curves["test_loss"][:n] == pytest.approx(a.curves["test_loss"][:n], rel=5e-3) and abs(a.steps - b.steps) <= 0.2 * a.steps


@pytest.mark.gpu
def test_between_readings_a_captured_step_never_waits_for_the_host():
    steps = start(members(3), "cuda")
    for _ in range(Steps.EAGER + 1):
        steps.take()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            steps.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps.graph is not None and steps.step.item() == Steps.EAGER + 21 and torch.isfinite(steps.total).all()


@pytest.mark.gpu
def test_a_sweep_on_cuda_chooses_its_stacks_and_keeps_every_run(tmp_path):
    runs = members(6, steps=60)
    found = sweep({"all": runs}, chapter="bench", store=Store(tmp_path), device="cuda")["all"]
    assert set(found.rows["run"]) == {run.key for run in runs} and set(found.rows["device"]) == {"cuda"}


@pytest.mark.gpu
def test_what_does_not_fit_a_gpu_is_halved(tmp_path):
    """With room for little more than one large member, stacks fall apart and every run ends."""
    large = Run(task=SingleLocation(T=64, d=16), model=Transformer(layers=2, width=512), training=Training(steps=6, every=6, batch=256, eval_size=32))
    runs = [large.model_copy(update={"seed": seed}) for seed in range(4)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(runs[:1], "cuda")
    share = 2.5 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    ended = []
    try:
        assert _fit(runs, "cuda", ended.append) == [] and {r.run.key for r in ended} == {run.key for run in runs}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_warm_up_of_sgd_is_its_rate():
    """A warm-up scales the gradients; that is the same as to raise the rate from step to step."""
    run = Run(**SMALL, training=Training(optimizer="sgd", learning_rate=0.1, warmup=4, steps=8, every=8, eval_size=16))
    ours, theirs = start([run], "cpu"), PlainLoop(run)
    for step in range(1, 9):
        ours.take()
        theirs.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, step / 4)
        theirs.advance(1)
    own = dict(theirs.model.named_parameters())
    for name, value in ours.parameters.items():
        torch.testing.assert_close(own[PlainTransformer.name(name)], PlainTransformer.transposed(name, value[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_cuda_trains_the_same_run():
    on_cpu, on_gpu = train(members(1, steps=40))[0], train(members(2, steps=40), "cuda")[0]
    assert on_gpu.curves["test_loss"] == pytest.approx(on_cpu.curves["test_loss"], rel=2e-3)


def test_ends_where_it_says():
    stopped = train(members(1))[0]
    assert stopped.curves["test_loss"][-1] <= 0.25 < stopped.curves["test_loss"][-2]
    longer = train(members(1, tail=0.5))[0]
    assert longer.steps >= 1.5 * stopped.steps
    assert longer.curves["test_loss"][: len(stopped.curves["step"])] == stopped.curves["test_loss"]
    censored = train(members(1, steps=40))[0]
    assert (censored.status, censored.steps) == ("finished", 40)
    assert train(members(1, steps=60, stop_below=None))[0].steps == 60


def test_a_member_that_diverges_is_recorded_and_stops_nobody(monkeypatch):
    init = Transformer.init

    def poisoned(self, task, seeds):
        parameters = init(self, task, seeds)
        parameters["read.bias"][seeds == 1] = math.nan
        return parameters

    clean = train(members(3, steps=60))
    monkeypatch.setattr(Transformer, "init", poisoned)
    results = train(members(3, steps=60))
    assert [r.status for r in results] == ["finished", "diverged", "finished"] and results[1].steps == 0
    for r, c in zip(results[::2], clean[::2], strict=True):
        assert r.curves["test_loss"] == pytest.approx(c.curves["test_loss"], rel=1e-4)


def test_huge_rate_diverges_and_is_recorded():
    run = Run(task=SingleLocation(T=6, d=4, position="fixed", feature=False), model=Toy(start="normal"),
              training=Training(optimizer="sgd", learning_rate=1e6, steps=200, every=10, eval_size=16))
    assert train([run])[0].status == "diverged"


def test_named_seeds_are_apart():
    base = train(members(1, steps=20))[0]
    run = members(1, steps=20)[0]

    def first_losses(**seeds):
        return train([run.model_copy(update=seeds)])[0].curves

    assert first_losses(eval_seed=9)["train_loss"][1] == base.curves["train_loss"][1]
    assert first_losses(eval_seed=9)["test_loss"] != base.curves["test_loss"]
    assert first_losses(init_seed=9)["test_loss"][0] != base.curves["test_loss"][0]
    assert len({run.key, *(run.model_copy(update={f"{n}_seed": 9}).key for n in ("init", "data", "eval"))}) == 4
    assert run.model_copy(update={"init_seed": run.seed}).key == run.key


def test_a_kick_is_as_small_as_it_says_and_below_rounding_it_is_none():
    base, small, none = (train(members(2, steps=20, perturb=size)) for size in (0.0, 1e-3, 1e-9))
    assert [r.curves for r in none] == [r.curves for r in base] and none[0].run.key != base[0].run.key
    for r, b in zip(small, base, strict=True):
        assert r.curves != b.curves and r.curves["test_loss"] == pytest.approx(b.curves["test_loss"], rel=2e-2)
    seeds, run = torch.tensor([1, 0]), members(1, perturb=1e-3)[0]
    before, after = run.model.init(run.task, seeds), _weights(run, seeds)
    change = torch.cat([(after[k] / before[k] - 1)[before[k] != 0] for k in before])
    assert change.std().item() == pytest.approx(1e-3, rel=0.05) and change.mean().abs() < 1e-4
    alone = _weights(run, seeds[:1])
    assert all(torch.equal(alone[k][0], after[k][0]) for k in after)


def test_evaluation_grid_is_geometric_and_ends_with_the_budget():
    steps = Training(steps=5000, every=10, spacing=0.05).evaluations()
    gaps = torch.tensor(steps).diff()
    assert steps[0] == 0 and steps[-1] == 5000 and gaps[:10].tolist() == [10] * 10
    assert all(gap <= 0.051 * step + 1 for step, gap in zip(steps[20:-1], gaps[20:], strict=True))


@pytest.mark.parametrize("bad, word", [
    (dict(learning_rate=0.0), "learning_rate"), (dict(steps=0), "steps"), (dict(optimiser="adam"), "optimiser"),
    (dict(optimizer="lion"), "optimizer"), (dict(weight_decay=0.1), "weight_decay"), (dict(batch=True), "batch"),
])
def test_bad_training_gets_one_line(bad, word):
    with pytest.raises(InputError) as error:
        Training(**bad)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_mixed_batch_and_unknown_device_are_refused():
    with pytest.raises(InputError, match="differ in their seeds alone"):
        train([members(1)[0], members(1, steps=7)[0]])
    with pytest.raises(InputError, match="device: 'tpu'"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            resolve_device("cuda")


if __name__ == "__main__":  # python tests/test_train.py renews the record
    golden = {n: {"key": r.key, "test_loss": train([r])[0].curves["test_loss"]} for n, r in CASES.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
