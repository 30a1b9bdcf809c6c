"""What the site adds to the chapters and pages as they are written: downloads, an 'about this chapter', the score, how to cite."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import nbformat
import pandas as pd
import yaml

from lib import chapters, claims, drawn, scorecard
from lib.store import results_folder


def _link(text: str, target: str) -> str:
    return f"{{download}}`{text} <{target}>`"


def offer_data(notebook, chapter: str, folder: Path) -> int:
    """Write each figure's data into the folder, one CSV a figure and all in one archive, and end the captions in links; returns how many."""
    found = drawn.take(notebook, chapter)
    for name, text in found.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
        for cell in notebook.cells:
            figure = cell.metadata.get("mystnb", {}).get("figure", {})
            if figure.get("name") == name:
                figure["caption"] += " " + _link("Data", f"data/{chapter}/{name}.csv")
    if found:
        with zipfile.ZipFile(folder / f"{chapter}-figures.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.glob("*.csv")):
                archive.write(path, path.name)
    return len(found)


def mark_wide(notebook, pixels: int = 850) -> None:
    """Give figures wider than this the class `wide`: on a phone they keep a readable size and scroll, others fit the screen."""
    for cell in notebook.cells:
        widths = [output.metadata.get("image/png", {}).get("width", 0) for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        if "figure" in cell.metadata.get("mystnb", {}) and max(widths, default=0) > pixels:
            cell.metadata.mystnb.setdefault("image", {})["classes"] = "wide"


def offer_files(chapter: str, executed: Path, source: Path) -> list[str]:
    """Copy a chapter's notebook, as written and as executed, and its parameter files to where the site can offer them; their links."""
    offered = [("the notebook", chapters.book() / f"{chapter}.ipynb", "source"), ("as it was executed for this page", executed, "executed")]
    for profile in chapters.PROFILES:
        path = chapters.book().parent / "params" / profile / f"{chapter}.yml"
        offered += [(f"parameters at {profile}", path, f"params-{profile}")] if path.exists() else []
    links = []
    for text, path, kind in offered:
        target = source / "files" / kind / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        links.append(_link(text, f"files/{kind}/{path.name}"))
    return links


def about(notebook, chapter: str, links: list[str], figures: int, repository: str = "") -> None:
    """Append the chapter's own box: the profile shown, what can be downloaded, how to run it, in Colab too where the repository has an address."""
    profile = notebook.metadata.get("papermill", {}).get("parameters", {}).get("profile", "quick")
    kinds = {".csv": "its runs, a line each", ".parquet": "their curves", ".measured.npz": "what was measured inside some of them"}
    names = {text: f"{chapter}.{profile}{kind}" for kind, text in kinds.items()}
    links = [*links, *(_link(text, f"results/{name}") for text, name in names.items() if (results_folder() / name).exists())]
    if figures:
        links = [*links, _link(f"the data of its {figures} figures", f"data/{chapter}/{chapter}-figures.zip")]
    lines = [":::{admonition} About this chapter", ":class: dropdown about-chapter", f"Shown at the profile **{profile}** ([what that means](profiles)).", ""]
    lines += [f"- {link}" for link in links]
    lines += ["", f"To run it: `python -m lib run {chapter} --profile {profile}`, or the notebook in Jupyter ([how](rerun)). To cite it: [](cite)."]
    if repository:
        first = [f"!git clone {repository} book", "%cd book/book", "!pip install -q -c ../constraints.txt -e .."]
        lines += ["", "Colab knows nothing of this book: run this there first, in a cell of its own. Binder does it by itself.", "", "```", *first, "```"]
    lines += [":::"]
    notebook.cells.append(nbformat.v4.new_markdown_cell("\n".join(lines), id="about-this-chapter"))


def score() -> str:
    """Markdown: how many claims of each paper have which verdict, and at which profiles they were measured."""
    counts, found = scorecard.counts(), claims.recorded()
    lines = []
    for paper, row in counts.iterrows():
        badges = [f'<span class="verdict-{verdict.replace(" ", "-")}">{n} {verdict}</span>' for verdict, n in row.items() if n]
        lines.append(f"- Paper {paper}, {row.sum()} claims: {' '.join(badges)}")
    profiles = pd.Series([mine.profile for id, mine in found.items() if id[0] in "AB"], dtype=str).value_counts()
    measured = ", ".join(f"{profiles[name]} claims at `{name}`" for name in reversed(chapters.PROFILES) if name in profiles)
    return "\n".join(lines) + f"\n\nMeasured so far: {measured or 'nothing'} ([what a profile is](profiles)). Every number is on [the scorecard](scorecard)."


def cite() -> str:
    """Markdown: BibTeX entries of the book, from CITATION.cff, and of the two papers, from references.bib."""
    root = chapters.book().parent
    book = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join(a.get("name") and f"{{{a['name']}}}" or f"{a['family-names']}, {a['given-names']}" for a in book["authors"])
    year = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["copyright"]
    entry = f"@misc{{sparse-attention-book,\n  title  = {{{book['title']}}},\n  author = {{{authors}}},\n  year   = {{{year}}},\n  note   = {{An executable book, version {book['version']}}}\n}}"
    papers = re.findall(r"@\w+\{(?:zucchet2025emergence|baherwani2026emergent),.*?\n\}", (chapters.book() / "references.bib").read_text(encoding="utf-8"), re.S)
    return "```bibtex\n" + "\n\n".join([entry, *papers]) + "\n```"


def fill(source: Path) -> None:
    """Put what is made here in the place of `<!-- score -->` and `<!-- cite -->` in the pages."""
    made = {"<!-- score -->": score, "<!-- cite -->": cite}
    for path in source.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for place, make in made.items():
            if place in text:
                text = text.replace(place, make())
        path.write_text(text, encoding="utf-8")
