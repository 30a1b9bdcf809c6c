"""Causal MLP-Mixer: one learnt, static matrix over positions a head (Tolstikhin et al. 2021, section 2).

The original's token mixing is a two-layer perceptron along the positions, shared by all channels; its hidden units see
the whole sequence, so it cannot be made causal. One matrix can, by a mask:

    y_t = sum_{s <= t} M_st h_s + b_t

`heads` matrices, each for its own group of width / heads channels; heads = 1 is the original's sharing. What mixes the
channels is the block's MLP alone, as there. `mlp_mixer_unmasked` sums over all s: a control that reads what it predicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lib import streams
from lib.config import InputError
from lib.models.mixers.parts import from_heads, to_heads


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """M (head, position seen, position) and b (head, position)."""
    heads, length = config.heads, task.length
    return {"mix.positions.weight": (heads, length, length), "mix.positions.bias": (heads, length)}


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor:
    """As torch.nn.Linear over the positions: uniform within ±1/sqrt(positions)."""
    return (2 * streams.uniform(keys, shape) - 1) * shape[-1] ** -0.5


def mix(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """The masked product. Shapes: (member, batch, position, model) -> the same; a sequence may be shorter than M."""
    weight, bias = _matrix(block, h)
    if config.causal:
        weight = weight.triu()  # from s to t >= s
    y = weight.mT[:, None] @ to_heads(h, config.heads)
    return from_heads(y + bias[:, None, :, :, None])


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """The sum of each position, one after the other."""
    weight, bias = _matrix(block, h)
    x, columns = to_heads(h, config.heads), []
    for t in range(h.shape[2]):
        seen = slice(0, t + 1 if config.causal else None)
        columns.append(torch.einsum("mhs, mbhsd -> mbhd", weight[:, :, seen, t], x[..., seen, :]) + bias[:, None, :, t, None])
    return from_heads(torch.stack(columns, 3))


def _matrix(block: dict[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    weight, bias, length = block["mix.positions.weight"], block["mix.positions.bias"], h.shape[2]
    if length > weight.shape[-1]:
        raise InputError(f"mixer mlp_mixer: made for {weight.shape[-1]} positions, given {length}; train one for that length")
    return weight[..., :length, :length], bias[..., :length]
