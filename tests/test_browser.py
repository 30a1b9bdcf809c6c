"""The run browser: what it shows is what the store holds, and a reader can pick a run and scrub through its attention."""

import base64
import json
import re
import shutil
import textwrap

import nbformat
import numpy as np
import pandas as pd
import pytest

from lib import browser, chapters, probe
from lib.__main__ import main
from lib.config import InputError
from lib.emergence import emergence
from lib.models import Transformer
from lib.run import Run, Training
from lib.store import Store
from lib.sweep import sweep
from lib.tasks import TASKS, Language, LinearMap, SingleLocation

CELLS = {  # a chapter of one experiment: the linear map at two s, three seeds each
    "imports": "from lib.chapters import check\nfrom lib.models import Transformer\nfrom lib.run import Run, Training\nfrom lib.tasks import LinearMap",
    "parameters": 'profile: str = "quick"\nseeds: int = 3  # each',
    "check": "check(globals())",
    "grid": """
        training = Training(optimizer="adamw", learning_rate=3e-3, weight_decay=0.01, batch=64, steps=400, stop_below=0.005)
        experiments = {"both": [Run(task=LinearMap(S=4, s=s), model=Transformer(layers=1, heads=2, width=32, positions="learned", embedding="table", layer_norm=True),
                                    training=training, seed=seed) for s in (1, 2) for seed in range(seeds)]}""",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A book of one chapter, its six runs trained, one run's attention kept, and the browser's data written."""
    root = tmp_path_factory.mktemp("browser")
    (root / "book").mkdir()
    (root / "_toc.yml").write_text("root: mine\n")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source).strip(), metadata={"tags": [tag]}) for tag, source in CELLS.items()]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "p"}, "papermill": {"parameters": {}}})
    for folder in (root / "book", root / "build" / "chapters"):
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, folder / "mine.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("book", "build", "store", "results"):
            patch.setenv(f"BOOK_{'DIR' if name == 'book' else name.upper()}", str(root / name))
        experiments = chapters.grid("mine")
        result = sweep(experiments, chapter="mine", store=Store(root / "store"), workers=1)["both"]
        run = experiments["both"][-1]
        steps, rng = list(range(0, 100, 10)), np.random.default_rng(0)
        maps = {step: rng.dirichlet(np.ones(7), size=(2, 4)) for step in steps}
        browser.keep("mine", run, maps, np.eye(4, 7, dtype=bool), ["head 1", "head 2"])
        assert browser.export(root / "build" / "chapters", root / "html" / "runs") == ["mine"]
    text = (root / "html" / "runs" / "mine.js").read_text(encoding="utf-8")
    data = json.loads(re.fullmatch(r"bookRuns\((.*)\);\n", text, re.S)[1])
    return root, result, run, maps, data


def test_the_data_are_the_stores(made):
    _, result, _, _, data = made
    table = emergence(result, below=0.01).set_index("run")
    assert table["emerged"].any() and set(data["runs"]) == set(table.index)
    for key, run in data["runs"].items():
        row, curve = table.loc[key], result.curves[result.curves["run"] == key]
        assert run["emergence"] == (int(row["emergence"]) if row["emerged"] else None)
        assert (run["seed"], run["steps"], run["status"]) == (row["seed"], row["steps"], row["status"])
        steps = run["curves"]["step"]
        assert len(steps) <= browser.POINTS + 1 and [steps[0], steps[-1]] == curve["step"].iloc[[0, -1]].tolist()
        shown = curve.set_index("step").loc[steps]
        for name in ("test_loss", "accuracy", "row_3"):
            assert run["curves"][name] == pytest.approx(shown[name].tolist(), rel=1e-3)
    experiment = data["experiments"]["both"]
    assert experiment["varied"] == ["s"] and [values for _, values in experiment["runs"]] == [[1]] * 3 + [[2]] * 3


def test_attention_is_kept_to_half_a_part_in_255(made):
    _, _, run, maps, data = made
    kept = data["attention"][run.key]
    values = np.frombuffer(base64.b64decode(kept["maps"]), np.uint8).reshape(kept["shape"]) / 255
    assert kept["steps"] == sorted(maps) and np.abs(values - np.stack(list(maps.values()))).max() <= 0.5 / 255 + 1e-9
    assert np.frombuffer(base64.b64decode(kept["truth"]), np.uint8).reshape(4, 7).tolist() == np.eye(4, 7).tolist()


def test_the_attention_of_every_run_can_be_shipped(made, tmp_path, capsys, monkeypatch):
    """`look`: at the start, at the jump and at the end, the mean over held-out sequences; the run browser shows it."""
    root, result, followed, _, _ = made
    for name in ("book", "build", "store", "results"):
        monkeypatch.setenv(f"BOOK_{'DIR' if name == 'book' else name.upper()}", str(root / name))
    assert main(["look", "mine"]) == 0 and "attention of 6 runs" in capsys.readouterr().out
    shipped = browser.kept(root / "results" / "mine.quick.attention.json")
    waits = emergence(result, below=0.01).set_index("run")["emergence"]
    for run in chapters.grid("mine")["both"]:
        entry, last = shipped[run.key], int(result.curves.query("run == @run.key")["step"].max())
        assert entry["steps"] == sorted({0, last} | ({waits[run.key]} if waits[run.key] == waits[run.key] else set()))
        assert entry["names"] == ["layer 1, head 1", "layer 1, head 2"] and entry["shape"][1:] == [2, 4, 7]
        values = np.frombuffer(base64.b64decode(entry["maps"]), np.uint8).reshape(entry["shape"]) / 255
        assert np.abs(values.sum(-1) - 1).max() < 7 / 255  # each line is a mean of attention
        batch = probe.held_out(run)
        pattern = probe.record(probe.bind(run, probe.replay(run, [last])[last], batch))[1][0][0].mean(0)
        assert np.abs(values[-1] - pattern.numpy()).max() <= 0.5 / 255 + 1e-3
        assert np.array_equal(np.frombuffer(base64.b64decode(entry["truth"]), np.uint8).reshape(4, 7), batch.pattern[0, 0].numpy())
    found = browser.collect("mine", "quick")["attention"]
    assert set(found) == set(shipped) and len(found[followed.key]["steps"]) == 10  # what a chapter kept has more readings, and stays


def test_of_many_readings_some_are_kept_the_first_and_the_last_too(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_BUILD", str(tmp_path))
    run = Run(task=LinearMap(S=2, s=1), model=Transformer(layers=1, heads=1, width=8), training=Training())
    browser.keep("x", run, {step: np.zeros((1, 2, 3)) for step in range(500)}, np.zeros((2, 3)), ["a"], most=20)
    kept = json.loads((tmp_path / "attention" / "x.json").read_text())[run.key]
    assert len(kept["steps"]) == 20 and kept["steps"][0] == 0 and kept["steps"][-1] == 499
    with pytest.raises(InputError, match="true pattern"):
        browser.keep("x", run, {0: np.zeros((1, 2, 3))}, np.zeros((3, 3)), ["a"])
    (tmp_path / "attention" / "x.json").write_text("{")
    with pytest.raises(InputError, match="delete it"):
        browser.keep("x", run, {0: np.zeros((1, 2, 3))}, np.zeros((2, 3)), ["a"])


def test_every_task_has_a_line():
    for kind in TASKS:
        run = Run(task=kind(), model=Transformer(), training=Training())
        rule = browser.line(run)
        assert set(rule) <= {"below", "above", "metric"} and rule.get("below", 0) < run.task.chance_loss


def test_lines_are_those_of_the_chapters():
    """Repetition across samples asks for less, as in the regression chapter; the language chapter's line is its parameter."""
    def line(task):
        return browser.line(Run(task=task, model=Transformer(), training=Training()))

    assert line(SingleLocation(p=0.5)) == dict(below=0.4) and line(SingleLocation()) == dict(below=chapters.parameters("regression", "laptop")["threshold"])
    assert line(LinearMap()) == dict(below=chapters.parameters("linear_map", "laptop")["strict_loss"])
    assert line(Language())["above"] == chapters.parameters("language_models", "laptop")["there"]


@pytest.mark.parametrize("s, said", [(2, "finished"), (4, "finished, degenerate (s = S)")])
def test_a_degenerate_map_is_marked(s, said):
    run = Run(task=LinearMap(S=4, s=s), model=Transformer(layers=1, heads=1, width=8), training=Training())
    rows = pd.DataFrame([{"run": run.key, "status": "finished", "steps": 10, "budget": 10}])
    curves = pd.DataFrame({"run": run.key, "step": [0, 10], "test_loss": [0.7, 0.6]})
    assert browser._run(run, rows, curves, ["test_loss"])["status"] == said


@pytest.fixture
def page(made, visit):
    root, html = made[0], made[0] / "html"
    shutil.copytree(chapters.ROOT / "book" / "_extra" / "interactive", html / "interactive", dirs_exist_ok=True)
    block = re.search(r"```\{raw\} html\n(.*?)```", (chapters.ROOT / "book" / "runs.md").read_text(encoding="utf-8"), re.S)[1]
    (html / "runs.html").write_text(f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>x</title></head><body>{block}</body></html>', encoding="utf-8")
    page, faults = visit(root / "html" / "runs.html", viewport={"width": 1200, "height": 1000})
    page.wait_for_selector("#runs-panel tbody tr[data-key]")
    yield page
    assert faults == []


def test_a_reader_picks_a_run_and_scrubs_through_its_attention(page, made):
    _, result, run, maps, _ = made
    table = emergence(result, below=0.01)
    summary = page.inner_text("#rb-summary")
    assert f"{len(table)} runs, {table['emerged'].sum()} emerged" in summary
    assert page.locator(".runs-table tbody tr").count() == len(table)
    assert page.get_attribute(".runs-table tbody tr[aria-selected=true]", "data-key") == run.key  # the one with attention comes first
    page.focus("#rb-step")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert page.inner_text("#rb-step-out") == "0"
    first = page.get_attribute("#rb-now", "aria-label")
    at_the_end = [head[np.eye(4, 7, dtype=bool)].mean() for head in maps[90]]
    best = int(np.argmax(at_the_end))
    assert page.input_value("#rb-map") == str(best)  # the head that ends with the most on the pattern
    mass = maps[0][best][np.eye(4, 7, dtype=bool)].mean()
    assert f"{100 * mass:.0f} % on the true pattern" in first
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#rb-step-out") == "10" and page.get_attribute("#rb-now", "aria-label") != first
    pixels = "Array.from(document.getElementById('rb-now').getContext('2d').getImageData(0, 0, 7, 4).data).filter((_, i) => i % 4 === 0)"
    for head in (0, 1):
        page.select_option("#rb-map", str(head))
        levels = np.rint(255 * maps[10][head].ravel()) / 255
        assert np.abs(np.array(page.evaluate(pixels)) - (255 - 225 * np.sqrt(levels))).max() <= 1
    other = table["run"].iloc[0]
    page.focus(f"tr[data-key='{other}']")
    page.keyboard.press("Enter")
    assert page.get_attribute(f"tr[data-key='{other}']", "aria-selected") == "true" and page.is_hidden("#rb-attention")


def test_filters_sorting_and_metrics(page, made):
    table = emergence(made[1], below=0.01)
    page.select_option("#rb-filter-0", "2")
    assert f"{(table['s'] == 2).sum()} runs" in page.inner_text("#rb-summary")
    page.select_option("#rb-filter-0", "")
    page.click("thead button:has-text('seed')")
    page.click("thead button:has-text('seed')")  # the other way round
    assert page.inner_text(".runs-table tbody tr:first-child td:first-child")[0] == "2"
    before = page.locator("#rb-chart canvas").screenshot()
    page.select_option("#rb-metric", "accuracy")
    assert page.locator("#rb-chart canvas").screenshot() != before and "accuracy" in page.get_attribute("#rb-chart", "aria-label")
