"""Single-location linear regression (Zucchet et al. 2025, section 2): one token of the sequence decides the answer."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lib import streams
from lib.config import Config
from lib.tasks.base import Batch

WEIGHT_GRID = 2.0**20  # W* lives on a grid of 2^-20, so that W* x is exact in float64 in any order of summation


class SingleLocation(Config):
    """Tokens x_t ~ N(0, I/d); the target is W* x_r with r the relevant position.

    T  sequence length                      d  token dimension
    B  copies of the relevant token in the sequence (in-context repetition)
    p  probability that the relevant token is the fixed unit vector x~ (cross-sample repetition; training data only)
    feature   a further input number, 1 where the token is relevant and 0 elsewhere
    position  "random": r uniform, fresh for every sequence; "fixed": the last B positions always, as in the toy model;
              "first": the first B. A Transformer that is read at the last position needs no attention to see a token
              there, its residual stream holds it; to make it look, fix the token at the first.

    One sequence of T = 3 tokens in d = 2, the last number being the relevance feature:

    >>> task = SingleLocation(T=3, d=2)
    >>> seeds = torch.tensor([0])
    >>> batch = task.batch(task.constants(seeds), streams.key(seeds, "example"), 1)
    >>> for token in batch.inputs[0, 0]: print([round(x, 2) for x in token.tolist()])
    [-0.88, 0.42, 0.0]
    [-0.83, -0.58, 1.0]
    [1.06, 0.32, 0.0]
    >>> print(batch.pattern[0, 0, 0].int().tolist(), [round(y, 2) for y in batch.targets[0, 0, 0].tolist()])
    [0, 1, 0] [-0.67, 0.78]
    """

    version: ClassVar[int] = 1
    kind: Literal["single_location"] = "single_location"
    T: int = Field(64, ge=1, le=1 << 20)
    d: int = Field(16, ge=1, le=4096)
    B: int = Field(1, ge=1)
    p: float = Field(0.0, ge=0, le=1)
    feature: bool = True
    position: Literal["random", "fixed", "first"] = "random"

    @model_validator(mode="after")
    def _possible(self):
        if self.B > self.T:
            raise ValueError(f"B: {self.B} copies do not fit into T = {self.T} positions; lower B or raise T")
        if self.position == "random" and not self.feature:
            raise ValueError(
                "feature: false with position = 'random' is unsolvable, nothing tells which token is relevant; "
                "set feature = true, or position = 'fixed' or 'first'"
            )
        return self

    @property
    def length(self) -> int:
        """Positions in a sequence."""
        return self.T

    @property
    def reads(self) -> range:
        """The last position."""
        return range(self.T - 1, self.T)

    @property
    def features(self) -> int:
        """Input numbers a token."""
        return self.d + self.feature

    @property
    def outputs(self) -> int:
        """Output numbers at the read-out position."""
        return self.d

    @property
    def chance_loss(self) -> float:
        """Loss of answering 0: half the mean squared norm of the target."""
        return 0.5

    @property
    def uniform_attention_loss(self) -> float:
        """Least loss that attention to all positions alike permits: 1 - R² = (T - B) / (T - B + B²) of chance."""
        return 0.5 * (self.T - self.B) / (self.T - self.B + self.B**2)

    def constants(self, seeds: Tensor) -> dict[str, Tensor]:
        """What a run keeps: W* (member, d, d) float64 with unit-norm columns, and x~ (member, d) on the integer grid."""
        w = streams.normal(streams.key(seeds, "W*"), (self.d, self.d)).double()
        w = torch.round(w / w.norm(dim=1, keepdim=True).clamp(min=1) * WEIGHT_GRID) / WEIGHT_GRID
        x = streams.normal(streams.key(seeds, "x~"), (self.d,)).double()
        x = torch.round(x / x.norm(dim=1, keepdim=True).clamp(min=1) * math.sqrt(self.d) / streams.NORMAL)
        return {"W*": w, "x~": x.int()}

    def batch(self, constants: dict[str, Tensor], key: Tensor, size: int, *, train: bool = True) -> Batch:
        """`size` fresh sequences a member from the stream `key` (member,); test data (train=False) have p = 0."""
        scale = streams.NORMAL / math.sqrt(self.d)
        members = len(key)
        x = streams.normal(key, (size, self.T, self.d))
        if self.position != "random":
            start = 0 if self.position == "first" else self.T - self.B
            relevant = torch.arange(start, start + self.B, device=key.device).expand(members, size, self.B)
        else:
            relevant = streams.choose(streams.key(key, "relevant"), (size,), self.T, self.B)
        answer = x.gather(2, relevant[:, :, :1, None].expand(-1, -1, 1, self.d))
        if train and self.p > 0:
            repeated = streams.coins(streams.key(key, "repeat"), (size, 1, 1), self.p)
            answer = torch.where(repeated, constants["x~"][:, None, None], answer)
        where = relevant[..., None]
        x.scatter_(2, where.expand(-1, -1, -1, self.d), answer.expand(-1, -1, self.B, -1))
        inputs = torch.empty(members, size, self.T, self.features, device=key.device)
        torch.mul(x, scale, out=inputs[..., : self.d])
        pattern = torch.zeros(members, size, self.T, dtype=torch.bool, device=key.device).scatter_(2, relevant, True)
        if self.feature:
            inputs[..., self.d] = pattern
        targets = (answer[:, :, 0].double() @ constants["W*"].mT * scale).float()
        return Batch(inputs, targets[:, :, None], pattern[:, :, None])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error a sequence. Shapes: (member, batch, 1, d) twice -> (member, batch)."""
        return 0.5 * (outputs - targets).square().sum((-2, -1))

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Nothing beyond the loss."""
        return {}
