"""Every page of the built site in a real browser: from disk without a network, in both colours, on a wide screen and on a phone."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import chromium, opened

from lib import chapters


@pytest.fixture
def pages(book):
    found = [path for path in sorted((book / "html").glob("*.html")) if 'http-equiv="Refresh"' not in path.read_text(encoding="utf-8")]
    assert {"intro.html", "explorer.html", "runs.html", "scorecard.html", "search.html"} <= {path.name for path in found}
    return found


def faults_of(visits):
    faults = []
    with chromium() as browser:
        for path, color in visits:
            page, wrong = opened(browser, path, color_scheme=color, viewport={"width": 1280, "height": 900})
            found = Axe().run(page, options={"resultTypes": ["violations"], "preload": False}).response["violations"]
            said = [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in ("serious", "critical")]
            page.set_viewport_size({"width": 390, "height": 844})
            page.wait_for_timeout(200)
            if (over := page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
                said.append(f"{over} px too wide for a phone")
            if page.locator("svg.svg-inline--fa:not(:has(> path, > g path))").count():
                said.append("an icon is missing")
            faults += [f"{path.name}, {color}: {line}" for line in said + wrong]  # the late ones too
            page.context.close()
    return faults


def test_every_page_renders_without_a_fault_and_is_accessible(pages):
    """No failed request, error or refusal by the page's policy; nothing serious for axe-core; no page scrolls sideways on a phone."""
    kinds = ("intro", "theory", "scorecard", "data", "explorer", "runs", "rerun", "search")  # one of each kind in the dark
    visits = [(path, color) for color in ("light", "dark") for path in pages if color == "light" or path.stem in kinds]
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(faults_of, (visits[::2], visits[1::2])), []) == []


def test_the_tests_above_can_fail(tmp_path, visit):
    path = tmp_path / "bad.html"
    path.write_text("<html><head></head><body><img src='none.png'><script>nothing()</script><p style='width:900px'>x</p></body></html>")
    page, wrong = visit(path, viewport={"width": 390, "height": 844})
    assert any("none.png" in line for line in wrong) and any("nothing" in line for line in wrong)
    found = {v["id"] for v in Axe().run(page, options={"preload": False}).response["violations"] if v["impact"] in ("serious", "critical")}
    assert {"image-alt", "html-has-lang"} <= found
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(book):
    """The site served on this machine's own address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(book / "html"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["intro", "theory", "explorer", "runs", "search"])
def test_it_works_from_a_server_too(server, visit, name):
    page, wrong = visit(None, address=f"{server}/{name}.html")
    page.wait_for_timeout(200)
    assert wrong == [] and page.title()


def test_search_finds_a_word_from_disk(book, visit):
    page, _ = visit(book / "html" / "search.html")
    page.goto((book / "html" / "search.html").as_uri() + "?q=plateau")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    assert page.locator("#search-results li a").count() >= 3


def test_pages_are_light(book, server, visit):
    """All that a page loads stays under two megabytes, its pictures and the runs' data aside."""
    html = book / "html"
    for name in ("explorer", "runs", "scorecard", "data"):
        page, _ = visit(None, address=f"{server}/{name}.html")
        page.wait_for_timeout(500)
        loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)") + [page.url]
        paths = {html / unquote(urlsplit(address).path)[1:] for address in loaded if address.startswith(server)}
        sizes = {path: path.stat().st_size for path in paths if path.suffix not in (".png", ".svg") and path.parent != html / "runs"}
        assert len(sizes) > 10 and sum(sizes.values()) < 2_000_000, (name, sum(sizes.values()), sizes)
    for data in (html / "runs").glob("*.js"):
        assert data.stat().st_size < 2_000_000, data.name


def test_on_paper_nothing_is_cut_off_folded_or_dark(book, visit):
    for name in ("scorecard", "theory"):
        page, _ = visit(book / "html" / f"{name}.html", color_scheme="dark", viewport={"width": 720, "height": 1000})
        page.emulate_media(media="print")
        cut = """[...document.querySelectorAll('.bd-article table, .bd-article figure, .bd-article .margin')]
          .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
        assert page.evaluate(cut) == []
        paper, ink = (page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
        assert paper == "rgb(255, 255, 255)" and ink == "rgb(34, 34, 34)"
        assert page.locator(".bd-article details table:visible").count() == page.locator(".bd-article details table").count()


def test_equations_and_figures_have_numbers_and_references_use_them(book, visit):
    page, _ = visit(book / "html" / "theory.html")
    page.wait_for_selector("mjx-container", state="attached")
    assert page.locator(".eqno").count() >= 10
    assert page.locator("figcaption .caption-number").count() >= 8
    assert "Fig." in page.locator("figcaption .caption-number").first.inner_text()
    assert page.locator("a.reference .std-numref").count() >= 8 and page.locator("p a.reference[href*='equation-eq-']").count() >= 5
    previous, following = page.locator("a.left-prev"), page.locator("a.right-next")
    assert previous.count() == following.count() == 1


def test_a_figure_stays_readable_in_the_dark(book, visit):
    page, _ = visit(book / "html" / "regression.html", color_scheme="dark")
    backgrounds = page.evaluate("[...document.querySelectorAll('.cell_output figure img')].map(i => getComputedStyle(i).backgroundColor)")
    assert backgrounds and all(sum(map(int, b[b.index("(") + 1 : -1].split(",")[:3])) > 600 for b in backgrounds), backgrounds


def test_no_chapter_shows_an_error_or_what_a_program_said_aside(book):
    for name in chapters.names():
        text = (book / "html" / f"{name}.html").read_text(encoding="utf-8")
        assert "Traceback (most recent call last)" not in text and "cell_output stderr" not in text and 'class="output stderr' not in text, name
