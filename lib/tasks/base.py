"""What the model and the training loop ask of a task.

Every task has
    length      positions of the input
    reads       range of positions at which the answer is read; the loss is their mean
    features    input numbers a position; for tokens how many there are, one-hot
    outputs     numbers (regression) or logits (tokens) a read position
    chance_loss what knowing nothing attains
    constants(seeds), batch(constants, key, size, train=), loss(outputs, targets), metrics(outputs, targets)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config


class Batch(NamedTuple):
    """Sequences with their answers.

    inputs   (member, batch, position, feature) float32, or (member, batch, position) int64 tokens
    targets  (member, batch, read, output) float32, or (member, batch, read) int64 tokens
    pattern  (member, batch, read, position) bool: the positions that hold the answer, the attention to be found
    """

    inputs: Tensor
    targets: Tensor
    pattern: Tensor


class TokenTask(Config):
    """A task whose answers are tokens: cross-entropy and accuracy."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of a sequence's answers, nats. Shapes: (member, batch, read, token), (member, batch, read) -> (member, batch)."""
        return self.token_loss(outputs, targets).mean(-1)

    def token_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each answer, nats: (member, batch, read)."""
        return F.cross_entropy(outputs.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`accuracy` over all that is read. Averages over the batch, each (member,)."""
        return {"accuracy": (outputs.argmax(-1) == targets).float().mean((1, 2))}


class StateSequence(TokenTask):
    """`states` states of S tokens each, flattened; every token from the second state on is predicted."""

    @property
    def length(self) -> int:
        """Positions of the input: all tokens but the last, which is only ever predicted."""
        return self.states * self.S - 1

    @property
    def reads(self) -> range:
        """Positions from which a token of the second state or later is predicted."""
        return range(self.S - 1, self.length)


def one_sequence(task, seed: int = 0) -> Batch:
    """One test sequence without the member and batch axes: what the docstrings show."""
    from lib import streams

    seeds = torch.tensor([seed])
    batch = task.batch(task.constants(seeds), streams.key(seeds, "example"), 1, train=False)
    return Batch(*(t[0, 0] for t in batch))
