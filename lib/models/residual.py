"""What flows from block to block: a residual stream as it is, or by way of the little that it is made from.

Each has `length`, `last(n)`, `dense()` and `project(norm, weight, bias)`: norm(x) W + b, made where that is small.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lib.models.linear import linear


def look_up(rows: Tensor, index: Tensor) -> Tensor:
    """Rows of each member. Shapes: rows (member, row, ...), index (member, ...) -> (member, ..., ...)."""
    first = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (index.dim() - 1)) * rows.shape[1]
    return rows.flatten(0, 1).index_select(0, (index + first).flatten()).view(*index.shape, *rows.shape[2:])


class Dense(NamedTuple):
    """A residual stream as it is: x (member, batch, position, model)."""

    x: Tensor

    @property
    def length(self) -> int:
        """Positions."""
        return self.x.shape[2]

    def last(self, n: int) -> Dense:
        """The last n positions."""
        return Dense(self.x[:, :, -n:])

    def dense(self) -> Tensor:
        """(member, batch, position, model)."""
        return self.x

    def project(self, norm, weight: Tensor, bias: Tensor) -> Tensor:
        """norm(x) W + b: (member, batch, position, out)."""
        return linear(norm(self.x), weight, bias)


class Affine(NamedTuple):
    """x = u E + c with few numbers u and no norm behind it.

    u (member, batch, position, feature), weight E (member, feature, model), offset c (member, position, model)
    """

    u: Tensor
    weight: Tensor
    offset: Tensor

    @property
    def length(self) -> int:
        """Positions."""
        return self.u.shape[2]

    def last(self, n: int) -> Affine:
        """The last n positions."""
        return Affine(self.u[:, :, -n:], self.weight, self.offset[:, -n:])

    def dense(self) -> Tensor:
        """(member, batch, position, model)."""
        return linear(self.u, self.weight) + self.offset[:, None]

    def project(self, norm, weight: Tensor, bias: Tensor) -> Tensor:
        """x W + b by way of u (E W) + (c W + b): (member, batch, position, out)."""
        return linear(self.u, torch.bmm(self.weight, weight)) + linear(self.offset, weight, bias)[:, None]


class Table(NamedTuple):
    """x looked up: rows (member, token x position, model) and index (member, batch, position) into them, of `tokens` tokens."""

    rows: Tensor
    index: Tensor
    tokens: int

    @property
    def length(self) -> int:
        """Positions."""
        return self.index.shape[2]

    def last(self, n: int) -> Table:
        """The last n positions."""
        return self._replace(index=self.index[:, :, -n:])

    def dense(self) -> Tensor:
        """(member, batch, position, model)."""
        return self._look_up(self.rows)

    def project(self, norm, weight: Tensor, bias: Tensor) -> Tensor:
        """norm(x) W + b made on the rows, then looked up: (member, batch, position, out)."""
        return self._look_up(linear(norm(self.rows), weight, bias))

    def _look_up(self, rows: Tensor) -> Tensor:
        return look_up(rows, self.index)


@functools.lru_cache(maxsize=16)
def sinusoids(length: int, width: int, device=None) -> Tensor:
    """Sine-cosine position table of Vaswani et al. (2017), section 3.5. Shape (position, model)."""
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
    return table.float().to(device)
