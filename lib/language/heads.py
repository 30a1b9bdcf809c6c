"""What single heads do to an answer: their patterns moved from one checkpoint to another, taken away, or made random.

Works on any `lib.probe.Forward`: the book's Transformer and GPT-NeoX alike. A *measure* makes one number of the outputs,
here the probability of the right word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib import probe, streams
from lib.probe import Forward, Head, Patterns

Measure = Callable[[Tensor], float]


def effects(before: Forward, after: Forward, measure: Measure) -> pd.DataFrame:
    """One row a head: `gain` by its pattern of `after` patched into `before`, `loss` by taking it out of `after`.

    Both are differences of the measure; the columns `before` and `after` are what it is in the two as they are.
    """
    (old, _), (new, patterns) = probe.record(before), probe.record(after)
    base, full = measure(old), measure(new)
    patched = probe.each_head(before, measure, patterns)
    ablated = probe.each_head(after, measure)
    rows = [
        {"layer": layer, "head": head, "gain": patched[layer, head] - base, "loss": full - ablated[layer, head]}
        for layer, head in patched
    ]
    return pd.DataFrame(rows).assign(before=base, after=full)


def best(table: pd.DataFrame, count: int, column: str = "gain") -> list[Head]:
    """The (layer, head) of the `count` largest effects."""
    rows = table.nlargest(count, column)
    return list(zip(rows["layer"].tolist(), rows["head"].tolist(), strict=True))


def random_heads(heads: Sequence[Head], count: int, draws: int, seed: int = 0) -> list[list[Head]]:
    """`draws` sets of `count` different heads each: the control for a set that was chosen."""
    chosen = streams.choose(torch.tensor([seed]), (draws,), len(heads), min(count, len(heads)))[0]
    return [[heads[i] for i in row] for row in chosen.tolist()]


def scattered(patterns: Patterns, seed: int = 0) -> Patterns:
    """The control for a pattern: each query's weights as sharp as they were, at random places that it may look at."""
    moved = {}
    for layer, pattern in patterns.items():
        queries, length = pattern.shape[-2:]
        hidden = ~torch.ones(queries, length, dtype=torch.bool, device=pattern.device).tril(length - queries)
        key = streams.key(torch.tensor([seed], device=pattern.device), "scatter", layer)
        order = streams.uniform(key, tuple(pattern.shape))[0].masked_fill(hidden, 2.0).argsort(-1)
        moved[layer] = pattern.gather(-1, order)
    return moved


def joint(before: Forward, patterns: Patterns, heads: Sequence[Head], measure: Measure) -> float:
    """The measure of `before` with all of these heads' patterns patched in at once."""
    return measure(probe.patch(before, heads, patterns))


def recovery(before: Forward, after: Forward, measure: Measure, count: int = 5, draws: int = 8) -> dict[str, float]:
    """How much of the gain between two checkpoints comes back when patterns of `after` are patched into `before`.

    best       those of the `count` heads with the largest single effects
    all        those of all heads
    others     those of `count` heads drawn from the rest, mean of `draws`: a control
    scattered  those of the best heads, with each weight at a random place, mean of `draws`: a control
    top_share  not of the gain, but the largest single effect over the sum of the positive ones
    NaN where there is no gain.
    """
    new, patterns = probe.record(after)
    base, every = measure(probe.record(before)[0]), probe.every_head(patterns)
    gain = measure(new) - base
    alone = pd.Series(probe.each_head(before, measure, patterns)) - base
    chosen = list(alone.nlargest(count).index)
    rest = [head for head in every if head not in chosen]

    def share(heads: Sequence[Head], of: Patterns = patterns) -> float:
        return (joint(before, of, heads, measure) - base) / gain if gain > 0 else np.nan

    positive = alone.clip(lower=0)
    return {
        "best": share(chosen),
        "all": share(every),
        "others": float(np.mean([share(some) for some in random_heads(rest, count, draws)])) if rest else np.nan,
        "scattered": float(np.mean([share(chosen, scattered(patterns, seed)) for seed in range(draws)])),
        "top_share": positive.max() / positive.sum() if positive.any() else np.nan,
    }


def attended(patterns: Patterns, target: Tensor) -> pd.DataFrame:
    """Mean attention of each head on `target`, bool (member, batch, query, position), over the queries that have any."""
    rows = []
    for layer, pattern in sorted(patterns.items()):
        values = probe.score(pattern, target[..., target.shape[-2] - pattern.shape[-2] :, :]).mean(0)
        rows += [{"layer": layer, "head": head, "attention": value} for head, value in enumerate(values.tolist())]
    return pd.DataFrame(rows)


def roles(patterns: Patterns, tokens: Tensor) -> pd.DataFrame:
    """How much each head is a previous-token head and an induction head; tokens (member, batch, position)."""
    rows = []
    for layer, pattern in sorted(patterns.items()):
        scores = {"previous_token": probe.previous_token(pattern), "induction": probe.induction(pattern, tokens)}
        values = {name: score.mean(0).tolist() for name, score in scores.items()}
        rows += [{"layer": layer, "head": h} | {name: v[h] for name, v in values.items()} for h in range(pattern.shape[2])]
    return pd.DataFrame(rows)


def grid(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of a table of heads as a map (layer, head)."""
    return table.pivot(index="layer", columns="head", values=column).to_numpy()
