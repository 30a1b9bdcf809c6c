"""The book's Transformer, a pure function of parameters with a leading member axis.

Another way to mix tokens may take attention's place in every block (`lib.models.mixers`).

It computes only what the loss reads. The last block asks its queries at the read-out positions alone; where that is one
position it projects neither keys nor values, by associativity: q (x W_K)ᵀ = (q W_Kᵀ) xᵀ and A (x W_V) = (A x) W_V. The
first block is fed by an embedding, and its projections are made where that is small: composed with an affine map of few
numbers (x = u E + c gives x W = u (E W) + c W), or on a table of the few different (token, position) pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor

from lib import streams
from lib.config import Config, InputError
from lib.models import mixers
from lib.models.linear import linear
from lib.models.residual import Affine, Dense, Table, look_up, sinusoids

ROOM = 70.0  # exp(70) and exp(-70), times a batch and a gradient, are normal numbers in float32
Tap = Callable[[int, Tensor], Tensor]  # (layer, attention pattern) -> the pattern to use


class Transformer(Config):
    """Multi-head attention, or another mixer, and MLP blocks over the sequence, and a linear read-out where the task reads.

    Defaults are the regression column of Zucchet et al. (2025), table 1. `layer_norm` is pre-norm. There is no key
    bias: it adds the same number to all scores of a query and softmax does not see it.

    positions   "sinusoidal": the fixed table, added; "learned": a table of parameters, N(0, 1) at the start
    embedding   how the token map starts: "linear": as any linear map; "table": N(0, 1), as torch.nn.Embedding
    score_bias  c: adds c where the true pattern is to the last block's scores (Baherwani et al. 2026)
    mixer       what mixes the tokens; state: Mamba's numbers a channel
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
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    embedding: Literal["linear", "table"] = "linear"
    score_bias: float = 0.0
    mixer: Literal["attention", *mixers.MIXERS] = "attention"
    state: int = Field(16, ge=1, le=1024)

    def check(self, task) -> None:
        """Raise ValueError where the model cannot do the task."""
        if not self.head_dim and self.width % self.heads:
            raise ValueError(
                f"heads: {self.heads} heads do not divide width {self.width}; choose a divisor or give head_dim"
            )
        mixers.check(self)

    @property
    def attention_width(self) -> int:
        """All heads' queries side by side."""
        return self.heads * (self.head_dim or self.width // self.heads)

    def shapes(self, task) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter of one member; `.weight` is (in, out)."""
        model, inner = self.width, self.attention_width
        shapes = {"embed.weight": (task.features, model), "embed.bias": (model,)}
        if self.positions == "learned":
            shapes["position.weight"] = (task.length, model)
        for layer in range(self.layers):
            if self.mixer == "attention":
                block = {"q.weight": (model, inner), "q.bias": (inner,), "k.weight": (model, inner)}
                block |= {"v.weight": (model, inner), "v.bias": (inner,), "o.weight": (inner, model), "o.bias": (model,)}
            else:
                block = mixers.MIXERS[self.mixer].shapes(self, task)
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
            own, key = name.partition(".")[2], streams.key(seeds, name)
            mixer = mixers.MIXERS[self.mixer] if own.startswith("mix.") else None
            if mixer and (values := mixer.init(own, shape, key)) is not None:
                parameters[name] = values
            elif name == "position.weight" or (name == "embed.weight" and self.embedding == "table"):
                parameters[name] = streams.normal(key, shape) * streams.NORMAL
            elif "norm" in name or (name == "embed.bias" and self.embedding == "table"):
                fill = torch.ones if name.endswith("scale") else torch.zeros
                parameters[name] = fill(len(seeds), *shape, device=seeds.device)
            else:
                fan_in = shapes[name.replace(".bias", ".weight")][0]
                parameters[name] = (2 * streams.uniform(key, shape) - 1) * fan_in**-0.5
        return parameters

    def forward(
        self,
        parameters: dict[str, Tensor],
        inputs: Tensor,
        reads: range,
        *,
        pattern: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Answers at the positions `reads`, which end with the last.

        Shapes: inputs (member, batch, position, feature) or tokens (member, batch, position); pattern, which only
        `score_bias` uses, (member, batch, read, position) -> (member, batch, read, output). `tap` is called with every
        layer's attention pattern (member, batch, head, query, position) and returns the one to use.
        """
        if tap is not None and self.mixer != "attention":
            raise InputError(f"tap: mixer {self.mixer} has no attention pattern; use a model with mixer = 'attention'")
        bias = pattern[:, :, None] * self.score_bias if self.score_bias and pattern is not None else None
        x = self._embed(parameters, inputs)
        for layer in range(self.layers):
            block = {k.split(".", 1)[1]: v for k, v in parameters.items() if k.startswith(f"{layer}.")}
            last = layer == self.layers - 1
            if self.mixer != "attention":
                x = self._mix(block, x.dense())[:, :, -len(reads) if last else 0 :]
            elif last and len(reads) == 1 and bias is None and tap is None:
                x = self._attention_once(block, x.dense())
            else:
                hook = None if tap is None else functools.partial(tap, layer)
                queries = len(reads) if last else inputs.shape[2]
                x = self._attention(block, x, queries, bias if last else None, hook)
            x = Dense(self._mlp(block, x))
        return linear(self._norm(parameters, "final_norm")(x.x), parameters["read.weight"], parameters["read.bias"])

    def _embed(self, parameters: dict[str, Tensor], inputs: Tensor) -> Dense | Affine | Table:
        weight, length = parameters["embed.weight"], inputs.shape[2]
        learned = self.positions == "learned"
        table = parameters["position.weight"] if learned else sinusoids(length, self.width, inputs.device)
        offset = parameters["embed.bias"][:, None] + table
        if inputs.is_floating_point():
            x = Affine(inputs, weight, offset)
            return Dense(x.dense()) if self.layer_norm or self.width <= inputs.shape[-1] else x
        if weight.shape[1] * 4 <= inputs.shape[1]:  # far fewer (token, position) pairs than (sequence, position) ones
            rows = (weight[:, :, None] + offset[:, None]).flatten(1, 2)
            return Table(rows, inputs * length + torch.arange(length, device=inputs.device), weight.shape[1])
        return Dense(look_up(weight, inputs) + offset[:, None])

    def _norm(self, block: dict[str, Tensor], name: str):
        """The norm of this name as a function; the identity where there is none."""
        if not self.layer_norm:
            return lambda x: x
        scale, shift = (block[f"{name}.{part}"] for part in ("scale", "shift"))

        def norm(x: Tensor) -> Tensor:
            if len(x) == 1:  # one kernel instead of three passes over memory
                return F.layer_norm(x, x.shape[-1:], scale[0], shift[0])
            middle = (len(x), *[1] * (x.dim() - 2), -1)
            return F.layer_norm(x, x.shape[-1:]) * scale.view(middle) + shift.view(middle)

        return norm

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + update if self.residual else update

    def _mix(self, block: dict[str, Tensor], x: Tensor) -> Tensor:
        """The mixer in attention's place: (member, batch, position, model) -> the same."""
        return self._add(x, mixers.MIXERS[self.mixer].mix(self, block, self._norm(block, "attention_norm")(x)))

    def _attention(
        self, block: dict[str, Tensor], x: Dense | Affine | Table, queries: int, bias: Tensor | None = None, hook=None
    ) -> Tensor:
        """Self-attention for the last `queries` positions: (member, batch, queries, model).

        bias (member, batch, 1, queries, position) is added to the scores. With a hook the pattern is made explicitly.
        """
        inner, norm = self.attention_width, self._norm(block, "attention_norm")
        few = isinstance(x, Table) and 8 * x.tokens**2 <= x.index.shape[1] and x.index.device.type == "cpu"
        if few and bias is None and hook is None and (y := self._attention_on_table(block, x, queries)) is not None:
            return self._add(x.last(queries).dense(), linear(y, block["o.weight"], block["o.bias"]))
        weight = torch.cat([block["k.weight"], block["v.weight"]], -1)
        shift = torch.cat([torch.zeros_like(block["v.bias"]), block["v.bias"]], -1)
        if queries == (length := x.length):
            weight = torch.cat([block["q.weight"], weight], -1)
            q, k, v = x.project(norm, weight, torch.cat([block["q.bias"], shift], -1)).split(inner, -1)
        else:
            k, v = x.project(norm, weight, shift).split(inner, -1)
            q = x.last(queries).project(norm, block["q.weight"], block["q.bias"])
        members, rest = len(q), x.last(queries).dense()
        q, k, v = (rearrange(t, "m batch position (head dim) -> (m batch) head position dim", head=self.heads) for t in (q, k, v))
        mask = self._mask(queries, length, q.device) if self.causal and queries > 1 else None
        if bias is not None:
            mask = bias.flatten(0, 1) if mask is None else bias.flatten(0, 1).masked_fill(~mask, -torch.inf)
        if hook is None:
            full = self.causal and queries == length and bias is None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if full else mask, is_causal=full)
        else:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            y = hook(scores.softmax(-1).unflatten(0, (members, -1))).flatten(0, 1) @ v
        y = rearrange(y, "(m batch) head position dim -> m batch position (head dim)", m=members)
        return self._add(rest, linear(y, block["o.weight"], block["o.bias"]))

    @staticmethod
    def _mask(queries: int, length: int, device) -> Tensor:
        """True where a query, one of the last positions, may look: (queries, position)."""
        return torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)

    def _attention_on_table(self, block: dict[str, Tensor], x: Table, queries: int) -> Tensor | None:
        """All heads' values for the last `queries` positions, where the same few rows are queries, keys and values.

        exp(score) depends on the rows alone, so that softmax's numerator is the sum over the keys seen of a table
        exp(score) v, and its denominator of exp(score): one matrix product each with the 0/1 matrix of what a sequence
        holds, for every token that could ask; then the one that does is picked. (member, batch, queries, heads x head_dim);
        None where scores lie so far apart that float32 has no room for their exponentials, which only the values tell: not
        for a captured graph.
        """
        members, batch, length = x.index.shape
        asking = x.rows.unflatten(1, (x.tokens, length))[:, :, -queries:].flatten(1, 2)
        norm, heads = self._norm(block, "attention_norm"), self.heads
        q = rearrange(linear(norm(asking), block["q.weight"], block["q.bias"]), "m q (h d) -> m h q d", h=heads)
        rows = norm(x.rows)
        k = rearrange(linear(rows, block["k.weight"]), "m r (h d) -> m h r d", h=heads)
        v = rearrange(linear(rows, block["v.weight"], block["v.bias"]), "m r (h d) -> m r 1 h d", h=heads)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.causal:
            hidden = ~self._mask(queries, length, q.device).repeat(x.tokens, x.tokens)
            scores = scores.masked_fill(hidden, -torch.inf)
        # The largest score that a sequence holds lies between these two: float32 has room for both if they are not too far apart.
        by_key = scores.detach().unflatten(-1, (x.tokens, length))
        high, low = by_key.amax((-2, -1)), by_key.amin(-2).amax(-1)
        if (high - low).max() > 2 * ROOM:
            return None
        middle = (high + low) / 2
        weights = (scores - middle[..., None]).clamp(max=ROOM).exp()
        weights = rearrange(weights, "m h q r -> m r q h 1")
        held = torch.zeros(members, batch, x.rows.shape[1], device=q.device, dtype=q.dtype).scatter_(2, x.index, 1.0)
        sequence, place = torch.arange(batch, device=q.device)[:, None], torch.arange(queries, device=q.device)
        asks = (sequence * x.tokens + x.index[:, :, -queries:] // length) * queries + place

        def over_keys(table: Tensor) -> Tensor:
            sums = torch.bmm(held, table.flatten(2)).view(members, batch * x.tokens * queries, heads, -1)
            return look_up(sums, asks)

        return (over_keys(weights * v) / over_keys(weights)).flatten(-2)  # the gradient of a reciprocal squares it: no room

    def _attention_once(self, block: dict[str, Tensor], x: Tensor) -> Tensor:
        """Self-attention for the last position alone: (member, batch, position, model) -> (member, batch, 1, model)."""
        h = self._norm(block, "attention_norm")(x)
        q = rearrange(linear(h[:, :, -1], block["q.weight"], block["q.bias"]), "m b (h d) -> m h b d", h=self.heads)
        w_k, w_v = (rearrange(block[f"{n}.weight"], "m i (h d) -> m h i d", h=self.heads) for n in "kv")
        q = rearrange(q @ w_k.mT, "m h b i -> m b h i") * (w_k.shape[-1] ** -0.5)
        pooled = rearrange((q @ h.mT).softmax(-1) @ h, "m b h i -> m h b i") @ w_v
        y = rearrange(pooled, "m h b d -> m b 1 (h d)") + block["v.bias"][:, None, None]
        return self._add(x[:, :, -1:], linear(y, block["o.weight"], block["o.bias"]))

    def _mlp(self, block: dict[str, Tensor], x: Tensor) -> Tensor:
        if not self.mlp:
            return x
        hidden = linear(self._norm(block, "mlp_norm")(x), block["up.weight"], block["up.bias"])
        hidden = F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden)
        return self._add(x, linear(hidden, block["down.weight"], block["down.bias"]))

    def observe(self, task, parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing beyond the losses."""
        return {}
