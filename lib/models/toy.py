"""The one-layer attention model that the theory is about (Zucchet et al. 2025, section 2.1)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lib import streams
from lib.config import Config


class Toy(Config):
    """y = W sum_t softmax(a)_t x_t, with parameters a (member, T), zero at the start, and W (member, d, d).

    start  "zero": W = 0; "normal": entries N(0, 1/d), as in the paper's figure 9
    """

    version: ClassVar[int] = 1
    kind: Literal["toy"] = "toy"
    start: Literal["zero", "normal"] = "zero"

    def check(self, task) -> None:
        """Raise ValueError where the model cannot do the task."""
        if getattr(task, "position", None) != "fixed" or task.features != task.outputs:
            raise ValueError("model toy: its attention sees positions only; set position = 'fixed' and feature = false")

    def init(self, task, seeds: Tensor) -> dict[str, Tensor]:
        """Initial parameters for each member's seed (member,)."""
        w = torch.zeros(len(seeds), task.d, task.d, device=seeds.device)
        if self.start == "normal":
            w = streams.normal(streams.key(seeds, "W"), (task.d, task.d)) * (streams.NORMAL / math.sqrt(task.d))
        return {"a": torch.zeros(len(seeds), task.T, device=seeds.device), "W": w}

    def forward(self, parameters: dict[str, Tensor], inputs: Tensor, reads: range, *, pattern=None, tap=None) -> Tensor:
        """Shapes: inputs (member, batch, T, d) -> (member, batch, 1, d)."""
        attention = parameters["a"].softmax(-1)
        pooled = torch.matmul(attention[:, None, None], inputs).squeeze(2)
        return (pooled @ parameters["W"].mT).unsqueeze(2)

    def observe(self, task, parameters: dict[str, Tensor], constants: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the theory follows, each (member,): `w` = <W*, W>/|W*|; `alpha`, attention on a relevant position;
        `delta_a` = a_relevant - mean a_irrelevant; `expected_loss`, exact, of the present parameters."""
        w_star, w, a = constants["W*"], parameters["W"].double(), parameters["a"].double()
        split = task.T - task.B
        attention = a.softmax(-1)
        mass = attention[:, split:].sum(-1)
        scatter = attention[:, :split].square().sum(-1) * w.square().sum((1, 2)) / task.d
        residual = (mass[:, None, None] * w - w_star).square().sum((1, 2)) / task.d
        return {
            "w": (w_star * w).sum((1, 2)) / w_star.norm(dim=(1, 2)),
            "alpha": mass / task.B,
            "delta_a": a[:, split:].mean(-1) - a[:, :split].mean(-1),
            "expected_loss": 0.5 * (scatter + residual),
        }
