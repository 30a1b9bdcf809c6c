"""A small language (after Baherwani et al. 2026, section on Pythia): next-word prediction, and four capabilities in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lib import streams
from lib.language import corpus
from lib.language.corpus import CAPABILITIES, GAP, MARKERS
from lib.tasks.base import Batch, TokenTask

KINDS = {"filler": "w", "nouns": "n", "numbers": "", "names": "A", "places": "p", "things": "t"}  # with their words' prefix
SENTENCE = 13  # words of "when Ann and Bob went to school , Ann gave milk to Bob"


class Language(TokenTask):
    """Filler text with at most one passage a sequence, in which what comes next can be known by looking back.

    copying    copy: a b c again: -> a           induction  a b c (filler) a b -> c
    pattern    4 a 5 b 6 c -> 7                  ioi        when A and B went to P , A gave T to -> B

    length     words that a model reads          filler, nouns, numbers, names, places, things   words of each kind
    span       nouns copied or repeated          items, gap   entries of a list; most filler words between a span and its return
    rates      share of the sequences with each capability's passage, in the order above; the others are all filler
    branching, trigram, zipf    the filler's chain: successors a context, share that depends on two words, Zipf's exponent
    held_out   one combination of nouns (and first number), or of names, place and thing, in so many is kept for the tests
    grammar    seed of the chain: the language is the same for all runs that share it

    Every word is predicted from those before it. Of held-out sequences the first half are text as in training, with held-out
    combinations; the others are prompts, the four capabilities in turn, whose answers `answers` finds. A model that can only
    guess among the candidates in the prompt is right with probability `guessing`.

    >>> from lib.tasks.base import one_sequence
    >>> task = Language(length=10, rates=[0.3, 0.0, 0.3, 0.0])
    >>> inputs, targets, pattern = one_sequence(task)
    >>> print("reads   ", task.text(inputs))
    reads    w17 w8 w1 w3 w3 copy: n29 n3 n20 again:
    >>> print("predicts", task.text(targets))
    predicts w8 w1 w3 w3 copy: n29 n3 n20 again: n29
    >>> (_, capability, position), = task.answers(1)
    >>> source = pattern[position].nonzero().item()
    >>> print(f"{capability}: {task.text(targets[[position]])} after word {position}, found at word {source}")
    copying: n29 after word 9, found at word 6
    """

    version: ClassVar[int] = 1
    kind: Literal["language"] = "language"
    length: int = Field(40, ge=4, le=4096)
    filler: int = Field(64, ge=2, le=1024)
    nouns: int = Field(32, ge=2, le=65536)
    numbers: int = Field(12, ge=2, le=4096)
    names: int = Field(16, ge=2, le=4096)
    places: int = Field(8, ge=1, le=4096)
    things: int = Field(8, ge=2, le=4096)
    span: int = Field(3, ge=1, le=64)
    items: int = Field(3, ge=1, le=64)
    gap: int = Field(8, ge=0, le=1024)
    rates: list[float] = Field([0.15, 0.15, 0.15, 0.15], min_length=4, max_length=4)
    branching: int = Field(4, ge=1, le=64)
    trigram: float = Field(0.5, ge=0, le=1)
    zipf: float = Field(1.0, ge=0, le=4)
    held_out: int = Field(4, ge=2, le=64)
    grammar: int = Field(0, ge=0, lt=1 << 62)

    @model_validator(mode="after")
    def _possible(self):
        if min(self.rates) < 0 or sum(self.rates) > 1 + 1e-9:
            raise ValueError(f"rates: must be shares that sum to at most 1, not {self.rates}")
        if (most := max(self.span, self.items)) > (room := self.nouns // self.held_out):
            raise ValueError(f"nouns: {self.nouns} have {room} of each class mod held_out, too few for {most} different ones; raise nouns")
        if self.things < self.held_out:
            raise ValueError(f"things: {self.things} are too few for held_out = {self.held_out}; raise things")
        if self.items >= self.numbers:
            raise ValueError(f"numbers: a list of {self.items} and its next number do not fit into {self.numbers}; raise numbers")
        if (longest := max(length for _, length in self._spans())) > self.length + 1:
            raise ValueError(f"length: a passage has up to {longest} words and length + 1 are there; raise length")
        return self

    def _spans(self) -> list[tuple[int, int]]:
        """(where the answer stands, words) of the longest passage of each capability; (0, 0) where it never occurs."""
        spans = [(self.span + 2, 2 * self.span + 2), (2 * self.span + self.gap - 1, 2 * self.span + self.gap)]
        spans += [(2 * self.items, 2 * self.items + 1), (SENTENCE - 1, SENTENCE)]
        return [span if rate else (0, 0) for span, rate in zip(spans, self.rates, strict=True)]

    # --------------------------------------------------------------------------------------------------- vocabulary
    def _kinds(self) -> dict[str, range]:
        """The word numbers of each kind."""
        kinds, start = {}, 0
        for kind, count in (*((k, getattr(self, k)) for k in KINDS), ("markers", len(MARKERS))):
            kinds[kind], start = range(start, start + count), start + count
        return kinds

    def text(self, tokens: Tensor) -> str:
        """Words for word numbers (position,): filler w0 w1 ..., nouns n0 ..., numbers, names A0 ..., places p0 ..., things t0 ..."""
        words = [f"{prefix}{i}" for kind, prefix in KINDS.items() for i in range(getattr(self, kind))] + [*MARKERS]
        return " ".join(words[token] for token in tokens.tolist())

    @property
    def reads(self) -> range:
        """All positions."""
        return range(self.length)

    @property
    def features(self) -> int:
        """Words of the language."""
        return sum(len(words) for words in self._kinds().values())

    @property
    def outputs(self) -> int:
        """Logits of an answer."""
        return self.features

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of a uniform guess among all words."""
        return math.log(self.features)

    @property
    def guessing(self) -> dict[str, float]:
        """How often a guess among the candidates in the prompt is right: of its nouns, its numbers and their next ones, its names."""
        return dict(zip(CAPABILITIES, (1 / self.span, 1 / self.span, 1 / (self.items + 1), 1 / 2), strict=True))

    @property
    def filler_entropy(self) -> float:
        """Entropy of a sequence that is all filler, nats a word: the least loss on it."""
        table = corpus.chain(self.filler, self.branching, self.zipf, self.grammar).numpy()
        return corpus.filler_entropy(self.length + 1, table, self._slots(), self.zipf)

    def _slots(self) -> tuple[float, ...]:
        return corpus.slots(self.branching, self.zipf, self.trigram)

    # -------------------------------------------------------------------------------------------------------- data
    def constants(self, seeds: Tensor) -> dict[str, Tensor]:
        """What may follow two words of filler, one language for all seeds: chain (member, word, word, slot)."""
        table = corpus.chain(self.filler, self.branching, self.zipf, self.grammar, seeds.device)
        return {"chain": table.expand(len(seeds), -1, -1, -1)}

    def answers(self, size: int) -> list[tuple[int, str, int]]:
        """Of `size` held-out sequences the prompts: (which sequence, its capability, the position at which its answer is read)."""
        taught = [name for name, rate in zip(CAPABILITIES, self.rates, strict=True) if rate]
        room = self.length + 1 - max(answer for answer, _ in self._spans())  # an answer stands anywhere late enough for all
        return [
            (i, taught[i % len(taught)], self.length - 1 - i // len(taught) % room) for i in range(size // 2 if taught else size, size)
        ]

    def _prompts(self, size: int, device) -> tuple[Tensor, Tensor, Tensor]:
        """`answers` as tensors, the capabilities as numbers."""
        rows = [(i, CAPABILITIES.index(name), position) for i, name, position in self.answers(size)]
        return tuple(torch.tensor(rows, dtype=torch.long, device=device).view(-1, 3).unbind(1))

    def batch(self, constants: dict[str, Tensor], key: Tensor, size: int, *, train: bool = True) -> Batch:
        """`size` fresh sequences a member from the stream `key` (member,); the pattern has the row of a passage's answer alone."""
        length, device = self.length, key.device
        kind = corpus.categorical(streams.key(key, "kind"), (size,), (*self.rates, 1 - sum(self.rates)))
        if not train:
            prompts, which, where = self._prompts(size, device)
            kind[:, prompts] = which
        draws = streams.integers(streams.key(key, "draws"), (size, 5), 1 << 62).unbind(-1)
        options, mine = self._passages(key, size, draws[1:], held_out=not train), kind[..., None]
        passage = options.words.gather(2, mine[..., None].expand(-1, -1, -1, options.words.shape[-1]))[:, :, 0]
        count, answer, source = (part.gather(2, mine)[..., 0] for part in options[1:])
        start = draws[0] % (length + 2 - count)
        if not train:
            start[:, prompts] = where + 1 - answer[:, prompts]
        at = torch.arange(length + 1, device=device) - start[..., None]
        said = passage.gather(-1, at.clamp(0, passage.shape[-1] - 1))
        said = torch.where((at >= 0) & (at < passage.shape[-1]), said, GAP)
        text = corpus.filler(streams.key(key, "filler"), size, length + 1, constants["chain"][0], self._slots(), self.zipf)
        text = torch.where(said == GAP, text.gather(-1, ((said == GAP).cumsum(-1) - 1).clamp(min=0)), said)
        told = kind < len(CAPABILITIES)
        cell = torch.where(told, (start + answer - 1) * length + start + source, 0)
        pattern = torch.zeros(len(key), size, length * length, dtype=torch.bool, device=device)
        pattern.scatter_(2, cell[..., None], told[..., None])
        return Batch(text[..., :-1], text[..., 1:], pattern.unflatten(-1, (length, length)))

    def _passages(self, key: Tensor, size: int, draws: Sequence[Tensor], held_out: bool) -> corpus.Passage:
        """A passage of each kind for each sequence, the last of none: axes (member, size, kind)."""
        start = {kind: numbers[0] for kind, numbers in self._kinds().items()}
        markers = range(start["markers"], self.features)

        def order(name: str, high: int, count: int) -> Tensor:
            return streams.choose(streams.key(key, name), (size,), high, count)

        limits = (self.places, 2, self.numbers - self.items, self.gap + 1)
        place, first, number, gap = (draw % limit for draw, limit in zip(draws, limits, strict=True))
        nouns, things, names = order("nouns", self.nouns, self.nouns), order("things", self.things, self.things), order("names", self.names, 2)
        repeated = corpus.combination(nouns, self.span, 0, self.held_out, held_out) + start["nouns"]
        listed = corpus.combination(nouns, self.items, number, self.held_out, held_out) + start["nouns"]
        thing = corpus.combination(things, 1, names.sum(-1) + place, self.held_out, held_out)[..., 0] + start["things"]
        return corpus.stack([
            corpus.copying(repeated, *markers[:2]),
            corpus.induction(repeated, gap, self.gap),
            corpus.numbered(listed, number + start["numbers"]),
            corpus.indirect_object(names + start["names"], place + start["places"], thing, first == 1, markers[2:]),
            corpus.nothing(gap),
        ])

    # ----------------------------------------------------------------------------------------------------- measures
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`accuracy` over all words; `text_loss` on text as in training and `filler_loss` on its filler; of each capability's prompts the
        share that greedy decoding answers rightly, `<capability>_accuracy`, and the mean `<capability>_probability` of the right word."""
        size = targets.shape[1]
        prompts, which, where = self._prompts(size, targets.device)
        text = slice(0, size // 2 if len(prompts) else size)
        loss, filler = self.token_loss(outputs[:, text], targets[:, text]), targets[:, text] < self.filler
        measured = {"text_loss": loss.mean((1, 2)), "filler_loss": (loss * filler).sum((1, 2)) / filler.sum((1, 2))}
        logits, right = outputs[:, prompts, where], targets[:, prompts, where]
        hit = (logits.argmax(-1) == right).float()
        probability = logits.softmax(-1).gather(-1, right[..., None])[..., 0]
        for c, name in enumerate(CAPABILITIES):
            if (which == c).any():
                measured |= {f"{name}_accuracy": hit[:, which == c].mean(1), f"{name}_probability": probability[:, which == c].mean(1)}
        return super().metrics(outputs, targets) | measured
