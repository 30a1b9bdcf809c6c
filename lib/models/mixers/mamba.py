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
from torch.autograd.function import once_differentiable

from lib import streams
from lib.models.linear import linear
from lib.models.mixers.parts import (
    chunk,
    log_uniform,
    run_backwards,
    run_forwards,
    scan_sequential,
    short_convolution,
    softplus_inverse,
)

EXPAND, TAPS = 2, 4
PIECE = 1 << 19  # states whose tensors, 2 MiB each, a core's share of the cache holds


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


def selective_scan(step: Tensor, u: Tensor, b: Tensor, c: Tensor, rate: Tensor) -> Tensor:
    """y_t = c_t . s_t with s_t = exp(step_t rate) s_(t-1) + step_t u_t b_t, from s = 0.

    Shapes: step and u (member, batch, position, channel), b and c (member, batch, position, state),
    rate (member, state, channel) -> as u. On a CPU it goes through pieces of the batch whose states stay in cache.
    """
    return _SelectiveScan.apply(step, u, b, c, rate)


def selective_scan_sequential(step: Tensor, u: Tensor, b: Tensor, c: Tensor, rate: Tensor) -> Tensor:
    """The same, one position after the other."""
    decay, drive = (step[..., None, :] * rate[:, None, None]).exp(), (step * u)[..., None, :] * b[..., None]
    return (c[..., None, :] @ scan_sequential(decay, drive)).squeeze(-2)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, u, b, c, rate):
        rate, y, kept = rate[:, None, None].contiguous(), torch.empty_like(u), []
        for step_, u_, b_, c_, y_ in _pieces(step, u, b, c, y):
            decay = (step_[..., None, :] * rate).exp_()
            states = run_forwards(decay, (step_ * u_)[..., None, :] * b_[..., None], chunk(step))
            y_.copy_((c_[..., None, :] @ states).squeeze(-2))
            kept += [decay, states]
        ctx.save_for_backward(step, u, b, c, rate, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        step, u, b, c, rate, *kept = ctx.saved_tensors
        to_step, to_u, to_b, to_c = (torch.empty_like(t) for t in (step, u, b, c))
        to_rate = torch.zeros_like(rate[:, 0, 0])
        pieces = _pieces(step, u, b, c, gradient, to_step, to_u, to_b, to_c)
        for piece, decay, states in zip(pieces, kept[::2], kept[1::2], strict=True):
            step_, u_, b_, c_, gradient_, to_step_, to_u_, to_b_, to_c_ = piece
            torch.sum(states * gradient_[..., None, :], -1, out=to_c_)
            to_drive = run_backwards(decay, gradient_[..., None, :] * c_[..., None], chunk(step))
            torch.sum(to_drive * (step_ * u_)[..., None, :], -1, out=to_b_)
            to_product = (b_[..., None, :] @ to_drive).squeeze(-2)
            torch.mul(to_product, step_, out=to_u_)
            torch.mul(to_product, u_, out=to_step_)
            to_exponent = (to_drive[:, :, 1:] * decay[:, :, 1:]).mul_(states[:, :, :-1])
            to_step_[:, :, 1:] += (to_exponent * rate).sum(-2)
            to_rate += to_exponent.mul_(step_[:, :, 1:, None, :]).sum((1, 2))
        return to_step, to_u, to_b, to_c, to_rate


def _pieces(step: Tensor, u: Tensor, b: Tensor, *others: Tensor):
    """The tensors, a piece of the batch at a time: of PIECE states on a CPU, all of it on a GPU."""
    members, batch, length, channels = step.shape
    size = batch if step.is_cuda else max(1, PIECE // (members * length * channels * b.shape[-1]))
    return zip(*(t.split(size, 1) for t in (step, u, b, *others)), strict=True)


def mix(config, block: dict[str, Tensor], h: Tensor, scan=selective_scan) -> Tensor:
    """Shapes: (member, batch, position, model) -> the same; the states have an axis (state, channel)."""
    u, gate = linear(h, block["mix.in.weight"]).chunk(2, -1)
    u = F.silu(short_convolution(u, block["mix.conv.weight"], block["mix.conv.bias"]))
    n = config.state
    low_rank, b, c = linear(u, block["mix.select.weight"]).tensor_split((-2 * n, -n), -1)
    step = F.softplus(linear(low_rank, block["mix.step.weight"], block["mix.step.bias"]))
    y = scan(step, u, b, c, -block["mix.log_rate"].exp().mT) + block["mix.skip"][:, None, None] * u
    return linear(y * F.silu(gate), block["mix.out.weight"])


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    return mix(config, block, h, selective_scan_sequential)
