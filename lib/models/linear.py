"""A linear map with a leading member axis."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map a member. Shapes: x (member, ..., in), weight (member, in, out), bias (member, out) -> (member, ..., out)."""
    flat = x.flatten(1, -2)
    y = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])
