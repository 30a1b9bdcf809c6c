"""When did a capability appear, if a checkpoint must be loaded to find out? By binary search, and without its assumption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lib.config import InputError


class Found(NamedTuple):
    """The first checkpoint that has it (None: not even the last), the one before it (None: it was there at once), and all that were asked."""

    step: int | None
    before: int | None
    asked: dict[int, bool]


def binary_search(steps: Sequence[int], has: Callable[[int], bool]) -> Found:
    """Find a step that has it, right after one that has not, as Baherwani et al. (2026) do: about log2(n) questions.

    It is the first one that has it if what has appeared stays. `steps` ascend.

    >>> binary_search([0, 1, 2, 4, 8, 16], lambda step: step >= 4)
    Found(step=4, before=2, asked={16: True, 2: False, 4: True})
    """
    steps = _ascending(steps)
    asked = {steps[-1]: has(steps[-1])}
    if not asked[steps[-1]]:
        return Found(None, steps[-1], asked)
    low, high = -1, len(steps) - 1  # the place `low` has it not, or is none; `high` has it
    while high - low > 1:
        middle = (low + high) // 2
        asked[steps[middle]] = has(steps[middle])
        low, high = (low, middle) if asked[steps[middle]] else (middle, high)
    return Found(steps[high], steps[low] if low >= 0 else None, asked)


def scan(steps: Sequence[int], has: Callable[[int], bool]) -> Found:
    """Ask every step; what appeared may go again.

    >>> scan([0, 1, 2, 4], lambda step: step == 1).step
    1
    """
    steps = _ascending(steps)
    asked = {step: has(step) for step in steps}
    first = next((place for place, step in enumerate(steps) if asked[step]), None)
    if first is None:
        return Found(None, steps[-1], asked)
    return Found(steps[first], steps[first - 1] if first else None, asked)


def losses(found: Found) -> list[int]:
    """The steps, of those asked, that have not what the one asked before them in order has: empty if it is monotone."""
    steps = sorted(found.asked)
    return [b for a, b in zip(steps, steps[1:], strict=False) if found.asked[a] and not found.asked[b]]


def verdict(searched: Found, scanned: Found) -> str:
    """One line: whether the scan bears the binary search out.

    >>> has = {0: True, 1: False, 2: False, 4: True}
    >>> verdict(binary_search([*has], has.get), scan([*has], has.get))
    'binary search is wrong: it says step 4, and step 0 has it already; lost again at step 1'
    """
    lost = losses(Found(None, None, searched.asked | scanned.asked))
    again = f"lost again at step {', '.join(map(str, lost))}" if lost else ""
    if scanned.step is not None and (searched.step is None or scanned.step < searched.step):
        said = f"step {searched.step}" if searched.step is not None else "never"
        return f"binary search is wrong: it says {said}, and step {scanned.step} has it already" + (f"; {again}" if again else "")
    return "binary search agrees with the scan" + (f", yet {again}" if again else "")


def _ascending(steps: Sequence[int]) -> list[int]:
    if not steps or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
        raise InputError("steps: give at least one checkpoint, in ascending order")
    return list(steps)
