"""What the two papers report beside what we measured, judged by rules written down before the runs (`amended` where not)."""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator

from lib.config import Config, InputError
from lib.files import write

REPOSITORY = Path(__file__).resolve().parents[1]
CLAIMS = REPOSITORY / "book" / "claims.yml"
PROFILES = ("quick", "laptop", "paper")  # from the least evidence to the most
VERDICTS = ("agrees", "direction", "disagrees", "not run")
ANY = (-math.inf, math.inf)


def _range(ends: list[float | None]) -> tuple[float, float]:
    low, high = (bound if end is None else end for end, bound in zip(ends, ANY, strict=True))
    if low > high:
        raise ValueError(f"a range is [low, high], with null for no bound (got {ends!r})")
    return low, high


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\n]+$")]
Range = Annotated[list[float | None], Field(min_length=2, max_length=2), AfterValidator(_range)]


class Reported(Config):
    """What the paper says, made short, and its numbers under the names that we measure."""

    text: Line
    numbers: dict[Name, float] = {}


class Claim(Config):
    """One claim of a paper and the rule that judges it."""

    id: Annotated[str, Field(pattern=r"^[ABR][1-9][0-9]?$")]
    paper: Literal["A", "B", "R"]  # R: what public reproductions of the two papers found
    chapter: Name
    shows: Line  # our figure, by its name
    figure: Line | None
    kind: Literal["exponent", "factor", "order", "shape"]
    claim: Line
    reported: Reported
    measures: Annotated[dict[Name, Line], Field(min_length=1)]
    rule: dict[Literal["agrees", "direction"], dict[Name, Range]]
    why: Line
    amended: Line | None = None  # what the rule was before a run, where it was changed after one, and why

    @model_validator(mode="after")
    def _well_formed(self) -> Claim:
        if self.id[0] != self.paper:
            raise ValueError(f"paper: {self.id} is not a claim of paper {self.paper}")
        agrees, direction = (self.rule.get(verdict, {}) for verdict in ("agrees", "direction"))
        if not set(agrees) == set(direction) == set(self.measures):
            raise ValueError(f"rule: give agrees and direction one range for each of {', '.join(self.measures)}")
        if strange := sorted(set(self.reported.numbers) - set(self.measures)):
            raise ValueError(f"reported: {strange[0]} is not among the measures")
        for name, (low, high) in agrees.items():
            if not direction[name][0] <= low <= high <= direction[name][1]:
                raise ValueError(f"rule: the range of {name} under agrees must lie inside the one under direction")
        return self

    def judge(self, measured: Mapping[str, float | None]) -> str:
        """The verdict on a number, or None (could not be measured), for each of the claim's measures.

        A claim disagrees by a number outside its range; where numbers alone that could not be measured stand in the way of
        a verdict, it has not been run.
        """
        if all(measured[name] is None for name, ends in self.rule["agrees"].items() if ends != ANY):
            return "not run"
        for verdict in ("agrees", "direction"):
            if all(_inside(measured[name], ends) for name, ends in self.rule[verdict].items()):
                return verdict
        known = {name: value for name, value in measured.items() if value is not None}
        return "not run" if all(_inside(value, self.rule["direction"][name]) for name, value in known.items()) else "disagrees"


def _inside(value: float | None, ends: tuple[float, float]) -> bool:
    return ends == ANY if value is None else ends[0] <= value <= ends[1]


class Record(Config):
    """What one chapter at one profile measured for a claim: numbers, 95 % intervals where there are any, runs."""

    measured: dict[Name, float | None]
    interval: dict[Name, list[float | None]]
    seeds: NonNegativeInt
    censored: NonNegativeInt
    note: str = ""


Records = TypeAdapter(dict[str, dict[str, Record]])  # one file a chapter: claim -> profile -> record


class Verdict(Record):
    """A record beside its claim, with the verdict of the claim's rule; prints as one line."""

    claim: Claim
    chapter: str
    profile: str

    @property
    def verdict(self) -> str:
        return self.claim.judge(self.measured)

    def text(self, name: str) -> str:
        """A measured number to three digits, with its interval where it has one."""
        numbers = (self.measured[name], *self.interval.get(name, ()))
        value, *ends = ("?" if x is None else f"{x:.4f}" if 0.99 <= x < 1 else f"{x:.3g}" for x in numbers)
        return "not measured" if value == "?" else value + (f" [{', '.join(ends)}]" if ends else "")

    def numbers(self) -> str:
        """Every measured number with its name."""
        return ", ".join(f"{name} {self.text(name)}" for name in self.measured)

    def outside(self) -> list[str]:
        """The measures whose numbers keep the verdict from being `agrees`."""
        return [name for name, ends in self.claim.rule["agrees"].items() if not _inside(self.measured[name], ends)]

    def __str__(self) -> str:
        runs = f"{self.profile}, " + (f"seeds {self.seeds}, censored {self.censored}" if self.seeds else "exact") + (f"; {self.note}" if self.note else "")
        source = "Reported by others" if self.claim.paper == "R" else "Paper"
        return f"{self.claim.id}: {self.verdict}. {source}: {self.claim.reported.text}. Here: {self.numbers()} ({runs})."

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return "**" + str(self).replace(". ", ".** ", 1)


def load(path: Path | str = CLAIMS) -> list[Claim]:
    """Every claim of a YAML file, in its order; a malformed one is an `InputError` that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return list(_parse(text, path))


@functools.lru_cache(maxsize=8)
def _parse(text: str, path: Path | str) -> tuple[Claim, ...]:
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: must be a list of claims, each a mapping")
    claims: dict[str, Claim] = {}
    for entry in entries:
        try:
            claim = Claim(**entry)
        except (InputError, TypeError) as error:
            raise InputError(f"{path}: claim {entry.get('id')}: {error}") from None
        if claim.id in claims:
            raise InputError(f"{path}: claim {claim.id} stands there twice; remove one")
        claims[claim.id] = claim
    return tuple(claims.values())


def record(
    id: str, *, chapter: str, profile: str, measured: Mapping[str, Any], seeds: int, censored: int = 0, note: str = ""
) -> Verdict:
    """Judge what a chapter measured for a claim and keep it for the scorecard, one record a claim and profile.

    `measured`: a number, an `Estimate`, or None (could not be measured) for every name of the claim's rule; `seeds`: how
    many; `censored`: runs that did not emerge. Anything unknown, missing or not finite raises `InputError`, nothing written.
    """
    claims = {claim.id: claim for claim in load()}
    _known("claim", id, claims)
    _known("chapter", chapter, sorted({claim.chapter for claim in claims.values()}))
    _known("profile", profile, PROFILES)
    claim = claims[id]
    for name in measured:
        _known(f"measure of {id}:", name, claim.measures)
    if missing := [name for name in claim.measures if name not in measured]:
        raise InputError(f"{id}: measured lacks {missing[0]}; give every measure, None where it could not be measured")
    values = {name: _split(f"{id}: {name}", measured[name]) for name in claim.measures}
    found = Record(
        measured={name: number for name, (number, _) in values.items()},
        interval={name: interval for name, (_, interval) in values.items() if interval},
        seeds=_count(f"{id}: seeds", seeds),
        censored=_count(f"{id}: censored", censored),
        note=" ".join(note.split()),
    )
    path = build_folder() / "measured" / f"{chapter}.json"
    records = _read(path) if path.exists() else {}
    records.setdefault(id, {})[profile] = found
    write(path, Records.dump_json(records, indent=1))
    return Verdict(**dict(found), claim=claim, chapter=chapter, profile=profile)


def _known(kind: str, name: Any, names: Any) -> None:
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
        raise InputError(f"unknown {kind} {name!r}; {hint}")


def _split(where: str, value: Any) -> tuple[float | None, list[float | None]]:
    """A measured value (a number, None, or anything with value, low and high) as number and interval."""
    ends = [value.low, value.high] if hasattr(value, "low") else []
    number = getattr(value, "value", value)
    try:
        number, *ends = (None if end is None else float(end) for end in (number, *ends))
    except (TypeError, ValueError):
        raise InputError(f"{where} must be a number, an estimate or None (got {value!r})") from None
    if number is not None and not math.isfinite(number):
        raise InputError(f"{where} is {number}; give None where it could not be measured")
    return number, [end if end is not None and math.isfinite(end) else None for end in ends]


def _count(where: str, value: Any) -> int:
    if not hasattr(value, "__index__") or value < 0:
        raise InputError(f"{where} must be a whole number from 0 (got {value!r})")
    return operator.index(value)


def build_folder() -> Path:
    """Where everything made from the sources goes: $BOOK_BUILD, else _build in the repository."""
    return Path(os.environ.get("BOOK_BUILD") or REPOSITORY / "_build")


def _read(path: Path) -> dict[str, dict[str, Record]]:
    try:
        return Records.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise InputError(f"{path}: not a record of measured claims; delete it and run its chapter again") from None


def recorded() -> dict[str, Verdict]:
    """The best record of each measured claim: one with a verdict, then the larger profile, then the claim's own chapter.

    Judged anew by today's rule; a record under other names than today's measures is left out.
    """
    best: dict[str, tuple[tuple, Verdict]] = {}
    claims = {claim.id: claim for claim in load()}
    for path in sorted((build_folder() / "measured").glob("*.json")):
        for id, profiles in _read(path).items():
            for profile, found in profiles.items():
                if id not in claims or profile not in PROFILES or set(found.measured) != set(claims[id].measures):
                    continue
                verdict = Verdict(**dict(found), claim=claims[id], chapter=path.stem, profile=profile)
                rank = (verdict.verdict != "not run", PROFILES.index(profile), path.stem == claims[id].chapter)
                if id not in best or rank > best[id][0]:
                    best[id] = rank, verdict
    return {id: verdict for id, (_, verdict) in best.items()}


def scorecard() -> list[dict[str, Any]]:
    """Every claim of the two papers, one row each in the order of claims.yml, with what was measured, or `not run`."""
    empty = {"measured": {}, "interval": {}, "seeds": 0, "censored": 0, "profile": None, "verdict": "not run"}
    rows, found = [], recorded()
    for claim in (claim for claim in load() if claim.paper != "R"):
        row = claim.model_dump(include={"id", "paper", "claim", "reported"}) | empty | {"chapter": claim.chapter}
        if claim.id in found:
            row |= {name: getattr(found[claim.id], name) for name in (*empty, "chapter")}
        rows.append(row)
    return rows


def write_scorecard(path: Path | str | None = None) -> Path:
    """Write the scorecard as JSON, whole or not at all; to <build>/scorecard.json unless told otherwise."""
    path = Path(path) if path else build_folder() / "scorecard.json"
    write(path, json.dumps(scorecard(), indent=1, allow_nan=False).encode())
    return path
