"""xLSTM's matrix memory, mLSTM (Beck et al. 2024, section 2.3), in the block of xLSTM 7B (Beck et al. 2025, section 3).

    C_t = f_t C_(t-1) + i_t v_t k_t^T,  n_t = f_t n_(t-1) + i_t k_t,  i = exp(I), f = sigmoid(F)
    y_t = W_o (sigmoid(W_g h_t) norm(C_t q_t / max(|n_t . q_t|, 1))),   q, k, v = W h_t, q over sqrt(head_dim)

a head; I and F are linear in h_t, kept within ±15 by 15 tanh(./15); the norm is a layer norm a head without shift.
In parallel form (2024, appendix A), with D_ts = exp(I_s + sum_{s < r <= t} log f_r) for s <= t,

    C_t q_t = sum_s D_ts (q_t . k_s) v_s,   n_t . q_t = sum_s D_ts (q_t . k_s)

in units of exp(m_t), m_t = max_s log D_ts. Gates start independent of h, as in the code of 2024: biases of f from 3 to 6
across the heads, of i normal with standard deviation 0.1 (of 2025: -10, which takes Adam thousands of steps to undo).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib import streams
from lib.models.linear import linear
from lib.models.mixers.parts import from_heads, to_heads

CAP, EPSILON = 15.0, 1e-6


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """W of q, k, v and the output gate side by side, the gates of each head (all i, then all f), the norm, and W_o."""
    d, inner, heads = config.width, config.attention_width, config.heads
    return {
        "mix.in.weight": (d, 4 * inner),
        "mix.input_gate.weight": (d, heads),
        "mix.input_gate.bias": (heads,),
        "mix.forget_gate.weight": (d, heads),
        "mix.forget_gate.bias": (heads,),
        "mix.norm.scale": (inner,),
        "mix.out.weight": (inner, d),
    }


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor | None:
    """The gates; None for the rest."""
    if name.endswith("gate.weight"):
        return torch.zeros(len(keys), *shape, device=keys.device)
    if name == "mix.forget_gate.bias":
        return torch.linspace(3, 6, *shape, device=keys.device).repeat(len(keys), 1)
    if name == "mix.input_gate.bias":
        return streams.normal(keys, shape) * (0.1 * streams.NORMAL)
    return None


def mix(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """In parallel form. Shapes: (member, batch, position, model) -> the same."""
    q, k, v, i, log_f, gate = _inputs(config, block, h)
    since = log_f.cumsum(-1)
    ahead = torch.ones(h.shape[2], h.shape[2], dtype=torch.bool, device=h.device).triu(1)
    log_d = (since[..., None] - since[..., None, :] + i[..., None, :]).masked_fill(ahead, -torch.inf)
    m = log_d.detach().amax(-1, keepdim=True)
    weights = (log_d - m).exp() * (q @ k.mT)
    return _outputs(config, block, weights @ v, weights.sum(-1, keepdim=True), m, gate)


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    q, k, v, i, log_f, gate = _inputs(config, block, h)
    memory, norm, m = torch.zeros_like(k.mT @ v), torch.zeros_like(k[..., 0, :]), torch.full_like(i[..., 0], -1e30)
    above, below, units = [], [], []
    for t in range(h.shape[2]):
        m, before = torch.maximum(log_f[..., t] + m, i[..., t]).detach(), m
        old, new = ((x - m).exp()[..., None] for x in (log_f[..., t] + before, i[..., t]))
        memory = old[..., None] * memory + new[..., None] * k[..., t, :, None] * v[..., t, None, :]
        norm = old * norm + new * k[..., t, :]
        above.append((q[..., t, None, :] @ memory).squeeze(-2))
        below.append((q[..., t, :] * norm).sum(-1, keepdim=True))
        units.append(m[..., None])
    return _outputs(config, block, *(torch.stack(x, 3) for x in (above, below, units)), gate)


def _inputs(config, block: dict[str, Tensor], h: Tensor):
    """q, k, v (member, batch, head, position, head_dim), I and log f (member, batch, head, position), the output gate."""
    *qkv, gate = linear(h, block["mix.in.weight"]).chunk(4, -1)
    q, k, v = (to_heads(x, config.heads) for x in qkv)
    i, f = (
        CAP * (linear(h, block[f"mix.{name}.weight"], block[f"mix.{name}.bias"]) / CAP).tanh()
        for name in ("input_gate", "forget_gate")
    )
    return q * q.shape[-1] ** -0.5, k, v, i.transpose(2, 3), F.logsigmoid(f).transpose(2, 3), gate.sigmoid()


def _outputs(config, block: dict[str, Tensor], above: Tensor, below: Tensor, m: Tensor, gate: Tensor) -> Tensor:
    y = above / (torch.maximum(below.abs(), (-m).exp()) + EPSILON)
    y = from_heads(F.layer_norm(y, y.shape[-1:], eps=EPSILON))
    return linear(gate * y * block["mix.norm.scale"][:, None, None], block["mix.out.weight"])
