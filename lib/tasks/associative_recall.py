"""Associative recall (Zucchet et al. 2025, section 4): find the query's key in the context and say its value."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lib import streams
from lib.tasks.base import Batch, TokenTask

REPEATED_TOKENS = 2  # cross-sample repetition favours tokens 0 and 1; embeddings are learnt, so any two are alike


class AssociativeRecall(TokenTask):
    """key value key value ... query -> value. Keys and values come from one vocabulary, tied anew in every sequence.

    N_pairs   pairs in the context           N_tokens  vocabulary
    B         expected occurrences of the query's pair: one for certain, each other slot with (B - 1)/(N_pairs - 1)
    p         probability that the query is one of two fixed tokens, else uniform
    Test data have B = 1 and p = 0.

    >>> from lib.tasks.base import one_sequence
    >>> inputs, targets, pattern = one_sequence(AssociativeRecall(N_pairs=4, N_tokens=10))
    >>> print(inputs.tolist(), "->", targets.tolist())
    [7, 5, 4, 9, 9, 4, 0, 7, 9] -> [4]
    >>> print(pattern[0].int().tolist())
    [0, 0, 0, 0, 0, 1, 0, 0, 0]
    """

    version: ClassVar[int] = 1
    kind: Literal["associative_recall"] = "associative_recall"
    N_pairs: int = Field(8, ge=1, le=4096)
    N_tokens: int = Field(32, ge=2, le=65536)
    B: float = Field(1.0, ge=1)
    p: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self):
        if self.N_pairs >= self.N_tokens:
            raise ValueError(
                f"N_pairs: {self.N_pairs} distinct keys and one more token do not fit into N_tokens = {self.N_tokens}; "
                "lower N_pairs or raise N_tokens"
            )
        if self.B > self.N_pairs:
            raise ValueError(f"B: {self.B} expected occurrences do not fit into N_pairs = {self.N_pairs}; lower B")
        return self

    @property
    def length(self) -> int:
        """Positions of the input."""
        return 2 * self.N_pairs + 1

    @property
    def reads(self) -> range:
        """The query's position."""
        return range(self.length - 1, self.length)

    @property
    def features(self) -> int:
        """How many different tokens."""
        return self.N_tokens

    @property
    def outputs(self) -> int:
        """Logits of an answer."""
        return self.N_tokens

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of knowing nothing: ln N_tokens."""
        return math.log(self.N_tokens)

    @property
    def guessing_loss(self) -> float:
        """Cross-entropy of naming some value of the context: ln N_pairs; its accuracy is 1/N_pairs."""
        return math.log(self.N_pairs)

    def constants(self, seeds: Tensor) -> dict[str, Tensor]:
        """Nothing is kept from one sequence to the next."""
        return {}

    def batch(self, constants: dict[str, Tensor], key: Tensor, size: int, *, train: bool = True) -> Batch:
        """`size` fresh sequences a member from the stream `key` (member,)."""
        n, slots = self.N_tokens, self.N_pairs
        keys = streams.choose(streams.key(key, "keys"), (size,), n, slots)
        values = streams.choose(streams.key(key, "values"), (size,), n, slots)
        if train and self.p > 0:  # swap the query with the repeated token, so that keys stay distinct
            repeated = streams.coins(streams.key(key, "repeat"), (size, 1), self.p)
            fixed = streams.integers(streams.key(key, "which"), (size, 1), REPEATED_TOKENS)
            query = keys[..., :1]
            swapped = torch.where(keys == fixed, query, keys)
            swapped[..., :1] = fixed
            keys = torch.where(repeated, swapped, keys)
        holds = torch.arange(slots, device=key.device) == streams.integers(streams.key(key, "slot"), (size, 1), slots)
        if train and self.B > 1:
            holds = holds | streams.coins(streams.key(key, "copies"), (size, slots), (self.B - 1) / (slots - 1))
        pair = torch.where(holds, 0, (~holds).cumsum(-1))
        context = torch.stack([keys.gather(-1, pair), values.gather(-1, pair)], -1).flatten(-2)
        inputs = torch.cat([context, keys[..., :1]], -1)
        where = torch.stack([torch.zeros_like(holds), holds], -1).flatten(-2)
        pattern = torch.cat([where, torch.zeros_like(where[..., :1])], -1)[:, :, None]
        return Batch(inputs, values[..., :1], pattern)
