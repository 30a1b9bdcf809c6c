"""The four capabilities as prompts in English: a text, and the word that must come next.

Baherwani et al. (2026) name the capabilities and not the prompts; these are ours. Every word is common and short, so that
it is one token of Pythia's vocabulary with the space before it; where it is not, its first token is what counts.
"""

from __future__ import annotations

from typing import NamedTuple

from lib.language.corpus import CAPABILITIES

VERSION = 1  # raise it when a prompt changes: what was measured before counts no more
WORDS = ("river", "lamp", "stone", "bread", "cloud", "horse", "table", "paper", "glass", "train", "garden", "letter")
NAMES = ("John", "Mary", "Tom", "James", "Sarah", "David", "Anna", "Peter", "Lucy", "Paul", "Emma", "Mark")
PLACES, THINGS = ("store", "park", "school", "office"), ("book", "drink", "ball", "ring")
COUNT = len(WORDS)  # prompts a capability


class Prompt(NamedTuple):
    """What the model reads, and how it must go on."""

    text: str
    target: str


def _turn(words: tuple[str, ...], start: int, count: int, stride: int = 1) -> list[str]:
    return [words[(start + stride * i) % len(words)] for i in range(count)]


def _copying(i: int) -> Prompt:
    return Prompt(" ".join(_turn(WORDS, i, 6, 0)), " " + WORDS[i])


def _induction(i: int) -> Prompt:
    words = _turn(WORDS, i, 6, 5)
    return Prompt(" ".join(words + words[: 2 + i % 3]), " " + words[2 + i % 3])


def _pattern(i: int) -> Prompt:
    first = 1 + i % 3
    return Prompt("".join(f"{first + n}. {word}\n" for n, word in enumerate(_turn(WORDS, i, 3, 7))), str(first + 3))


def _ioi(i: int) -> Prompt:
    a, b = _turn(NAMES, i, 2, 5)
    giver, other = (a, b) if i % 2 else (b, a)
    place, thing = PLACES[i % len(PLACES)], THINGS[(i // 2) % len(THINGS)]
    return Prompt(f"When {a} and {b} went to the {place}, {giver} gave a {thing} to", f" {other}")


def prompts() -> dict[str, list[Prompt]]:
    """`COUNT` prompts of each capability.

    >>> for capability, examples in prompts().items():
    ...     print(f"{capability:9} {examples[0].text!r} -> {examples[0].target!r}")
    copying   'river river river river river river' -> ' river'
    induction 'river horse garden bread glass lamp river horse' -> ' garden'
    pattern   '1. river\\n2. paper\\n3. stone\\n' -> '4'
    ioi       'When John and David went to the store, David gave a book to' -> ' John'
    """
    makers = (_copying, _induction, _pattern, _ioi)
    return {name: [make(i) for i in range(COUNT)] for name, make in zip(CAPABILITIES, makers, strict=True)}
