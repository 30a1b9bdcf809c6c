"""Mamba: a selective state space (Gu and Dao 2023, section 3 with algorithm 2), with its convolution and gate.

    u = silu(conv(W_u h)),  [r, B, C] = W_x u,  Delta = softplus(W_Delta r + b_Delta)
    s_t = exp(Delta_t A) s_(t-1) + Delta_t B_t u_t,   y_t = W_o ((C_t . s_t + D u_t) silu(W_z h_t))

Each of 2 x width channels has `state` numbers s; A < 0 is diagonal, r has width / 16 entries, the convolution 4 taps.
A starts at -1, ..., -state in every channel, D at one, softplus(b_Delta) between 0.001 and 0.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib import streams
from lib.models.linear import linear
from lib.models.mixers.parts import log_uniform, scan, scan_sequential, short_convolution, softplus_inverse

EXPAND, TAPS = 2, 4


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """W_u and W_z side by side, the convolution, W_x, W_Delta, log(-A), D and W_o."""
    d, inner, rank, n = config.width, EXPAND * config.width, -(-config.width // 16), config.state
    return {
        "mix.in.weight": (d, 2 * inner),
        "mix.conv.weight": (TAPS, inner),
        "mix.conv.bias": (inner,),
        "mix.select.weight": (inner, rank + 2 * n),
        "mix.step.weight": (rank, inner),
        "mix.step.bias": (inner,),
        "mix.log_rate": (inner, n),
        "mix.skip": (inner,),
        "mix.out.weight": (inner, d),
    }


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor | None:
    """A, D and b_Delta; None for the rest."""
    if name == "mix.log_rate":
        return torch.arange(1.0, shape[-1] + 1, device=keys.device).log().repeat(len(keys), shape[0], 1)
    if name == "mix.skip":
        return torch.ones(len(keys), *shape, device=keys.device)
    if name == "mix.step.bias":
        return softplus_inverse(log_uniform(streams.uniform(keys, shape), 1e-3, 1e-1))
    return None


def mix(config, block: dict[str, Tensor], h: Tensor, scan=scan) -> Tensor:
    """By a chunked scan. Shapes: (member, batch, position, model) -> the same; the states have an axis (channel, state)."""
    u, gate = linear(h, block["mix.in.weight"]).chunk(2, -1)
    u = F.silu(short_convolution(u, block["mix.conv.weight"], block["mix.conv.bias"]))
    n = config.state
    low_rank, b, c = linear(u, block["mix.select.weight"]).tensor_split((-2 * n, -n), -1)
    step = F.softplus(linear(low_rank, block["mix.step.weight"], block["mix.step.bias"]))
    rate = -block["mix.log_rate"].exp()[:, None, None]
    states = scan((step[..., None] * rate).exp(), (step * u)[..., None] * b[..., None, :])
    y = (states @ c[..., None]).squeeze(-1) + block["mix.skip"][:, None, None] * u
    return linear(y * F.silu(gate), block["mix.out.weight"])


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    return mix(config, block, h, scan_sequential)
