"""The book's Transformer, a pure function of parameters with a leading member axis.

It computes only what the loss reads. The last block asks its queries at the read-out position alone, and by associativity
projects neither keys nor values there: q (x W_K)ᵀ = (q W_Kᵀ) xᵀ and A (x W_V) = (A x) W_V. Where the first block is fed by
an affine map of few numbers (x = u E + c) without a norm, its projections are composed: x W = u (E W) + c W.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor

from lib import streams
from lib.config import Config


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map a member. Shapes: x (member, ..., in), weight (member, in, out), bias (member, out) -> (member, ..., out)."""
    flat = x.flatten(1, -2)
    y = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


class Affine(NamedTuple):
    """A residual stream that is still u E + c: u (member, batch, position, feature), E (member, feature, model), c (member, position, model)."""

    u: Tensor
    weight: Tensor
    offset: Tensor

    def project(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W + b by way of u (E W) + (c W + b)."""
        offset = linear(self.offset, weight, bias)
        return linear(self.u, torch.bmm(self.weight, weight)) + offset[:, None]

    def dense(self) -> Tensor:
        """x itself, (member, batch, position, model)."""
        return linear(self.u, self.weight) + self.offset[:, None]


def sinusoids(length: int, width: int, device=None) -> Tensor:
    """Sine-cosine position table of Vaswani et al. (2017), section 3.5. Shape (position, model)."""
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
    return table.float().to(device)


class Transformer(Config):
    """Multi-head attention and MLP blocks over the sequence, read out at the last position by a linear map.

    Defaults are the regression column of Zucchet et al. (2025), table 1. `layer_norm` is pre-norm. There is no key
    bias: it adds the same number to all scores of a query and softmax does not see it.
    """

    version: ClassVar[int] = 1
    kind: Literal["transformer"] = "transformer"
    layers: int = Field(2, ge=1, le=64)
    heads: int = Field(4, ge=1, le=1024)
    width: int = Field(256, ge=1, le=8192)
    head_dim: int = Field(0, ge=0, le=8192, description="0: width / heads")
    mlp_factor: int = Field(4, ge=1, le=64)
    mlp: bool = True
    residual: bool = True
    layer_norm: bool = False
    causal: bool = False
    activation: Literal["gelu", "relu"] = "gelu"

    def check(self, task) -> None:
        """Raise ValueError where the model cannot do the task."""
        if not self.head_dim and self.width % self.heads:
            raise ValueError(
                f"heads: {self.heads} heads do not divide width {self.width}; choose a divisor or give head_dim"
            )

    @property
    def attention_width(self) -> int:
        """All heads' queries side by side."""
        return self.heads * (self.head_dim or self.width // self.heads)

    def shapes(self, task) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter of one member; `.weight` is (in, out)."""
        model, inner = self.width, self.attention_width
        shapes = {"embed.weight": (task.features, model), "embed.bias": (model,)}
        for layer in range(self.layers):
            block = {"q.weight": (model, inner), "q.bias": (inner,), "k.weight": (model, inner)}
            block |= {"v.weight": (model, inner), "v.bias": (inner,), "o.weight": (inner, model), "o.bias": (model,)}
            if self.mlp:
                hidden = self.mlp_factor * model
                block |= {"up.weight": (model, hidden), "up.bias": (hidden,)}
                block |= {"down.weight": (hidden, model), "down.bias": (model,)}
            if self.layer_norm:
                block |= {"attention_norm.scale": (model,), "attention_norm.shift": (model,)}
                block |= {"mlp_norm.scale": (model,), "mlp_norm.shift": (model,)} if self.mlp else {}
            shapes |= {f"{layer}.{name}": shape for name, shape in block.items()}
        if self.layer_norm:
            shapes |= {"final_norm.scale": (model,), "final_norm.shift": (model,)}
        return shapes | {"read.weight": (model, task.outputs), "read.bias": (task.outputs,)}

    def init(self, task, seeds: Tensor) -> dict[str, Tensor]:
        """Initial parameters as torch.nn.Linear draws them, uniform within ±1/sqrt(fan-in), for seeds (member,)."""
        parameters, shapes = {}, self.shapes(task)
        for name, shape in shapes.items():
            if "norm" in name:
                fill = torch.ones if name.endswith("scale") else torch.zeros
                parameters[name] = fill(len(seeds), *shape, device=seeds.device)
            else:
                fan_in = shapes[name.replace(".bias", ".weight")][0]
                parameters[name] = (2 * streams.uniform(streams.key(seeds, name), shape) - 1) * fan_in**-0.5
        return parameters

    def forward(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Answers at the last position. Shapes: inputs (member, batch, position, feature) -> (member, batch, output)."""
        table = sinusoids(inputs.shape[2], self.width, inputs.device)
        x = Affine(inputs, parameters["embed.weight"], parameters["embed.bias"][:, None] + table)
        if self.layer_norm or self.width <= inputs.shape[-1]:
            x = x.dense()
        for layer in range(self.layers):
            block = {k.split(".", 1)[1]: v for k, v in parameters.items() if k.startswith(f"{layer}.")}
            last = layer == self.layers - 1
            x = self._mlp(block, self._attention_last(block, x) if last else self._attention(block, x))
        return linear(self._norm(parameters, "final_norm", x), parameters["read.weight"], parameters["read.bias"])

    def _norm(self, block: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        if not self.layer_norm:
            return x
        scale, shift = (block[f"{name}.{part}"] for part in ("scale", "shift"))
        middle = (len(x), *[1] * (x.dim() - 2), -1)
        return F.layer_norm(x, x.shape[-1:]) * scale.view(middle) + shift.view(middle)

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + update if self.residual else update

    def _attention(self, block: dict[str, Tensor], x: Tensor | Affine) -> Tensor:
        """Self-attention at every position. Shapes: (member, batch, position, model) -> the same."""
        inner = self.attention_width
        weight = torch.cat([block["q.weight"], block["k.weight"], block["v.weight"]], -1)
        bias = torch.cat([block["q.bias"], torch.zeros_like(block["q.bias"]), block["v.bias"]], -1)
        if isinstance(x, Affine):
            qkv, x = x.project(weight, bias), x.dense()
        else:
            qkv = linear(self._norm(block, "attention_norm", x), weight, bias)
        members = len(qkv)
        q, k, v = (
            rearrange(t, "member batch position (head dim) -> (member batch) head position dim", head=self.heads)
            for t in qkv.split(inner, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y = rearrange(y, "(member batch) head position dim -> member batch position (head dim)", member=members)
        return self._add(x, linear(y, block["o.weight"], block["o.bias"]))

    def _attention_last(self, block: dict[str, Tensor], x: Tensor | Affine) -> Tensor:
        """Self-attention at the last position alone. Shapes: (member, batch, position, model) -> (member, batch, model)."""
        x = x.dense() if isinstance(x, Affine) else x
        h = self._norm(block, "attention_norm", x)
        q = rearrange(linear(h[:, :, -1], block["q.weight"], block["q.bias"]), "m b (h d) -> m h b d", h=self.heads)
        w_k, w_v = (rearrange(block[f"{n}.weight"], "m i (h d) -> m h i d", h=self.heads) for n in "kv")
        q = rearrange(q @ w_k.mT, "m h b i -> m b h i") * (w_k.shape[-1] ** -0.5)
        pattern = (q @ h.mT).softmax(-1)  # (member, batch, head, position)
        pooled = rearrange(pattern @ h, "m b h i -> m h b i") @ w_v
        y = rearrange(pooled, "m h b d -> m b (h d)") + block["v.bias"][:, None]
        return self._add(x[:, :, -1], linear(y, block["o.weight"], block["o.bias"]))

    def _mlp(self, block: dict[str, Tensor], x: Tensor) -> Tensor:
        if not self.mlp:
            return x
        hidden = linear(self._norm(block, "mlp_norm", x), block["up.weight"], block["up.bias"])
        hidden = F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden)
        return self._add(x, linear(hidden, block["down.weight"], block["down.bias"]))

    def observe(self, task, parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing beyond the losses."""
        return {}
