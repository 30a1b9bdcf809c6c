"""The textbook Transformer, one nn.Module over the full sequence: what the book's fast model must equal."""

import torch
import torch.nn.functional as F
from torch import nn

from lib.models.transformer import sinusoids


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, inner = c, c.attention_width
        self.q, self.k = nn.Linear(c.width, inner), nn.Linear(c.width, inner, bias=False)
        self.v, self.o = nn.Linear(c.width, inner), nn.Linear(inner, c.width)
        if c.mlp:
            self.up, self.down = nn.Linear(c.width, c.mlp_factor * c.width), nn.Linear(c.mlp_factor * c.width, c.width)
        if c.layer_norm:
            self.attention_norm = nn.LayerNorm(c.width)
            self.mlp_norm = nn.LayerNorm(c.width) if c.mlp else None

    def forward(self, x):
        c, (b, t, _) = self.c, x.shape
        h = self.attention_norm(x) if c.layer_norm else x
        q, k, v = (m(h).view(b, t, c.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if c.causal:
            scores = scores.masked_fill(torch.ones(t, t, dtype=bool).triu(1), float("-inf"))
        y = self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        x = x + y if c.residual else y
        if not c.mlp:
            return x
        h = self.mlp_norm(x) if c.layer_norm else x
        y = self.down(F.gelu(self.up(h)) if c.activation == "gelu" else F.relu(self.up(h)))
        return x + y if c.residual else y


class PlainTransformer(nn.Module):
    """Takes a `Transformer` configuration, a task, and one member's parameters."""

    def __init__(self, c, task, parameters):
        super().__init__()
        self.embed, self.read = nn.Linear(task.features, c.width), nn.Linear(c.width, task.outputs)
        self.position = nn.Embedding(task.length, c.width) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.final_norm = nn.LayerNorm(c.width) if c.layer_norm else nn.Identity()
        self.to(next(iter(parameters.values())).dtype)
        own = dict(self.named_parameters())
        assert len(own) == len(parameters), set(own) ^ {name(k) for k in parameters}
        with torch.no_grad():
            for k, v in parameters.items():
                own[name(k)].copy_(transposed(k, v))

    def forward(self, inputs, reads):
        if not inputs.is_floating_point():
            inputs = F.one_hot(inputs, self.embed.in_features).to(self.embed.weight.dtype)
        x = self.embed(inputs)
        x = x + (self.position.weight if self.position else sinusoids(inputs.shape[1], self.embed.out_features))
        for block in self.blocks:
            x = block(x)
        return self.read(self.final_norm(x)[:, list(reads)])


def transposed(key: str, value):
    """Ours (in, out) -> torch's (out, in); tables stay."""
    return value.T if value.dim() == 2 and key != "position.weight" else value


def name(key: str) -> str:
    """Our parameter name -> the module's."""
    key = f"blocks.{key}" if key[0].isdigit() else key
    return key.replace(".scale", ".weight").replace(".shift", ".bias")
