"""The linear map over bits (Baherwani et al. 2026): each output bit is the parity of a few input bits."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lib import streams
from lib.tasks.base import Batch, StateSequence


class LinearMap(StateSequence):
    """States x_0, x_1 = A x_0 mod 2, ... flattened to one sequence of bits; next-bit prediction from x_1 on.

    S  bits a state        s  ones in each row of A: the bits that an output depends on
    states  how many states a sequence has
    shared  False: every run draws its own A; True: one A for all runs of this S and s

    Row i of A is the attention pattern that the output bit i needs.

    >>> from lib.tasks.base import one_sequence
    >>> inputs, targets, pattern = one_sequence(LinearMap(S=4, s=2))
    >>> print(inputs.tolist(), "->", targets.tolist())
    [1, 0, 1, 1, 1, 0, 0] -> [1, 0, 0, 0]
    >>> for row in pattern.int().tolist(): print(row)
    [0, 1, 0, 1, 0, 0, 0]
    [0, 0, 1, 1, 0, 0, 0]
    [0, 0, 1, 1, 0, 0, 0]
    [0, 0, 1, 1, 0, 0, 0]
    """

    version: ClassVar[int] = 1
    kind: Literal["linear_map"] = "linear_map"
    S: int = Field(16, ge=1, le=1024)
    s: int = Field(3, ge=1)
    states: int = Field(2, ge=2, le=64)
    shared: bool = False

    @model_validator(mode="after")
    def _possible(self):
        if self.s > self.S:
            raise ValueError(f"s: a row of S = {self.S} entries cannot hold {self.s} ones; lower s or raise S")
        return self

    @property
    def features(self) -> int:
        """Bits."""
        return 2

    @property
    def outputs(self) -> int:
        """Logits of an answer."""
        return 2

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of a fair coin."""
        return math.log(2)

    @property
    def degenerate(self) -> bool:
        """s = S: all output bits are one bit repeated, so the previous output answers all but the first."""
        return self.s == self.S

    @property
    def supports(self) -> int:
        """C(S, s): how many rows there are to choose from."""
        return math.comb(self.S, self.s)

    def constants(self, seeds: Tensor) -> dict[str, Tensor]:
        """A (member, S, S) of zeros and ones, float32."""
        keys = streams.key(torch.zeros_like(seeds) if self.shared else seeds, "A")
        ones = streams.choose(keys, (self.S,), self.S, self.s)
        return {"A": torch.zeros(len(seeds), self.S, self.S, device=seeds.device).scatter_(2, ones, 1.0)}

    def batch(self, constants: dict[str, Tensor], key: Tensor, size: int, *, train: bool = True) -> Batch:
        """`size` fresh sequences a member from the stream `key` (member,); training and test data are alike."""
        A = constants["A"]
        x = streams.coins(key, (size, self.S), 0.5).float()
        states = [x]
        for _ in range(self.states - 1):
            states.append((states[-1] @ A.mT).remainder(2))  # sums of at most S ones: exact
        bits = torch.cat(states, -1).long()
        pattern = torch.zeros(len(A), 1, len(self.reads), self.length, dtype=torch.bool, device=A.device)
        for step in range(self.states - 1):
            rows = slice(step * self.S, (step + 1) * self.S)
            pattern[:, 0, rows, rows] = A[..., : pattern[0, 0, rows, rows].shape[-1]].bool()
        return Batch(bits[..., :-1], bits[..., self.S :], pattern.expand(-1, size, -1, -1))

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`accuracy`; `row_i`, the loss of each row of A (averaged over the states); `solved_rows`, the share of rows below 0.01 nats."""
        rows = self.token_loss(outputs, targets).unflatten(-1, (self.states - 1, self.S)).mean((1, 2))
        by_row = {f"row_{i}": rows[:, i] for i in range(self.S)}
        return super().metrics(outputs, targets) | {"solved_rows": (rows < 0.01).float().mean(-1)} | by_row
