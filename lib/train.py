"""The one training loop: members that differ in their seeds alone, side by side, until each has emerged or used its budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lib import streams
from lib.config import InputError
from lib.run import Run, Training
from lib.tasks.base import Batch

EVAL_CHUNK = 64  # held-out sequences a forward pass: bounds memory
Visit = Callable[[int, dict[str, Tensor], dict[str, Tensor]], None]  # (step, the members' parameters, their constants)


class Result(NamedTuple):
    """What a run leaves: status "finished" (emerged or out of budget) or "diverged", its steps, and its curves.

    curves: step, train_loss (mean since the reading before), test_loss, the task's metrics and what the model observes.
    """

    run: Run
    status: str
    steps: int
    curves: dict[str, list[float]]
    wall_s: float
    device: str


def resolve_device(device: str) -> str:
    """`auto`, `cpu` or `cuda` -> the device to use; InputError if it is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device: {device!r} is not one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for and no CUDA device is visible; use device = 'auto' or 'cpu'")
    return "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device


@contextmanager
def numerics(device: str, tf32: bool):
    """One thread on a CPU, so that a run's rounding does not depend on its neighbours; float32 unless TF32 is asked for."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1 if device == "cpu" else threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _optimizer(training: Training, parameters: dict[str, Tensor]) -> torch.optim.Optimizer:
    tensors = list(parameters.values())
    if training.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=training.learning_rate)
    if training.optimizer == "adam":
        return torch.optim.Adam(tensors, lr=training.learning_rate, fused=True)
    return torch.optim.AdamW(tensors, lr=training.learning_rate, weight_decay=training.weight_decay, fused=True)


def _keep(optimizer, parameters: dict[str, Tensor], members: Tensor) -> dict[str, Tensor]:
    """Close the batch up: only `members` (indices) go on, with their optimiser state."""
    kept, state = {}, {}
    for name, old in parameters.items():
        kept[name] = old.detach()[members].clone().requires_grad_()
        state[kept[name]] = {k: v[members] if v.shape == old.shape else v for k, v in optimizer.state.pop(old, {}).items()}
    optimizer.param_groups[0]["params"] = list(kept.values())
    optimizer.state.update(state)
    return kept


def _answers(task, model, parameters, batch: Batch) -> Tensor:
    """The model's outputs at the positions that the task reads: (member, batch, read, output)."""
    return model.forward(parameters, batch.inputs, task.reads, pattern=batch.pattern)


@torch.no_grad()
def _evaluate(task, model, parameters, constants, held_out: Batch) -> dict[str, list[float]]:
    parts = zip(*(t.split(EVAL_CHUNK, 1) for t in held_out), strict=True)
    outputs = torch.cat([_answers(task, model, parameters, Batch(*part)) for part in parts], 1)
    measured = {"test_loss": task.loss(outputs, held_out.targets).mean(1)}
    measured |= task.metrics(outputs, held_out.targets) | model.observe(task, parameters, constants)
    return {name: values.tolist() for name, values in measured.items()}


def train(runs: Sequence[Run], device: str = "cpu", visit: Visit | None = None) -> list[Result]:
    """Train runs that differ in seeds alone; returns their results in order. Data are made as they are needed.

    A member ends by itself, when its test loss has been below `stop_below` for its tail, when it is not finite, or with
    the budget; the others go on as if it had never been there. `visit` is called at each reading.
    """
    if len({run.alike for run in runs}) != 1:
        raise InputError("train: runs that share a batch may differ in their seeds alone; give them to lib.sweep")
    task, model, training = runs[0].task, runs[0].model, runs[0].training
    device = resolve_device(device)
    with numerics(device, training.tf32):
        seeds = {k: torch.tensor([run.seeds[k] for run in runs], device=device) for k in runs[0].seeds}
        constants = task.constants(seeds["data"])
        parameters = {k: v.requires_grad_() for k, v in model.init(task, seeds["init"]).items()}
        optimizer = _optimizer(training, parameters)
        held_out = task.batch(constants, streams.key(seeds["eval"], "test"), training.eval_size, train=False)
        readings = training.evaluations()
        curves: list[dict[str, list[float]]] = [{"step": [], "train_loss": []} for _ in runs]
        ends: list[int | None] = [None] * len(runs)  # where a member that has emerged may stop
        results: list[Result | None] = [None] * len(runs)
        alive, step, started = list(range(len(runs))), 0, time.perf_counter()
        for reading in readings:
            total = torch.zeros(len(alive), device=device)
            first = step
            while step < reading:
                step += 1
                if training.warmup:
                    optimizer.param_groups[0]["lr"] = training.learning_rate * min(1.0, step / training.warmup)
                batch = task.batch(constants, streams.key(seeds["data"], "train", step), training.batch)
                loss = task.loss(_answers(task, model, parameters, batch), batch.targets).mean(1)
                optimizer.zero_grad()
                loss.sum().backward()
                optimizer.step()
                total += loss.detach()
            measured = _evaluate(task, model, parameters, constants, held_out)
            measured["train_loss"] = (total / (step - first)).tolist() if step else [math.nan] * len(alive)
            if visit:
                visit(step, {name: value.detach() for name, value in parameters.items()}, constants)
            stay = []
            for place, member in enumerate(alive):
                values = {k: v[place] for k, v in measured.items()}
                curves[member]["step"].append(step)
                for name, value in values.items():
                    curves[member].setdefault(name, []).append(value)
                diverged = not math.isfinite(values["test_loss"])
                below = training.stop_below is not None and values["test_loss"] <= training.stop_below
                if below and ends[member] is None:
                    ends[member] = math.ceil(step * (1 + training.tail))
                if diverged or step == training.steps or (ends[member] is not None and step >= ends[member]):
                    wall = time.perf_counter() - started
                    status = "diverged" if diverged else "finished"
                    results[member] = Result(runs[member], status, step, curves[member], wall, device)
                else:
                    stay.append(place)
            if not stay:
                break
            if len(stay) < len(alive):
                members = torch.tensor(stay, device=device)
                parameters = _keep(optimizer, parameters, members)
                constants = {k: v[members] for k, v in constants.items()}
                seeds = {k: v[members] for k, v in seeds.items()}
                held_out = Batch(*(t[members] for t in held_out))
                alive = [alive[place] for place in stay]
    return results
