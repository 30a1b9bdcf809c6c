"""The textbook Transformer and training loop, written as anybody would: what the book's own are measured and tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lib import streams
from lib.models import Transformer
from lib.models.residual import sinusoids
from lib.run import Run


class Block(nn.Module):
    """Pre-norm attention and MLP over the full sequence."""

    def __init__(self, c: Transformer):
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
        y = F.scaled_dot_product_attention(q, k, v, is_causal=c.causal).transpose(1, 2).reshape(b, t, -1)
        x = x + self.o(y) if c.residual else self.o(y)
        if not c.mlp:
            return x
        h = self.mlp_norm(x) if c.layer_norm else x
        h = self.down(F.gelu(self.up(h)) if c.activation == "gelu" else F.relu(self.up(h)))
        return x + h if c.residual else h


class PlainTransformer(nn.Module):
    """The model of a `Transformer` configuration, written as anybody would."""

    def __init__(self, c: Transformer, task):
        super().__init__()
        self.embed, self.read = nn.Linear(task.features, c.width), nn.Linear(c.width, task.outputs)
        self.position = nn.Embedding(task.length, c.width) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.final_norm = nn.LayerNorm(c.width) if c.layer_norm else nn.Identity()

    def forward(self, inputs, reads: range):
        """Shapes: (batch, position, feature) or tokens (batch, position) -> (batch, read, output)."""
        tokens = not inputs.is_floating_point()
        x = F.embedding(inputs, self.embed.weight.T) + self.embed.bias if tokens else self.embed(inputs)
        x = x + (self.position.weight if self.position else sinusoids(inputs.shape[1], self.embed.out_features, inputs.device))
        for block in self.blocks:
            x = block(x)
        return self.read(self.final_norm(x)[:, reads[0] :])

    def load(self, parameters: dict[str, torch.Tensor]) -> PlainTransformer:
        """Take one member's parameters, in their own precision."""
        own = dict(self.to(next(iter(parameters.values())).dtype).named_parameters())
        assert len(own) == len(parameters), set(own) ^ {self.name(k) for k in parameters}
        with torch.no_grad():
            for k, v in parameters.items():
                own[self.name(k)].copy_(self.transposed(k, v))
        return self

    @staticmethod
    def transposed(key: str, value: torch.Tensor) -> torch.Tensor:
        """Ours (in, out) -> torch's (out, in); tables stay."""
        return value.T if value.dim() == 2 and key != "position.weight" else value

    @staticmethod
    def name(key: str) -> str:
        """Our parameter name -> the module's."""
        key = f"blocks.{key}" if key[0].isdigit() else key
        return key.replace(".scale", ".weight").replace(".shift", ".bias")


class PlainLoop:
    """The textbook loop on one run's task, data stream and initial weights."""

    def __init__(self, run: Run, model: nn.Module | None = None, device: str = "cpu"):
        self.run, self.step, t = run, 0, run.training
        self.seed = torch.tensor([run.seed], device=device)
        self.constants = run.task.constants(self.seed)
        initial = {k: v[0] for k, v in run.model.init(run.task, self.seed).items()}
        self.model = model or PlainTransformer(run.model, run.task).to(device).load(initial)
        parameters = self.model.parameters()
        if t.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=t.learning_rate)
        elif t.optimizer == "adam":
            self.optimizer = torch.optim.Adam(parameters, lr=t.learning_rate)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=t.learning_rate, weight_decay=t.weight_decay)

    def advance(self, steps: int) -> None:
        """Take steps."""
        task = self.run.task
        for _ in range(steps):
            self.step += 1
            key = streams.key(self.seed, "train", self.step)
            inputs, targets, _ = task.batch(self.constants, key, self.run.training.batch)
            self.optimizer.zero_grad()
            task.loss(self.model(inputs[0], task.reads)[None], targets).mean().backward()
            self.optimizer.step()

    @torch.no_grad()
    def test_loss(self) -> float:
        """Loss on the run's held-out sequences."""
        task = self.run.task
        key = streams.key(self.seed, "test")
        inputs, targets, _ = task.batch(self.constants, key, self.run.training.eval_size, train=False)
        return task.loss(self.model(inputs[0], task.reads)[None], targets).mean().item()
