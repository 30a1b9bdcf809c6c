"""RWKV-4's time mixing with its WKV operator (Peng et al. 2023, section 3); the MLP takes the place of its channel mixing.

    r, k, v = W (mu h_t + (1 - mu) h_(t-1)), each with its own mu and W;   w = exp(decay) > 0
    wkv_t = (sum_{s<t} exp(k_s - (t-1-s) w) v_s + exp(u + k_t) v_t) / (the same sums without v)
    y_t = W_o (sigmoid(r_t) wkv_t)

All is elementwise over channels. Both sums over s < t are states of one diagonal recurrence, taken in units of exp(m_t),
m_t = max(m_(t-1) - w, k_t), so that no exponent is positive. Starting values are those of the paper's first layer, in
every layer: decays from exp(-5) to exp(3) across the channels, mu from zero to one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lib.models.linear import linear
from lib.models.mixers.parts import scan, shift


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """W of k, v, r and their mu (three rows), the decay, the bonus u of the present, and W_o."""
    d = config.width
    matrices = {f"mix.{name}.weight": (d, d) for name in ("k", "v", "r", "out")}
    return matrices | {"mix.shift": (3, d), "mix.decay": (d,), "mix.bonus": (d,)}


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor | None:
    """mu, decay and u, the same for every seed; None for the rest."""
    channel, d = torch.arange(shape[-1], dtype=torch.float32, device=keys.device), shape[-1]
    if name == "mix.shift":
        values = torch.stack([channel / d, channel / d, (channel / d) ** 0.5])
    elif name == "mix.decay":
        values = -5 + 8 * (channel / max(d - 1, 1)) ** 0.7
    elif name == "mix.bonus":
        values = math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1)
    else:
        return None
    return values.repeat(len(keys), *[1] * len(shape))


def mix(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """By a chunked scan. Shapes: (member, batch, position, model) -> the same."""
    k, v, r = _projections(block, h)
    w, present = block["mix.decay"].exp()[:, None, None], k + block["mix.bonus"][:, None, None]
    with torch.no_grad():  # units cancel in the quotient
        past = torch.arange(h.shape[2], device=h.device, dtype=h.dtype)[:, None] * w
        unit = (k + past).cummax(2).values - past
        before = torch.cat([present[:, :, :1], unit[:, :, :-1]], 2)  # before the first there is nothing, in any unit
        top = torch.maximum(before, present)
    into, fade = (k - unit).exp(), (before - w - unit).exp()
    sums = scan(fade[..., None, :], torch.stack([into * v, into], -2))
    above, below = ((before - top).exp()[..., None, :] * shift(sums)).unbind(-2)
    now = (present - top).exp()
    return linear(r * (above + now * v) / (below + now), block["mix.out.weight"])


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    k, v, r = _projections(block, h)
    w, u = block["mix.decay"].exp()[:, None], block["mix.bonus"][:, None]
    above, below, unit = torch.zeros_like(k[:, :, 0]), torch.zeros_like(k[:, :, 0]), k[:, :, 0]
    outputs = []
    for t in range(h.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        top = torch.maximum(unit, key + u)
        old, new = (unit - top).exp(), (key + u - top).exp()
        outputs.append((old * above + new * value) / (old * below + new))
        unit, before = torch.maximum(unit - w, key), unit
        old, new = (before - w - unit).exp(), (key - unit).exp()
        above, below = old * above + new * value, old * below + new
    return linear(r * torch.stack(outputs, 2), block["mix.out.weight"])


def _projections(block: dict[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old = shift(h)
    k, v, r = (
        linear(torch.lerp(old, h, mu), block[f"mix.{name}.weight"])
        for name, mu in zip("kvr", block["mix.shift"][:, :, None, None].unbind(1), strict=True)
    )
    return k, v, r.sigmoid()
