"""The scorecard for a reader: tables of claims and rules, and a reading in words that the numbers write."""

from __future__ import annotations

import re
from html import escape

import pandas as pd
from pandas.io.formats.style import Styler

from lib import claims, published
from lib.plots import words

TITLES = {"A": "Paper A", "B": "Paper B", "R": "What public reproductions found"}
COLORS = {"agrees": "#00664b", "direction": "#0072b2", "disagrees": "#b34700", "not run": "#595959"}


def counts() -> pd.DataFrame:
    """Claims by paper (rows) and verdict (columns)."""
    card = pd.DataFrame(claims.scorecard())
    return pd.crosstab(card["paper"], card["verdict"]).reindex(columns=list(COLORS), fill_value=0).rename_axis(columns=None)


def _typeset(text: str) -> str:
    """HTML of a text with powers written as ^2 or ^−0.99 and names of counts as N_heads."""
    text = re.sub(r"\^([−-]?[\d.]*\d)", r"<sup>\1</sup>", escape(text))
    return re.sub(r"\bN_([a-z]+)", r"N<sub>\1</sub>", text)


def _show(table: pd.DataFrame, caption: str, uuid: str) -> Styler:
    style = table.style.hide(axis="index").set_caption(caption).set_uuid(uuid).format(_typeset)
    style = style.set_properties(**{"text-align": "left", "vertical-align": "top", "white-space": "pre-line"})
    wide = [name for name in ("claim", "measured", "why") if name in table]
    style = style.set_properties(subset=wide, **{"min-width": "12.5em"})
    style = style.set_properties(subset=[name for name in ("runs",) if name in table], **{"min-width": "7.5em"})
    narrow = [name for name in ("here", "verdict", "agrees", "direction") if name in table]
    style = style.set_properties(subset=narrow, **{"white-space": "pre"})
    return style.set_table_styles([{"selector": "th", "props": "text-align: left"}])


def _runs(mine: claims.Verdict) -> str:
    return f"{mine.profile}\n" + (f"seeds {mine.seeds}\ncensored {mine.censored}" if mine.seeds else "exact") + (f"\n{mine.note}" if mine.note else "")


def table(paper: str) -> Styler:
    """Every claim of a paper, or of R, the public reproductions: what it reports, what we measured with intervals, on which runs, verdict, and our figure."""
    found, rows = claims.recorded(), []
    for claim in claims.load():
        mine = found.get(claim.id)
        rows.append({
            "id": claim.id,
            "verdict": mine.verdict if mine else "not run",
            "claim": claim.claim,
            "reported": (f"Fig. {claim.figure}\n" if claim.figure else "") + claim.reported.text,
            "here": "\n".join(f"{words(name)} {mine.text(name)}" for name in mine.measured) if mine else "–",
            "runs": _runs(mine) if mine else "–",
            "figure": f"{claim.chapter}.html#{claim.shows}",
        })
    style = _show(pd.DataFrame([row for row in rows if row["id"][0] == paper]), TITLES[paper], f"paper-{paper}")
    style = style.format(lambda to: f'<a href="{to}">{to.split(".")[0].replace("_", " ")}</a>', subset=["figure"])
    return style.map(lambda v: f"background: {COLORS[v]}; color: white; font-weight: bold", subset=["verdict"])


def _range(ends: tuple[float, float]) -> str:
    low, high = ends
    if ends == claims.ANY:
        return "any"
    if high == claims.ANY[1]:
        return f"≥ {low:g}"
    return f"≤ {high:g}" if low == claims.ANY[0] else f"{low:g} to {high:g}"


def rules() -> Styler:
    """What is measured for every claim, the ranges of the verdicts, and why they are what they are."""
    return _show(pd.DataFrame([{
        "id": claim.id,
        "kind": claim.kind,
        "measured": "\n".join(f"{words(name)}: {definition}" for name, definition in claim.measures.items()),
        **{verdict: "\n".join(f"{words(name)} {_range(ends)}" for name, ends in claim.rule[verdict].items())
           for verdict in ("agrees", "direction")},
        "why": claim.why + (f"\nAmended after a run: {claim.amended}" if claim.amended else ""),
    } for claim in claims.load()]), "The rules, written before the runs; a rule that was changed after one says so", "rules")


def _short(mine: claims.Verdict) -> str:
    """What keeps a claim from `agrees`, as Markdown."""
    missed = [f"{words(name)} {mine.text(name)} (to agree: {_range(mine.claim.rule['agrees'][name])})" for name in mine.outside()]
    return f"**{mine.claim.id}** {mine.claim.claim} Outside: {'; '.join(missed)}." + (f" {mine.note}" if mine.note else "")


def _waiting(card: pd.DataFrame) -> list[str]:
    """What has not been run, chapter by chapter, and what it waits for."""
    return [
        f"{', '.join(ids)}: the chapter `{chapter}` has not measured this at any profile that was run; `make laptop` does"
        for chapter, ids in card[card["verdict"] == "not run"].groupby("chapter", sort=False)["id"]
    ]


def _left() -> list[str]:
    """What profile `paper` asks for and is not there, chapter by chapter: millions of member-steps at most."""
    ahead = published.ahead(("paper",))
    return [f"{words(row.chapter)} {row.steps / 1e6:.3g}" for row in ahead.rename(columns={"steps left": "steps"}).itertuples() if row.steps]


def reading() -> str:
    """What holds, what holds in direction, what does not, what could not be run: Markdown made from the records."""
    card, found = pd.DataFrame(claims.scorecard()), claims.recorded()
    ids = {verdict: list(card.loc[card["verdict"] == verdict, "id"]) for verdict in COLORS}
    parts = [f"**Hold ({len(ids['agrees'])}):** {', '.join(ids['agrees']) or 'none so far'}."]
    for verdict, title in (("direction", "Hold in direction only"), ("disagrees", "Do not hold here")):
        parts += [f"**{title} ({len(ids[verdict])})**", *("  - " + _short(found[id]) for id in ids[verdict])]
    parts += [f"**Not run ({len(ids['not run'])})**", *("  - " + line for line in _waiting(card))]
    parts += [f"**Not run at the papers' own sizes** (`make paper`, for a GPU; millions of member-steps left, at most): {', '.join(later)}."] if (later := _left()) else []
    if quick := [id for id, mine in found.items() if id[0] in "AB" and mine.profile == "quick" and mine.seeds > 1]:
        parts.append(f"Small grids and few seeds (the quick profile), so verdicts to be taken with care: {', '.join(quick)}.")
    return "\n".join(part if part.startswith("  ") else f"- {part}" for part in parts)
