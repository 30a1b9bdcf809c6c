"""Looking into attention: how sharp it is, how near to the true pattern, and what changes when a head is taken away.

Everything works on patterns (member, batch, head, query, position), as a model hands them to a *tap*, and on a
*forward*: any model with attention, bound to its parameters and to one batch. Queries are the last positions: a last
layer that is read at few positions has fewer queries than there are positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import hypergeom
from torch import Tensor

from lib import streams
from lib.config import InputError
from lib.models.transformer import Tap
from lib.run import Run
from lib.tasks.base import Batch
from lib.train import numerics, resolve_device, train

Forward = Callable[[Tap], Tensor]  # a tap for every layer's pattern -> the outputs
Head = tuple[int, int]  # (layer, head), both from 0
Patterns = dict[int, Tensor]  # layer -> pattern
MOST_SETS = 50_000  # that `shortest` tries at a time


# ------------------------------------------------------------------------------------------------- measures of a pattern
def entropy(pattern: Tensor) -> Tensor:
    """Entropy of each query's attention, nats: (member, batch, head, query). Uniform over n positions: ln n."""
    return torch.special.entr(pattern).sum(-1)


def mass(pattern: Tensor, target: Tensor) -> Tensor:
    """Attention on the positions of `target`, bool (member, batch, query, position): (member, batch, head, query)."""
    return (pattern * target[:, :, None]).sum(-1)


def overlap(pattern: Tensor, target: Tensor) -> Tensor:
    """Share of a query's s true positions among its s most attended ones: (member, batch, head, query).

    `target` is bool (member, batch, query, position); s is counted a query, NaN where it is 0. Among equals the earlier
    position counts as the more attended. Where the true pattern is one for all sequences, give their mean pattern,
    `pattern.mean(1, keepdim=True)`: that is what `chance_overlap` holds for.
    """
    size = target.sum(-1)[:, :, None]
    rank = pattern.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return ((rank < size[..., None]) & target[:, :, None]).sum(-1) / size


def chance_overlap(visible, size, heads: int = 1) -> np.ndarray:
    """Expected overlap of the best of `heads` independent random choices of `size` out of `visible` positions.

    E[max] / s = sum over k of P(max >= k) / s with the hypergeometric law of one choice; size / visible for one head.
    Arrays of sizes broadcast.
    """
    visible, size = (np.asarray(x)[..., None] for x in np.broadcast_arrays(visible, size))
    if heads < 1 or (size < 1).any() or (size > visible).any():
        raise InputError("chance_overlap: needs 1 <= size <= visible and heads >= 1")
    hits = np.arange(size.max())
    reached = 1 - hypergeom.cdf(hits, visible, size, size) ** heads  # P(max > hits)
    return np.where(hits < size, reached, 0).sum(-1) / size[..., 0]


def above_chance(value, chance):
    """0 at chance, 1 for a perfect score."""
    return (value - chance) / (1 - chance)


def score(pattern: Tensor, target: Tensor) -> Tensor:
    """Mean attention on `target` over the queries that have any: (member, head), NaN where none has."""
    counted = target.any(-1)[:, :, None]
    return (mass(pattern, target) * counted).sum((1, 3)) / counted.sum((1, 3))


def _last(target: Tensor, pattern: Tensor) -> Tensor:
    """The rows of `target` (..., position, position) that belong to the pattern's queries."""
    return target[..., target.shape[-2] - pattern.shape[-2] :, :]


def previous_token(pattern: Tensor) -> Tensor:
    """Mean attention on the position just before the query: (member, head)."""
    length = pattern.shape[-1]
    target = torch.eye(length, dtype=torch.bool, device=pattern.device).roll(-1, 1).tril(-1)
    return score(pattern, _last(target, pattern).expand(*pattern.shape[:2], -1, -1))


def _same_before(tokens: Tensor) -> Tensor:
    """True where an earlier position holds the query's token: (member, batch, query, position)."""
    return (tokens[..., :, None] == tokens[..., None, :]).tril(-1)


def match(pattern: Tensor, tokens: Tensor) -> Tensor:
    """Mean attention on earlier occurrences of the query's own token; tokens (member, batch, position): (member, head)."""
    return score(pattern, _last(_same_before(tokens), pattern))


def induction(pattern: Tensor, tokens: Tensor) -> Tensor:
    """Mean attention on what followed earlier occurrences of the query's token (Olsson et al. 2022): (member, head)."""
    target = _same_before(tokens).roll(1, -1)  # the last column is always False: nothing wraps round
    return score(pattern, _last(target, pattern))


# ------------------------------------------------------------------------------------------------- measures of an answer
def shortest(A: np.ndarray) -> list[np.ndarray]:
    """For each row of a linear map, the smallest sets of tokens whose parity is that bit: bool (solution, position).

    Earlier outputs are tokens, too: bit i is the parity of any k of them together with the inputs in which row i and the
    sum of their rows differ. A set with k of them is no smaller than k, so the search ends soon; InputError if not.
    """
    A = np.asarray(A).astype(np.int64)
    solutions = []
    for i, row in enumerate(A):
        tried, best = [], row.sum()
        for k in range(i + 1):
            if k > best:
                break
            if (sets := math.comb(i, k)) > MOST_SETS:
                raise InputError(f"shortest: too many sets of earlier outputs for a map of S = {len(A)} and these rows")
            earlier = np.zeros((sets, len(A) - 1), np.int64)
            np.put_along_axis(earlier, np.array([*combinations(range(i), k)], np.int64).reshape(sets, k), 1, 1)
            tried.append(np.concatenate([(row + earlier @ A[:-1]) % 2, earlier], axis=1).astype(bool))
            best = min(best, tried[-1].sum(1).min())
        tokens = np.concatenate(tried)
        solutions.append(tokens[tokens.sum(1) == best])
    return solutions


def row_loss(task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy at each read position, mean over the batch, nats: (member, read)."""
    return task.token_loss(outputs, targets).mean(1)


def probability(outputs: Tensor, targets: Tensor) -> Tensor:
    """Probability of the right token: (member, batch, read)."""
    return outputs.softmax(-1).gather(-1, targets[..., None])[..., 0]


@torch.no_grad()
def sensitivity(run: Run, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
    """Share of sequences whose answer changes with the token at one position: (member, read, position).

    The token is replaced by the next one of the vocabulary; for bits, it is flipped. What an answer depends on, whichever
    heads carry it: for a parity 1 at its bits and 0 elsewhere.
    """

    def answers(inputs: Tensor) -> Tensor:
        return run.model.forward(parameters, inputs, run.task.reads, pattern=batch.pattern).argmax(-1)

    before, changes = answers(batch.inputs), []
    for position in range(batch.inputs.shape[-1]):
        inputs = batch.inputs.clone()
        inputs[..., position] = (inputs[..., position] + 1) % run.task.features
        changes.append((answers(inputs) != before).float().mean(1))
    return torch.stack(changes, -1)


# ---------------------------------------------------------------------------------------------------------- intervention
def bind(run: Run, parameters: dict[str, Tensor], batch: Batch) -> Forward:
    """One of the book's own models as a forward."""
    return lambda tap: run.model.forward(parameters, batch.inputs, run.task.reads, pattern=batch.pattern, tap=tap)


@torch.no_grad()
def record(forward: Forward) -> tuple[Tensor, Patterns]:
    """The outputs and every layer's pattern."""
    patterns: Patterns = {}

    def tap(layer: int, pattern: Tensor) -> Tensor:
        patterns[layer] = pattern
        return pattern

    return forward(tap), patterns


@torch.no_grad()
def _change(forward: Forward, heads: Collection[Head], new: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The outputs when these heads' patterns are those of `new`; InputError for a head that the model lacks."""
    done = set()

    def tap(layer: int, pattern: Tensor) -> Tensor:
        mine = [head for at, head in heads if at == layer and 0 <= head < pattern.shape[2]]
        if not mine:
            return pattern
        done.update((layer, head) for head in mine)
        pattern = pattern.clone()
        pattern[:, :, mine] = new(layer, pattern)[:, :, mine]
        return pattern

    outputs = forward(tap)
    if missing := sorted(set(heads) - done):
        raise InputError(f"head {missing[0]}: the model has no such (layer, head); both count from 0")
    return outputs


def ablate(forward: Forward, heads: Collection[Head]) -> Tensor:
    """The outputs with these heads' patterns set to zero: they add nothing, their value bias included."""
    return _change(forward, heads, lambda layer, pattern: torch.zeros_like(pattern))


def patch(forward: Forward, heads: Collection[Head], patterns: Patterns) -> Tensor:
    """The outputs with these heads' patterns replaced by recorded ones of the same batch, say of another checkpoint."""

    def new(layer: int, pattern: Tensor) -> Tensor:
        if (other := patterns.get(layer)) is None or other.shape != pattern.shape:
            raise InputError(f"patch: layer {layer} needs a recorded pattern of shape {tuple(pattern.shape)}")
        return other

    return _change(forward, heads, new)


def every_head(patterns: Patterns) -> list[Head]:
    """All (layer, head) of a recorded model."""
    return [(layer, head) for layer, pattern in sorted(patterns.items()) for head in range(pattern.shape[2])]


def each_head(forward: Forward, measure: Callable[[Tensor], Tensor], patterns: Patterns | None = None) -> dict[Head, Tensor]:
    """What `measure` says of the outputs when one head at a time is ablated or, given patterns, patched."""
    change = partial(patch, patterns=patterns) if patterns is not None else ablate
    heads = every_head(patterns if patterns is not None else record(forward)[1])
    return {head: measure(change(forward, [head])) for head in heads}


# ----------------------------------------------------------------------------------------------------------- checkpoints
def held_out(run: Run, device: str = "cpu") -> Batch:
    """The held-out sequences on which the run's test loss was read."""
    device = resolve_device(device)
    data, test = (torch.tensor([run.seeds[name]], device=device) for name in ("data", "eval"))
    return run.task.batch(run.task.constants(data), streams.key(test, "test"), run.training.eval_size, train=False)


def replay(run: Run, steps: Sequence[int] | None = None, device: str = "cpu") -> dict[int, dict[str, Tensor]]:
    """Train a run again, as far as is asked, and hand over its parameters after these steps, in order.

    The steps must be among those at which the test loss is read, `run.training.evaluations()`; None: all of them. A
    finished run keeps its curves and not its weights; a run is cheap to repeat, and is bit-equal on the same machine.
    """
    readings = run.training.evaluations()
    wanted = set(readings if steps is None else steps)
    if strange := sorted(wanted - set(readings)):
        near = min(readings, key=lambda reading: abs(reading - strange[0]))
        raise InputError(f"steps: nothing is read at step {strange[0]}; the nearest reading is at {near}")
    kept: dict[int, dict[str, Tensor]] = {}

    def visit(step: int, parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> None:
        if step in wanted:
            kept[step] = {name: value.clone() for name, value in parameters.items()}

    budget = run.training.model_copy(update={"steps": max(wanted)})
    result = train([run.model_copy(update={"training": budget})], device, visit)[0]
    if steps is not None and wanted - set(kept):
        raise InputError(f"steps: the run ended at step {result.steps}, before {max(wanted)}")
    return kept


class Reading(NamedTuple):
    """A run at one step: its parameters, and its outputs and patterns on the held-out sequences."""

    parameters: dict[str, Tensor]
    outputs: Tensor
    patterns: Patterns


def watch(run: Run, steps: Sequence[int] | None = None, device: str = "cpu") -> dict[int, Reading]:
    """`replay`, with what the model then does on the run's held-out sequences: step -> reading."""
    device = resolve_device(device)
    batch, kept = held_out(run, device), replay(run, steps, device)
    with numerics(device, run.training.tf32):
        return {step: Reading(p, *record(bind(run, p, batch))) for step, p in kept.items()}
