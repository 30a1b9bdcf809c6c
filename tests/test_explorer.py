"""The explorer: its equations against lib.theory in a real browser, and its controls as a reader uses them."""

import itertools
import re

import numpy as np
import pytest

from lib import chapters
from lib.theory import ToyDynamics

GRID = [dict(T=T, d=d, B=B, p=p, epsilon=epsilon) for (T, d), B, (p, epsilon) in itertools.product(
    [(16, 4), (512, 64), (4096, 512), (4096, 4), (16, 512)], [1, 8], [(0.0, 0.8), (0.3, 0.5), (0.95, 0.9)])]  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The explorer's own part of its page, without the rest of the site."""
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "interactive").symlink_to(chapters.book() / "_extra" / "interactive")
    block = re.search(r"```\{raw\} html\n(.*?)```", (chapters.book() / "explorer.md").read_text(encoding="utf-8"), re.S)[1]
    page = folder / "explorer.html"
    page.write_text(f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>x</title></head><body>{block}</body></html>', encoding="utf-8")
    return page


@pytest.fixture
def page(bare, visit):
    page, faults = visit(bare, viewport={"width": 1200, "height": 900})
    yield page
    assert faults == []


SOLVE = """case_ => { const s = explorer.solve(case_);
  return {plateau: s.plateau, escape: s.escape, takeoff: s.takeoff, rows: explorer.sample(s, case_.times)}; }"""


def test_the_browser_solves_the_same_equations(page):
    for case in GRID:
        toy = ToyDynamics(**{name: case[name] for name in "TdBp"})
        plateau = toy.plateau(case["epsilon"])
        times = np.linspace(0, 2.5 * plateau, 50)
        mine, theirs = page.evaluate(SOLVE, case | {"times": times.tolist()}), toy.flow(times)
        assert mine["plateau"] == pytest.approx(plateau, rel=1e-3), case
        assert mine["escape"] == pytest.approx(toy.escape_time(case["epsilon"])) and mine["takeoff"] == pytest.approx(toy.takeoff_time())
        for name, column in {"w": "w", "deltaA": "delta_a", "alpha": "alpha", "loss": "loss", "testLoss": "test_loss"}.items():
            found, wanted = np.array([row[name] for row in mine["rows"]]), theirs[column].to_numpy()
            assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max(), (case, name)


def test_a_loss_that_never_falls_is_said(page):
    page.evaluate("explorer.set({T: 64, d: 16, p: 1})")
    assert "does not fall" in page.inner_text("#ex-summary")
    assert np.isnan(ToyDynamics(T=64, d=16, p=1.0).plateau(until=1e5))


def test_the_keyboard_moves_a_slider_and_the_page_follows(page):
    before, picture = page.inner_text("#ex-summary"), page.locator("#ex-plateau canvas").screenshot()
    page.focus("#ex-T")
    for _ in range(4):
        page.keyboard.press("ArrowRight")  # four steps double T
    assert page.inner_text("#ex-T-out").replace(",", "") == "1024"
    plateau = ToyDynamics(T=1024, d=64).plateau()
    assert f"{float(f'{plateau:.4g}'):,.0f}" in page.inner_text("#ex-summary") != before
    assert page.locator("#ex-plateau canvas").screenshot() != picture
    page.click("text=four times B")
    assert page.inner_text("#ex-B-out") == "4"


def test_every_line_is_inside_its_plot_and_only_drawn_lines_have_names(page):
    names = "[...document.querySelectorAll('#ex-loss .u-series, #ex-state .u-series')].filter(e => e.offsetWidth).map(e => e.innerText.trim())"
    plain = page.evaluate(names)
    page.evaluate("explorer.set({T: 4096, d: 512, p: 0.95})")
    assert set(page.evaluate(names)) - set(plain) == {"training loss", "w̃ / its limit"}
    assert page.evaluate("explorer.plots().state.scales.y.max > Math.max(...explorer.plots().state.data[3])")


def test_copies_stay_below_the_length(page):
    page.evaluate("explorer.set({T: 16, B: 64})")
    assert "kept below T, at 15" in page.inner_text("#ex-summary") and page.inner_text("#ex-B-out") == "15"


def test_colours_follow_the_theme_and_every_plot_has_words(page):
    light = page.locator("#ex-loss canvas").screenshot()
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_timeout(100)
    assert page.locator("#ex-loss canvas").screenshot() != light
    for name in ("loss", "state", "landscape", "plateau"):
        assert len(page.get_attribute(f"#ex-{name}", "aria-label")) > 30


def test_a_change_takes_less_than_30_ms(page):
    """All but the slowest twentieth of a walk through the sliders; what the plateaus at other T take is done between frames."""
    taken = page.evaluate("""async () => { const taken = [], names = Object.keys(explorer.choices);
      for (let i = 0; i < 100; i++) { const name = names[i % 5], slider = document.getElementById(`ex-${name}`);
        slider.value = (7 * i + 3) % (+slider.max + 1);
        const start = performance.now(); slider.dispatchEvent(new Event("input")); await null; await null;
        taken.push(performance.now() - start); }
      return taken; }""")
    print(f"median {np.median(taken):.1f} ms, 95 % below {np.percentile(taken, 95):.1f} ms, slowest {max(taken):.1f} ms")
    assert np.percentile(taken, 95) < 30
