"""A generated language: filler text of a random n-gram chain, and passages that can be continued only by looking back.

All of it is tensors of word numbers with a leading `member` axis, drawn from `lib.streams`. A passage is a row of word
numbers in which GAP stands for a word of filler text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import xlogy
from torch import Tensor

from lib import streams

CAPABILITIES = ("copying", "induction", "pattern", "ioi")
MARKERS = ("copy:", "again:", "when", "and", "went", "to", ",", "gave")
GAP = -1
GRID = 1 << 53  # probabilities are integers over this


# --------------------------------------------------------------------------------------------------------- filler text
@functools.cache
def zipf(count: int, exponent: float) -> tuple[float, ...]:
    """Zipf's law over ranks 1 .. count: probabilities proportional to rank^-exponent.

    >>> [round(p, 3) for p in zipf(3, 1.0)]
    [0.545, 0.273, 0.182]
    """
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    return tuple((weights / weights.sum()).tolist())


@functools.cache
def _edges(probabilities: tuple[float, ...], device: str) -> Tensor:
    return torch.from_numpy(np.rint(np.cumsum(probabilities)[:-1] * GRID).astype(np.int64)).to(device)


def categorical(key: Tensor, shape: tuple[int, ...], probabilities: tuple[float, ...]) -> Tensor:
    """Draws of a category, equal bits on every device. Shapes: (member,) -> (member, *shape) int64."""
    edges = _edges(probabilities, str(key.device))
    return torch.searchsorted(edges, streams.integers(key, shape, GRID), right=True)


def chain(words: int, branching: int, exponent: float, seed: int, device=None) -> Tensor:
    """What may follow two words of filler: (word before, word, slot) int64, of `words` words by Zipf's law.

    The first `branching` slots depend on the word alone, as in a bigram model, the others on both, as in a trigram model.
    """
    key, probabilities = torch.tensor([seed], device=device), zipf(words, exponent)
    bigram = categorical(streams.key(key, "bigram"), (1, words, branching), probabilities)[0]
    trigram = categorical(streams.key(key, "trigram"), (words, words, branching), probabilities)[0]
    return torch.cat([bigram.expand(words, -1, -1), trigram], -1)


@functools.cache
def slots(branching: int, exponent: float, trigram: float) -> tuple[float, ...]:
    """Probabilities of the chain's slots: shares 1 - trigram and trigram, each split by Zipf's law."""
    share = np.array(zipf(branching, exponent))
    return tuple(np.concatenate([(1 - trigram) * share, trigram * share]).tolist())


def filler(key: Tensor, size: int, length: int, table: Tensor, weights: tuple[float, ...], exponent: float) -> Tensor:
    """Filler text: two words by Zipf's law, then the chain. Shapes: key (member,), table (word, word, slot) ->
    (member, size, length) int64."""
    words, _, choices = table.shape
    first = categorical(streams.key(key, "first"), (size, 2), zipf(words, exponent))
    slot = categorical(streams.key(key, "slot"), (size, length), weights)
    after = torch.arange(words, device=key.device)[None, :, None] * words + table  # the pair of words that comes next,
    after = after.flatten() * choices  # as the place in the table where its slots begin
    state = (first[..., 0] * words + first[..., 1]) * choices
    states = []
    for t in range(length):
        states.append(state)
        state = after.take(state + slot[..., t])
    pairs = torch.stack(states, -1) // choices
    return torch.cat([pairs[..., :1] // words, pairs[..., :-1] % words], -1)


def filler_entropy(length: int, table: np.ndarray, weights: tuple[float, ...], exponent: float) -> float:
    """Entropy of `length` words of filler, nats a word: what a model that knows the chain attains on filler alone."""
    words, _, choices = table.shape
    table, weight = table.reshape(-1, choices), np.array(weights)
    alike = (table[:, :, None] == table[:, None, :]) @ weight  # (pair of words, slot): probability of the slot's word
    uncertainty = -xlogy(weight, alike).sum(1)
    after = (np.arange(words * words)[:, None] % words * words + table).ravel()  # the pair that comes next
    unigram = np.array(zipf(words, exponent))
    pair, total = np.outer(unigram, unigram).ravel(), -2 * (unigram * np.log(unigram)).sum()
    for _ in range(length - 2):
        total += pair @ uncertainty
        pair = np.bincount(after, (pair[:, None] * weight).ravel(), minlength=words * words)
    return total / length


# ------------------------------------------------------------------------------------------------------------ passages
class Passage(NamedTuple):
    """Words (..., n), padded with GAP; and, each (...): how many there are, where the answer stands, where it is found."""

    words: Tensor
    length: Tensor
    answer: Tensor
    source: Tensor


def _passage(words: Tensor, answer: int, source: Tensor | int) -> Passage:
    one = torch.ones_like(words[..., 0])
    return Passage(words, one * words.shape[-1], one * answer, one * source)


def nothing(like: Tensor) -> Passage:
    """No passage; like (...)."""
    return Passage(torch.full_like(like, GAP)[..., None], *[torch.zeros_like(like)] * 3)


def stack(passages: Sequence[Passage]) -> Passage:
    """Side by side, with one more axis `kind` behind the others of all four."""
    most = max(passage.words.shape[-1] for passage in passages)
    words = torch.stack([F.pad(p.words, (0, most - p.words.shape[-1]), value=GAP) for p in passages], -2)
    return Passage(words, *(torch.stack(parts, -1) for parts in zip(*(p[1:] for p in passages), strict=True)))


def combination(order: Tensor, count: int, base: Tensor | int, modulus: int, held_out: bool) -> Tensor:
    """The first `count` - 1 of a random order and the first after them that makes the combination (not) a held-out one.

    Held out is what has (base + sum) mod modulus = 0, in whatever order. Shapes: order (..., n), base (...) -> (..., count).
    """
    head, rest = order[..., : count - 1], order[..., count - 1 :]
    sums = (head.sum(-1) + base)[..., None] + rest
    fits = (sums % modulus == 0) == held_out
    return torch.cat([head, rest.gather(-1, fits.int().argmax(-1, keepdim=True))], -1)


def copying(nouns: Tensor, copy: int, again: int) -> Passage:
    """copy: a b c again: -> a b c. The answer is the first; nouns (..., count)."""
    mark = torch.ones_like(nouns[..., :1])
    return _passage(torch.cat([mark * copy, nouns, mark * again, nouns], -1), nouns.shape[-1] + 2, 1)


def induction(nouns: Tensor, gap: Tensor, longest: int) -> Passage:
    """a b c (`gap` <= `longest` words of filler) a b -> c. Shapes: nouns (..., count), gap (...)."""
    count = nouns.shape[-1]
    at = torch.arange(2 * count + longest, device=nouns.device) - count - gap[..., None]
    words = torch.where((at >= 0) & (at < count), nouns.gather(-1, at.clamp(0, count - 1)), GAP)
    words[..., :count] = nouns
    length = 2 * count + gap
    return Passage(words, length, length - 1, torch.full_like(gap, count - 1))


def numbered(nouns: Tensor, first: Tensor) -> Passage:
    """4 a 5 b 6 c -> 7, found at the number before; nouns (..., count), the first number as a word's number (...)."""
    count = nouns.shape[-1]
    numbers = first[..., None] + torch.arange(count + 1, device=nouns.device)
    entries = torch.stack([numbers[..., :-1], nouns], -1).flatten(-2)
    return _passage(torch.cat([entries, numbers[..., -1:]], -1), 2 * count, 2 * count - 2)


def indirect_object(names: Tensor, place: Tensor, thing: Tensor, first: Tensor, markers: Sequence[int]) -> Passage:
    """when Ann and Bob went to school , Ann gave milk to -> Bob. Where `first` (bool) the first name gives, else the second.

    Shapes: names (..., 2), place, thing and first (...); the words' numbers.
    """
    when, and_, went, to, comma, gave = (torch.full_like(place, marker) for marker in markers)
    a, b = names.unbind(-1)
    giver, other = torch.where(first, a, b), torch.where(first, b, a)
    words = torch.stack([when, a, and_, b, went, to, place, comma, giver, gave, thing, to, other], -1)
    return _passage(words, words.shape[-1] - 1, torch.where(first, 3, 1))
