"""The one training loop: members that differ in their seeds alone, side by side, until each has emerged or used its budget."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lib import streams
from lib.config import InputError
from lib.run import Run, Training
from lib.tasks.base import Batch

IDLE = {"cpu": 0.0, "cuda": 0.25}  # share of members that may have ended before the batch closes up: a GPU captures anew
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
    tensors, t = list(parameters.values()), training
    on_gpu = tensors[0].is_cuda
    if t.optimizer == "sgd":  # reads its rate on the host: with a warm-up the gradients are scaled instead
        return torch.optim.SGD(tensors, lr=1.0 if t.warmup else t.learning_rate)
    rate = torch.tensor(t.learning_rate, device=tensors[0].device) if on_gpu and t.warmup else t.learning_rate
    kind, decay = (torch.optim.Adam, {}) if t.optimizer == "adam" else (torch.optim.AdamW, {"weight_decay": t.weight_decay})
    return kind(tensors, lr=rate, fused=True, capturable=on_gpu, **decay)


def _answers(task, model, parameters, batch: Batch) -> Tensor:
    """The model's outputs at the positions that the task reads: (member, batch, read, output)."""
    return model.forward(parameters, batch.inputs, task.reads, pattern=batch.pattern)


class Steps:
    """Takes optimiser steps of all members; on a GPU the step is captured once and replayed without the host.

    The step's number lives on the device, since the data depend on it. `total` (member,) sums the training losses.
    """

    EAGER = 3  # before a capture; they are steps like any other

    def __init__(self, task, model, training: Training, seeds, constants, parameters, step: int):
        self.task, self.model, self.training = task, model, training
        self.seeds, self.constants, self.parameters = seeds, constants, parameters
        self.optimizer = _optimizer(training, parameters)
        self.step = torch.tensor(step, device=seeds["data"].device)
        self.total = torch.zeros(len(seeds["data"]), device=self.step.device)
        self.taken, self.graph = 0, None

    def take(self) -> None:
        """One step."""
        if not self.step.is_cuda:
            self._advance()
        elif self.graph:
            self.graph.replay()
        elif self.taken < self.EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
                self._advance()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self.graph = self._capture()
            self.graph.replay()  # a capture runs nothing
        self.taken += 1

    def _capture(self):
        torch.cuda.empty_cache()  # a graph has a memory pool of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._advance()
        except RuntimeError as error:  # to end a capture that ran out of memory is another error
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        return graph

    def _advance(self) -> None:
        training, group = self.training, self.optimizer.param_groups[0]
        self.step += 1
        if training.warmup and self.step.is_cuda:
            rate = (self.step / training.warmup).clamp(max=1.0) * training.learning_rate
        elif training.warmup:
            rate = training.learning_rate * min(1.0, self.step.item() / training.warmup)
        if training.warmup and training.optimizer != "sgd":
            group["lr"] = group["lr"].copy_(rate) if self.step.is_cuda else rate
        batch = self.task.batch(self.constants, streams.key(self.seeds["data"], "train", self.step), training.batch)
        loss = self.task.loss(_answers(self.task, self.model, self.parameters, batch), batch.targets).mean(1)
        self.optimizer.zero_grad()
        loss.sum().backward()
        if training.warmup and training.optimizer == "sgd":
            torch._foreach_mul_([p.grad for p in self.parameters.values()], rate)
        self.optimizer.step()
        self.total += loss.detach()

    def keep(self, members: Tensor) -> Steps:
        """The same, of these members (indices) alone: the batch closes up."""
        taken_from, self.graph = self.optimizer, None
        parameters = {k: v.detach()[members].clone().requires_grad_() for k, v in self.parameters.items()}
        seeds, constants = ({k: v[members] for k, v in d.items()} for d in (self.seeds, self.constants))
        kept = Steps(self.task, self.model, self.training, seeds, constants, parameters, self.step.item())
        for name, old in self.parameters.items():
            state = taken_from.state[old]
            kept.optimizer.state[parameters[name]] = {k: v[members] if v.shape == old.shape else v for k, v in state.items()}
        return kept


@torch.no_grad()
def _evaluate(task, model, parameters, constants, held_out: Batch) -> dict[str, list[float]]:
    parts = zip(*(t.split(EVAL_CHUNK, 1) for t in held_out), strict=True)
    outputs = torch.cat([_answers(task, model, parameters, Batch(*part)) for part in parts], 1)
    measured = {"test_loss": task.loss(outputs, held_out.targets).mean(1)}
    measured |= task.metrics(outputs, held_out.targets) | model.observe(task, parameters, constants)
    return {name: values.tolist() for name, values in measured.items()}


def _weights(run: Run, seeds: Tensor) -> dict[str, Tensor]:
    """Every member's initial weights, moved a little where the run asks for it. Shapes: seeds (member,)."""
    parameters = run.model.init(run.task, seeds)
    if not run.training.perturb:
        return parameters
    kicks = {k: streams.normal(streams.key(seeds, f"perturb {k}"), v.shape[1:]) * streams.NORMAL for k, v in parameters.items()}
    return {k: v * (1 + run.training.perturb * kicks[k]) for k, v in parameters.items()}


def start(runs: Sequence[Run], device: str) -> Steps:
    """Runs that differ in seeds alone, before their first step."""
    task, model, training = runs[0].task, runs[0].model, runs[0].training
    seeds = {k: torch.tensor([run.seeds[k] for run in runs], device=device) for k in runs[0].seeds}
    parameters = {k: v.requires_grad_() for k, v in _weights(runs[0], seeds["init"]).items()}
    return Steps(task, model, training, seeds, task.constants(seeds["data"]), parameters, 0)


def train(
    runs: Sequence[Run], device: str = "cpu", visit: Visit | None = None, done: Callable[[Result], None] | None = None
) -> list[Result]:
    """Train runs that differ in seeds alone; returns their results in order. Data are made as they are needed.

    A member ends by itself, when its test loss has been below `stop_below` for its tail, when it is not finite, or with
    the budget; the others go on as if it had never been there. `visit` is called at each reading, `done` with each
    result as soon as it is there.
    """
    if len({run.alike for run in runs}) != 1:
        raise InputError("train: runs that share a batch may differ in their seeds alone; give them to lib.sweep")
    task, model, training = runs[0].task, runs[0].model, runs[0].training
    device = resolve_device(device)
    with numerics(device, training.tf32):
        steps = start(runs, device)
        held_out = task.batch(steps.constants, streams.key(steps.seeds["eval"], "test"), training.eval_size, train=False)
        curves: list[dict[str, list[float]]] = [{"step": [], "train_loss": []} for _ in runs]
        ends: list[int | None] = [None] * len(runs)  # where a member that has emerged may stop
        results: list[Result | None] = [None] * len(runs)
        stack, step, started = list(range(len(runs))), 0, time.perf_counter()
        for reading in training.evaluations():
            steps.total.zero_()
            before, step = step, reading
            for _ in range(before, step):
                steps.take()
            measured = _evaluate(task, model, steps.parameters, steps.constants, held_out)
            measured["train_loss"] = (steps.total / (step - before)).tolist() if step else [math.nan] * len(stack)
            if visit:
                visit(step, {name: value.detach() for name, value in steps.parameters.items()}, steps.constants)
            stay = []
            for place, member in enumerate(stack):
                if results[member]:
                    continue
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
                    if done:
                        done(results[member])
                else:
                    stay.append(place)
            if not stay:
                break
            if len(stack) - len(stay) > IDLE[device] * len(stack):
                members = torch.tensor(stay, device=device)
                steps = steps.keep(members)
                held_out = Batch(*(t[members] for t in held_out))
                stack = [stack[place] for place in stay]
    return results
