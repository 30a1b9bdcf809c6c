"""Gated DeltaNet: a matrix memory with a decay and the delta rule (Yang, Kautz and Hatamizadeh 2024, section 3.1).

    S_t = alpha_t S_(t-1) + k_t d_t^T,   d_t = beta_t (v_t - alpha_t S_(t-1)^T k_t),   o_t = S_t^T q_t

a head; q, k and v = silu(conv(W h)) with 4 taps, q and k of length one, q then over sqrt(head_dim);
beta = sigmoid(W_beta h), log alpha = -A softplus(W_alpha h + b); y = W_o (rmsnorm(o) silu(W_z h)).

In chunks (section 3.3): with G_t = sum of log alpha since the chunk began, S the state before it, and K, V, Q its rows,
the corrections d solve (I + L) d = beta (V - exp(G) K S), L_ts = beta_t exp(G_t - G_s) (k_t . k_s) for s < t. Then
o_t = exp(G_t) q_t S + sum_{s <= t} exp(G_t - G_s) (q_t . k_s) d_s. A starts uniform in (0.01, 16), softplus(b)
between 0.001 and 0.1 (Dao and Gu 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lib import streams
from lib.models.linear import linear
from lib.models.mixers.parts import from_heads, log_uniform, short_convolution, softplus_inverse, to_heads

TAPS, EPSILON = 4, 1e-6
CHUNK = {"cpu": 16, "cuda": 64}  # a CPU pays for the passes over (chunk, chunk) matrices, a GPU for the calls


def shapes(config, task) -> dict[str, tuple[int, ...]]:
    """W of q, k, v side by side and their convolution, W_z, the gates of each head, log A, the norm, and W_o."""
    d, inner, heads = config.width, config.attention_width, config.heads
    return {
        "mix.in.weight": (d, 3 * inner),
        "mix.conv.weight": (TAPS, 3 * inner),
        "mix.gate.weight": (d, inner),
        "mix.beta.weight": (d, heads),
        "mix.alpha.weight": (d, heads),
        "mix.alpha.bias": (heads,),
        "mix.log_rate": (heads,),
        "mix.norm.scale": (inner // heads,),
        "mix.out.weight": (inner, d),
    }


def init(name: str, shape: tuple[int, ...], keys: Tensor) -> Tensor | None:
    """A and b; None for the rest."""
    if name == "mix.log_rate":
        return (0.01 + 15.99 * streams.uniform(keys, shape)).log()
    if name == "mix.alpha.bias":
        return softplus_inverse(log_uniform(streams.uniform(keys, shape), 1e-3, 1e-1))
    return None


def mix(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """In chunks. Shapes: (member, batch, position, model) -> the same."""
    *inputs, gate = _inputs(config, block, h)
    length = h.shape[2]
    size = min(CHUNK[h.device.type], 1 << (length - 1).bit_length())
    chunks = -(-length // size)
    pad = chunks * size - length
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(3, (chunks, size)) for x in inputs[:3])
    beta, log_alpha = (F.pad(x, (0, pad)).unflatten(3, (chunks, size))[..., None] for x in inputs[3:])
    since = log_alpha.cumsum(-2)
    ahead = torch.ones(size, size, dtype=torch.bool, device=h.device).triu(1)
    fade = (since - since.mT).masked_fill(ahead, -torch.inf).exp()
    solve = _Inverse.apply((beta * fade * (k @ k.mT)).tril(-1))
    from_values, from_state = solve @ (beta * v), solve @ (beta * since.exp() * k)
    within, q = fade * (q @ k.mT), q * since.exp()
    keep = (since[..., -1:, :] - since).exp() * k
    state, outputs = torch.zeros_like(k[..., 0, :, :].mT @ v[..., 0, :, :]), []
    for c in range(chunks):
        d = from_values[:, :, :, c] - from_state[:, :, :, c] @ state
        outputs.append(q[:, :, :, c] @ state + within[:, :, :, c] @ d)
        state = since[:, :, :, c, -1:].exp() * state + keep[:, :, :, c].mT @ d
    return _outputs(block, torch.cat(outputs, 3)[:, :, :, :length], gate)


def mix_sequential(config, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """One position after the other."""
    q, k, v, beta, log_alpha, gate = _inputs(config, block, h)
    state, outputs = torch.zeros_like(k.mT @ v), []
    for t in range(h.shape[2]):
        state = log_alpha[..., t, None, None].exp() * state
        d = beta[..., t, None, None] * (v[..., t, None, :] - k[..., t, None, :] @ state)
        state = state + k[..., t, :, None] * d
        outputs.append((q[..., t, None, :] @ state).squeeze(-2))
    return _outputs(block, torch.stack(outputs, 3), gate)


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L, whose side is a power of two, by blocks of twice the size each time:
    [[X, 0], [-Y L X, Y]] inverts [[X^-1, 0], [L, Y^-1]]. No pivot, no power of L, no call to a solver."""

    @staticmethod
    def forward(ctx, lower):
        side, flat = lower.shape[-1], lower.flatten(0, -3)
        inverse = torch.eye(side, dtype=lower.dtype, device=lower.device).repeat(len(flat), 1, 1)
        half = 1
        while half < side:
            x, low = (
                t.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
                for t in (inverse, flat)
            )
            x[..., half:, :half] = -x[..., half:, half:] @ low[..., half:, :half] @ x[..., :half, :half]
            half *= 2
        inverse = inverse.view(lower.shape)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def _inputs(config, block: dict[str, Tensor], h: Tensor):
    """q, k, v (member, batch, head, position, head_dim), beta and log alpha (member, batch, head, position), W_z h."""
    x = F.silu(short_convolution(linear(h, block["mix.in.weight"]), block["mix.conv.weight"]))
    q, k, v = (to_heads(part, config.heads) for part in x.chunk(3, -1))
    q, k = (part * (part.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for part in (q, k))
    beta = linear(h, block["mix.beta.weight"]).sigmoid()
    rate = F.softplus(linear(h, block["mix.alpha.weight"], block["mix.alpha.bias"]))
    log_alpha = -block["mix.log_rate"].exp()[:, None, None] * rate
    return q * q.shape[-1] ** -0.5, k, v, beta.transpose(2, 3), log_alpha.transpose(2, 3), linear(h, block["mix.gate.weight"])


def _outputs(block: dict[str, Tensor], y: Tensor, gate: Tensor) -> Tensor:
    y = y * (y.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * block["mix.norm.scale"][:, None, None, None]
    return linear(from_heads(y) * F.silu(gate), block["mix.out.weight"])
