"""One-dimensional cellular automata (Baherwani et al. 2026): infer the rule in context, then look at the neighbourhood."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lib import streams
from lib.config import InputError
from lib.tasks.base import Batch, StateSequence


class CellularAutomaton(StateSequence):
    """`states` states of S cells, flattened to one sequence; each follows from the one before by a rule of its sequence.

    colours  values of a cell               window  cells that a rule looks at, odd
    k        times the rule is applied from state to state; the neighbourhood spans k (window - 1) + 1 cells
    pool     rule tables drawn once a run, one of them a sequence; 0: a fresh table for every sequence
    boundary "circular", or "zero": cells beyond the ends are 0

    >>> from lib.tasks.base import one_sequence
    >>> inputs, targets, pattern = one_sequence(CellularAutomaton(S=5, states=3, colours=2))
    >>> print(inputs.tolist(), "->", targets.tolist())
    [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1] -> [1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    >>> print(pattern[1].int().tolist())
    [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    """

    version: ClassVar[int] = 1
    kind: Literal["cellular_automaton"] = "cellular_automaton"
    S: int = Field(16, ge=1, le=1024)
    states: int = Field(16, ge=2, le=256)
    colours: int = Field(4, ge=2, le=64)
    window: int = Field(3, ge=1, le=9)
    k: int = Field(1, ge=1, le=64)
    pool: int = Field(256, ge=0, le=1 << 20)
    boundary: Literal["circular", "zero"] = "circular"

    @model_validator(mode="after")
    def _possible(self):
        if self.window % 2 == 0:
            raise ValueError(f"window: {self.window} has no middle cell; choose an odd number")
        if self.span > self.S:
            raise ValueError(
                f"k: {self.k} applications of a window of {self.window} span {self.span} cells, more than S = {self.S}; "
                "lower k or window, or raise S"
            )
        if self.colours**self.window > 1 << 20:
            raise ValueError(f"window: a rule table of {self.colours}^{self.window} entries is too large; lower window or colours")
        if self.pool > 1 and math.log(self.pool) > self.colours**self.window * math.log(self.colours):
            raise ValueError(f"pool: {self.pool} rules are more than the {self.colours ** self.colours ** self.window} that exist; lower pool")
        return self

    @property
    def span(self) -> int:
        """Cells of the neighbourhood."""
        return self.k * (self.window - 1) + 1

    @property
    def features(self) -> int:
        """Colours."""
        return self.colours

    @property
    def outputs(self) -> int:
        """Logits of an answer."""
        return self.colours

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of a fair die: ln colours."""
        return math.log(self.colours)

    def constants(self, seeds: Tensor) -> dict[str, Tensor]:
        """The pool's rule tables (member, pool, colours^window) int64; none if every sequence has its own."""
        return {"rules": streams.integers(streams.key(seeds, "rules"), (self.pool, self.colours**self.window), self.colours)} if self.pool else {}

    def draw(self, constants: dict[str, Tensor], key: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Histories (member, size, states, S), the rule table of each (member, size, entries), and its place in the pool."""
        entries = self.colours**self.window
        if self.pool:
            which = streams.integers(streams.key(key, "rule"), (size,), self.pool)
            table = constants["rules"].gather(1, which[..., None].expand(-1, -1, entries))
        else:
            which = torch.zeros(len(key), size, dtype=torch.int64, device=key.device)
            table = streams.integers(streams.key(key, "table"), (size, entries), self.colours)
        history = [streams.integers(key, (size, self.S), self.colours)]
        for _ in range(self.states - 1):
            history.append(self.advance(history[-1], table))
        return torch.stack(history, 2), table, which

    def advance(self, cells: Tensor, table: Tensor) -> Tensor:
        """The next state: k applications of the rule. Shapes: (..., S), (..., entries) -> (..., S)."""
        for _ in range(self.k):
            cells = table.gather(-1, self._entry(cells))
        return cells

    def _entry(self, cells: Tensor) -> Tensor:
        """Which entry of the rule table decides each cell's next colour. Shapes: (..., S) -> (..., S)."""
        reach = self.window // 2
        if self.boundary == "circular":
            padded = torch.cat([cells[..., self.S - reach :], cells, cells[..., :reach]], -1)
        else:
            padded = torch.nn.functional.pad(cells, (reach, reach))
        index = torch.zeros_like(cells)
        for offset in range(self.window):
            index = index * self.colours + padded[..., offset : offset + self.S]
        return index

    def best_loss(self, constants: dict[str, Tensor], batch: Batch) -> Tensor:
        """Least expected cross-entropy of each answer given all cells before it, nats: (member, batch, read).

        With a pool: Bayes' rule over the pool's tables, all alike at the start; a table is out once it has been wrong. With
        fresh tables and k = 1: ln(colours) for an entry that the sequence has not used yet, 0 for one that it has. With
        fresh tables and k > 1 the posterior is over tables that explain states between which nothing is seen: InputError.
        """
        if not self.pool and self.k > 1:
            raise InputError(f"best_loss: not known for fresh tables and k = {self.k}; set k = 1 or give a pool")
        tokens = torch.cat([batch.inputs, batch.targets[..., -1:]], -1)
        states = tokens.unflatten(-1, (self.states, self.S))
        before, answers = states[:, :, :-1], states[:, :, 1:].flatten(2)
        if not self.pool:
            entry = self._entry(before).flatten(2)
            used = (entry[..., :, None] == entry[..., None, :]).tril(-1).any(-1)
            return torch.where(used, 0.0, self.chance_loss)
        left = torch.zeros(answers.shape, device=answers.device)  # tables that explain all cells so far, and this one
        right = torch.zeros_like(left)
        for table in constants["rules"].split(1, 1):
            table = table[:, :, None].expand(-1, *before.shape[1:3], -1)
            said = self.advance(before, table)
            fits = (said.flatten(2) == answers).float().cumprod(-1)
            right += fits
            left += torch.cat([torch.ones_like(fits[..., :1]), fits[..., :-1]], -1)
        return (left / right).log()

    def partial_loss(self, constants: dict[str, Tensor]) -> Tensor:
        """Least expected loss of an answer when the rule is known but only n cells of its neighbourhood are seen, nats.

        (member, n), n from 0 to the span, the mean over the pool's tables. Each cell of the state before is uniform,
        as in the first state; of all choices of n cells the best one counts for each table. A loss below entry n needs
        more than n cells. InputError for fresh tables and for more than 2^20 neighbourhoods.
        """
        if not self.pool or self.colours**self.span > 1 << 20:
            raise InputError(
                "partial_loss: needs a pool of rules and at most 2^20 neighbourhoods; give a pool, or lower k, window, colours"
            )
        strip = self.model_copy(update={"S": self.span})
        tables, shape = constants["rules"].flatten(0, 1), (self.colours,) * self.span
        colours = torch.arange(self.colours, device=tables.device)
        cells = torch.cartesian_prod(*[colours] * self.span).view(-1, self.span)
        losses = torch.full((len(tables), self.span + 1), self.chance_loss, device=tables.device)
        for table, best in zip(tables, losses, strict=True):
            colour = strip.advance(cells, table.expand(len(cells), -1))[:, self.span // 2]
            law = torch.nn.functional.one_hot(colour, self.colours).float().view(*shape, self.colours)
            for n in range(self.span + 1):
                for hidden in itertools.combinations(range(self.span), self.span - n):
                    seen = law.mean(hidden) if hidden else law
                    best[n] = torch.minimum(best[n], torch.special.entr(seen).sum(-1).mean())
        return losses.unflatten(0, constants["rules"].shape[:2]).mean(1)

    def batch(self, constants: dict[str, Tensor], key: Tensor, size: int, *, train: bool = True) -> Batch:
        """`size` fresh sequences a member from the stream `key` (member,); training and test data are alike."""
        cells = self.draw(constants, key, size)[0].flatten(2)
        pattern = self.pattern(key.device).expand(len(key), size, -1, -1)
        return Batch(cells[..., :-1], cells[..., self.S :], pattern)

    def pattern(self, device=None) -> Tensor:
        """The neighbourhood in the state before: (read, position) bool."""
        target = torch.arange(self.S, self.states * self.S, device=device)[:, None]
        offset = torch.arange(-(self.span // 2), self.span // 2 + 1, device=device)
        cell = target % self.S + offset
        there = (cell >= 0) & (cell < self.S) | (self.boundary == "circular")
        position = (target // self.S - 1) * self.S + cell % self.S
        mask = torch.zeros(len(target), self.states * self.S, dtype=torch.bool, device=device)
        return mask.scatter_(1, position, there)[:, :-1]

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`accuracy`, and `state_i`, the loss of each state after the first: later states have seen more of the rule."""
        states = self.token_loss(outputs, targets).unflatten(-1, (self.states - 1, self.S)).mean((1, 3))
        by_state = {f"state_{i + 1}": states[:, i] for i in range(self.states - 1)}
        return super().metrics(outputs, targets) | by_state
