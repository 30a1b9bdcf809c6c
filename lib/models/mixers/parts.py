"""What several mixers are made of: the scan of a diagonal linear recurrence, a short convolution, norms of a head."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def scan(decay: Tensor, x: Tensor, size: int = 0) -> Tensor:
    """s_t = decay_t s_(t-1) + x_t, from s = 0, elementwise. Shapes: decay and x (member, batch, position, ...) -> the same.

    Chunks of `size` positions are run side by side, then what enters each is carried through: with the default on a
    GPU, the square root of the length, that is about 3 sqrt(length) operations, and no division by a product of decays.
    On a CPU, where a pass over memory costs more than a call, the default is one chunk. The gradient is the same
    recurrence backwards in time, so that nothing but the decays and states is kept for it.
    """
    return _Scan.apply(*torch.broadcast_tensors(decay, x), size or chunk(x))


def chunk(x: Tensor) -> int:
    """The default `size` of `scan`."""
    return x.shape[2] if x.device.type == "cpu" else math.isqrt(x.shape[2] - 1) + 1


def scan_sequential(decay: Tensor, x: Tensor) -> Tensor:
    """The recurrence of `scan`, one position after the other."""
    decay, x = torch.broadcast_tensors(decay, x)
    state, states = torch.zeros_like(x[:, :, 0]), []
    for t in range(x.shape[2]):
        state = decay[:, :, t] * state + x[:, :, t]
        states.append(state)
    return torch.stack(states, 2)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, decay, x, size):
        states = run_forwards(decay, x.clone(memory_format=torch.contiguous_format), size)
        ctx.size = size
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        decay, states = ctx.saved_tensors
        to_x = run_backwards(decay, gradient.clone(memory_format=torch.contiguous_format), ctx.size)
        to_decay = torch.zeros_like(to_x)
        torch.mul(to_x[:, :, 1:], states[:, :, :-1], out=to_decay[:, :, 1:])
        return to_decay, to_x, None


def run_forwards(decay: Tensor, x: Tensor, size: int) -> Tensor:
    """The states of `scan`, without a gradient; x, which they may overwrite, and decay have one shape."""
    if size < x.shape[2]:
        return _in_chunks(decay, x, size)
    for t in range(1, x.shape[2]):
        x[:, :, t].addcmul_(decay[:, :, t], x[:, :, t - 1])
    return x


def run_backwards(decay: Tensor, gradient: Tensor, size: int) -> Tensor:
    """The gradient in x from that in the states of `scan`, which it may overwrite."""
    if size < decay.shape[2]:
        later = torch.cat([decay[:, :, 1:], torch.zeros_like(decay[:, :, :1])], 2)
        return _in_chunks(later.flip(2), gradient.flip(2), size).flip(2)
    for t in range(decay.shape[2] - 1, 0, -1):
        gradient[:, :, t - 1].addcmul_(decay[:, :, t], gradient[:, :, t])
    return gradient


def _in_chunks(decay: Tensor, x: Tensor, size: int) -> Tensor:
    length = x.shape[2]
    chunks = -(-length // size)
    states, since = (t.new_zeros(*t.shape[:2], chunks * size, *t.shape[3:]) for t in (x, decay))
    states[:, :, :length], since[:, :, :length] = x, decay
    states, since = (t.unflatten(2, (chunks, size)) for t in (states, since))
    for i in range(1, size):
        states[:, :, :, i].addcmul_(since[:, :, :, i], states[:, :, :, i - 1])
        since[:, :, :, i].mul_(since[:, :, :, i - 1])  # the product of the decays since the chunk began
    for j in range(1, chunks):
        states[:, :, j].addcmul_(since[:, :, j], states[:, :, j - 1, -1:])
    return states.flatten(2, 3)[:, :, :length]


def shift(x: Tensor) -> Tensor:
    """Each position's predecessor, zero for the first. Shapes: (member, batch, position, ...) -> the same."""
    return torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :-1]], 2)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal convolution of every channel with a few taps, the last of which is the present.

    Shapes: x (member, batch, position, channel), weight (member, tap, channel), bias (member, channel) -> as x.
    """
    return _Convolution.apply(x, weight, torch.zeros_like(weight[:, 0]) if bias is None else bias)


class _Convolution(torch.autograd.Function):
    """Its own gradient, since autograd makes a full tensor of every tap and every slice."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        *past, present = weight[:, :, None, None].unbind(1)
        y = torch.addcmul(bias[:, None, None], x, present)
        for ago, tap in _ago(past, x):
            y[:, :, ago:].addcmul_(x[:, :, :-ago], tap)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        *past, present = weight[:, :, None, None].unbind(1)
        to_x, to_weight = gradient * present, torch.zeros_like(weight)
        to_weight[:, -1] = (gradient * x).sum((1, 2))
        for ago, tap in _ago(past, x):
            to_x[:, :, :-ago].addcmul_(gradient[:, :, ago:], tap)
            to_weight[:, -1 - ago] = (gradient[:, :, ago:] * x[:, :, :-ago]).sum((1, 2))
        return to_x, to_weight, gradient.sum((1, 2))


def _ago(past: list[Tensor], x: Tensor):
    """(how many positions ago, its tap), those that the sequence is long enough for."""
    return list(enumerate(reversed(past), 1))[: x.shape[2] - 1]


def to_heads(x: Tensor, heads: int) -> Tensor:
    """(member, batch, position, head x dim) -> (member, batch, head, position, dim)."""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3)


def from_heads(x: Tensor) -> Tensor:
    """(member, batch, head, position, dim) -> (member, batch, position, head x dim)."""
    return x.transpose(2, 3).flatten(-2)


def softplus_inverse(y: Tensor) -> Tensor:
    """The x with log(1 + exp(x)) = y > 0."""
    return y + (-torch.expm1(-y)).log()


def log_uniform(u: Tensor, low: float, high: float) -> Tensor:
    """Uniform u in [0, 1) -> a number between low and high, uniform in its logarithm."""
    return low * (high / low) ** u
