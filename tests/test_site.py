"""The book as `make book` leaves it: every chapter executed, a site that loads nothing from elsewhere, no dead link."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from lib import chapters, site
from lib.store import results_folder


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


def test_every_page_says_what_it_may_load(book, pages):
    for name in pages:
        text = (book / "html" / name).read_text(encoding="utf-8")
        if 'http-equiv="Refresh"' in text:  # the first page's other name
            continue
        policy = re.search(r'<head>\s*<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
        assert policy and policy[1].startswith("default-src 'none'") and "http" not in policy[1], name


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


def test_every_chapter_offers_its_files_and_says_what_it_shows(book):
    for name in chapters.names():
        page = (book / "html" / f"{name}.html").read_text(encoding="utf-8")
        links = dict(re.findall(r'href="(_downloads/[^"]+/([^"/]+))"', page))
        offered = [file for link, file in links.items()]
        assert offered.count(f"{name}.ipynb") == 2, name  # as written and as executed
        assert offered.count(f"{name}.yml") == sum((chapters.ROOT / "params" / p / f"{name}.yml").exists() for p in chapters.PROFILES)
        source, executed = ([link for link, file in links.items() if file == f"{name}.ipynb"][i] for i in (0, 1))
        texts = {(book / "html" / link).read_bytes() for link in (source, executed)}
        assert (chapters.book() / f"{name}.ipynb").read_bytes() in texts and (book / "chapters" / f"{name}.ipynb").read_bytes() in texts
        profile = nbformat.read(book / "chapters" / f"{name}.ipynb", as_version=4).metadata.papermill.parameters.get("profile", "quick")
        assert f"Shown at the profile <strong>{profile}</strong>" in page, name
        shipped = {path.name for path in results_folder().glob(f"{name}.{profile}.*") if path.suffix != ".json"}
        assert shipped <= set(offered), name


def test_the_first_page_shows_the_score_and_how_to_cite(book):
    page = (book / "html" / "intro.html").read_text(encoding="utf-8")
    card = json.loads((book / "scorecard.json").read_text())
    for paper in "AB":
        for verdict in {claim["verdict"] for claim in card if claim["paper"] == paper}:
            n = sum(claim["paper"] == paper and claim["verdict"] == verdict for claim in card)
            assert f'class="verdict-{verdict.replace(" ", "-")}">{n} {verdict}</span>' in page
    assert "2505.17863" in page and "sparse-attention-book" in page


def test_launch_buttons_come_with_the_repositorys_address_and_not_before(book, tmp_path, monkeypatch):
    assert "colab" not in (book / "html" / "theory.html").read_text(encoding="utf-8")
    (tmp_path / "book").mkdir()
    for name in ("references.bib", "_static"):
        (tmp_path / "book" / name).symlink_to(chapters.ROOT / "book" / name)
    (tmp_path / "book" / "_extra").mkdir()
    (tmp_path / "book" / "rerun.md").write_text("(profiles)=\n# Rerun\n\n(cite)=\n## Cite\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: rerun\nchapters:\n- file: mine\n")
    config = (chapters.ROOT / "_config.yml").read_text(encoding="utf-8")
    assert 'repository_url: ""' in config
    (tmp_path / "_config.yml").write_text(config.replace('repository_url: ""', "repository_url: https://github.com/someone/book"), encoding="utf-8")
    cell = nbformat.v4.new_code_cell("profile: str = 'quick'", metadata={"tags": ["parameters"]})
    title = nbformat.v4.new_markdown_cell("# Mine")
    kernel = {"kernelspec": {"name": "python3", "display_name": "p"}, "language_info": {"name": "python"}}
    for folder in ("book", "build/chapters"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=[title, cell], metadata=kernel), tmp_path / folder / "mine.ipynb")
    monkeypatch.setenv("BOOK_DIR", str(tmp_path / "book"))
    html = site.build(tmp_path / "build").parent
    page = (html / "mine.html").read_text(encoding="utf-8")
    assert "https://colab.research.google.com/github/someone/book/blob/main/book/mine.ipynb" in page
    assert "!git clone https://github.com/someone/book book" in page  # Colab has nothing of the book
    assert "https://mybinder.org/v2/gh/someone/book/main?urlpath=tree/book/mine.ipynb" in page
