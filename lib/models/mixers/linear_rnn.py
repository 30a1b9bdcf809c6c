"""A diagonal, gated linear RNN: the gated impulse linear recurrent layer of Martin and Cundy (2018) without its
non-linearity, and with an output gate as in HGRN (Qin et al. 2023, section 3).

    a_t = sigmoid(W_a h_t + b_a),   s_t = a_t s_(t-1) + (1 - a_t) W_v h_t,   y_t = W_o (s_t silu(W_g h_t))

The forget gates start with time constants 1 / (1 - a) between 2 and 512 positions, uniform in the logarithm.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lib import streams
from lib.models.linear import linear
from lib.models.mixers.parts import log_uniform, scan, scan_sequential


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """W_v and W_g side by side, W_a with b_a, and W_o."""
    d = config.width
    return {
        "mix.in.weight": (d, 2 * d),
        "mix.forget.weight": (d, d),
        "mix.forget.bias": (d,),
        "mix.out.weight": (d, d),
        "mix.out.bias": (d,),
    }


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor | None:
    """The forget gate's bias; None for the rest."""
    if name != "mix.forget.bias":
        return None
    let_in = log_uniform(streams.uniform(keys, shape), 1 / 512, 1 / 2)
    return (1 - let_in).log() - let_in.log()


def mix(config, block: dict[str, Tensor], h: Tensor, scan=scan) -> Tensor:
    """By a chunked scan. Shapes: (member, batch, position, model) -> the same."""
    value, gate = linear(h, block["mix.in.weight"]).chunk(2, -1)
    forget = linear(h, block["mix.forget.weight"], block["mix.forget.bias"])
    states = scan(forget.sigmoid(), (-forget).sigmoid() * value)
    return linear(states * F.silu(gate), block["mix.out.weight"], block["mix.out.bias"])


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    return mix(config, block, h, scan_sequential)
