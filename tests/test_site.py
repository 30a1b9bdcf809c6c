"""The book as `make book` leaves it: every chapter executed, a site that loads nothing from elsewhere, no dead link."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from lib import chapters


class Page(HTMLParser):
    """What a page loads, what it links to, and where its images lack words."""

    LOADS = {
        "script": "src",
        "img": "src",
        "iframe": "src",
        "source": "src",
        "audio": "src",
        "video": "src",
        "object": "data",
        "embed": "src",
    }

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.loads, self.links, self.ids, self.wordless, self.scripts = path, [], [], set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.ids |= {of["id"]} if of.get("id") else set()
        if of.get(self.LOADS.get(tag)):
            self.loads.append(of[self.LOADS[tag]])
        if tag == "link" and not {"next", "prev", "canonical", "author", "search", "index"} & set(
            (of.get("rel") or "").split()
        ):
            self.loads.append(of["href"])
        if tag == "a" and of.get("href"):
            self.links.append(of["href"])
        if tag == "img" and not (of.get("alt") or "").strip():
            self.wordless.append(of.get("src"))
        self.loads += re.findall(r"url\(['\"]?([^)'\"]+)", of.get("style") or "")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def pages(book):
    return {path.name: Page(path) for path in (book / "html").glob("*.html")}


def elsewhere(address):
    return urlsplit(address).scheme not in ("", "data") or address.startswith("//")


def test_every_page_of_the_contents_is_there_and_the_first_is_the_index(book, pages):
    contents = re.findall(r"(?:root|file):\s*(\S+)", (chapters.ROOT / "_toc.yml").read_text())
    assert {f"{name}.html" for name in contents} <= set(pages)
    assert f"{contents[0]}.html" in (book / "html/index.html").read_text()


def test_the_executed_chapters_are_there_without_an_error(book):
    for name in chapters.names():
        for cell in nbformat.read(book / "chapters" / f"{name}.ipynb", as_version=4).cells:
            assert not any(output.output_type == "error" for output in cell.get("outputs", []))
            assert not any(output.get("name") == "stderr" for output in cell.get("outputs", [])), f"{name}: {cell.id}"


def test_nothing_is_loaded_from_elsewhere(book, pages):
    assert {load for page in pages.values() for load in page.loads if elsewhere(load)} == set()
    assert not [script for page in pages.values() for script in page.scripts if re.search(r"https?://", script)]
    for sheet in (book / "html").rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        for address in re.findall(r"url\(['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", text):
            assert not elsewhere("".join(address)), f"{sheet.name}: {address}"


def test_equations_are_set_by_a_mathjax_of_our_own(book, pages):
    assert any("mathjax/tex-chtml.js" in load for load in pages["theory.html"].loads)
    assert (book / "html/_static/mathjax/tex-chtml.js").exists()
    assert any((book / "html/_static/mathjax").rglob("*.woff"))


def test_no_link_is_dead(book, pages):
    for name, page in pages.items():
        for address in page.links + page.loads:
            if elsewhere(address) or address in ("#", ""):
                continue
            parts = urlsplit(address)
            target = book / "html" / unquote(parts.path) if parts.path else page.path
            assert target.exists(), f"{name}: {address}"
            if parts.fragment and target.name in pages:
                assert unquote(parts.fragment) in pages[target.name].ids, f"{name}: {address}"


def test_every_image_has_words(pages):
    assert [(name, page.wordless) for name, page in pages.items() if page.wordless] == []


def test_the_scorecard_has_every_claim_and_only_known_verdicts(book):
    card = json.loads((book / "scorecard.json").read_text())
    keys = {
        "id",
        "paper",
        "claim",
        "reported",
        "measured",
        "interval",
        "seeds",
        "censored",
        "profile",
        "verdict",
        "chapter",
    }
    assert all(set(claim) == keys for claim in card)
    assert {claim["id"] for claim in card} == {f"A{i}" for i in range(1, 19)} | {f"B{i}" for i in range(1, 13)}
    assert {claim["verdict"] for claim in card} <= {"agrees", "direction", "disagrees", "not run"}
    measured = {claim["id"] for claim in card if claim["verdict"] != "not run"}
    assert {f"A{i}" for i in range(1, 14)} <= measured
    assert (book / "html/scorecard.json").read_bytes() == (book / "scorecard.json").read_bytes()


def test_every_figure_offers_what_it_draws(book):
    for name in chapters.names():
        page = (book / "html" / f"{name}.html").read_text(encoding="utf-8")
        for cell in nbformat.read(book / "chapters" / f"{name}.ipynb", as_version=4).cells:
            figure = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
            if figure and any("image/png" in output.get("data", {}) for output in cell.outputs):
                link = re.search(rf'href="(_downloads/[^"]+/{figure}\.csv)"', page)
                assert link, f"{name}: {figure} offers no data"
                assert len((book / "html" / link[1]).read_text(encoding="utf-8").splitlines()) > 2, f"{name}: {figure}"
