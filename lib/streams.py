"""Random numbers that depend on (seed, name, step) alone, bit-equal on every device and in every grouping of runs.

A library generator is stateful (torch, numpy) or gives other bits on another device (torch), so this is ours: the
counter-based SplitMix64 of Steele, Lea and Flood (OOPSLA 2014), written in integer tensor operations, which are exact
everywhere. Real variates are integers on a fixed grid, so that sums of their products are exact in float64, too.

Shapes: a *key* is an int64 tensor with the leading `member` axis; every draw adds axes behind it.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

GAMMA, MIX_1, MIX_2 = (
    c - (1 << 64) if c >> 63 else c for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
MASK = (1 << 64) - 1
CACHE = 1 << 15  # words mixed at a time on a CPU: the operand and its scratch stay in the second-level cache
GRID = 1 << 16  # normal variates are integers: standard deviation GRID * sqrt(2), at most 20 bits
NORMAL = 1 / (GRID * math.sqrt(2))  # multiply `normal` by this for unit variance


def _shift(z: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. On a CPU by numpy, whose calls cost less and whose shifts are logical."""
    if z.device.type != "cpu":
        z ^= _shift(z, 30)
        z *= MIX_1
        z ^= _shift(z, 27)
        z *= MIX_2
        z ^= _shift(z, 31)
        return z
    words = z.view(-1).numpy().view(np.uint64)
    for start in range(0, len(words), CACHE):
        part = words[start : start + CACHE]
        part ^= part >> 30
        part *= MIX_1 & MASK
        part ^= part >> 27
        part *= MIX_2 & MASK
        part ^= part >> 31
    return z


def key(seeds: Tensor, name: str, step: int | Tensor = 0) -> Tensor:
    """The key of stream `name` at `step` for each member's seed. Shapes: seeds (member,) int64 -> (member,) int64."""
    label = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    return _mix(_mix(_mix(seeds * GAMMA + label) + step) + label)


def bits(key: Tensor, n: int) -> Tensor:
    """n words of 64 random bits a member. Shapes: (member,) -> (member, n) int64."""
    gamma = _mix(key * GAMMA + 1) | 1  # a stride of its own for every stream, so that no two walk the same orbit
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=key.device)
    return _mix(counter * gamma[:, None] + key[:, None])


def integers(key: Tensor, shape: tuple[int, ...], high: int) -> Tensor:
    """Uniform integers in [0, high) (bias below high / 2^63). Shapes: (member,) -> (member, *shape) int64."""
    return (_shift(bits(key, math.prod(shape)), 1) % high).view(-1, *shape)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform float32 in [0, 1) on a grid of 2^-24. Shapes: (member,) -> (member, *shape)."""
    return (_shift(bits(key, math.prod(shape)), 40).float() * 2.0**-24).view(-1, *shape)


def coins(key: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """True with probability p (to 2^-53). Shapes: (member,) -> (member, *shape) bool."""
    return (_shift(bits(key, math.prod(shape)), 11) < round(p * 2**53)).view(-1, *shape)


def choose(key: Tensor, shape: tuple[int, ...], high: int, count: int) -> Tensor:
    """`count` distinct integers in [0, high), in random order. Shapes: (member,) -> (member, *shape, count) int64."""
    if count == 1:
        return integers(key, (*shape, 1), high)
    order = bits(key, math.prod(shape) * high).view(-1, *shape, high).argsort(dim=-1, stable=True)
    return order[..., :count].contiguous()


@functools.cache
def _quantiles(device: str) -> Tensor:
    """65 536 equally likely normal quantiles, unit variance, on the integer grid."""
    z = ndtri((np.arange(1 << 16) + 0.5) / (1 << 16))
    return torch.from_numpy(np.rint(z / z.std() * GRID).astype(np.int32)).to(device)


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Normal variates as integers; times `NORMAL` they have unit variance. Shapes: (member,) -> (member, *shape) int32.

    Each is the sum of two table quantiles: 2^32 levels, out to 6.1 standard deviations.
    """
    n = math.prod(shape)
    halves = bits(key, -(-n // 2)).view(torch.int16).int() + (1 << 15)  # four table indices a word
    table = _quantiles(str(key.device))
    drawn = table.index_select(0, halves.view(-1)).view(len(key), 2, -1)
    return (drawn[:, 0] + drawn[:, 1])[:, :n].view(-1, *shape)
