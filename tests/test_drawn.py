"""A figure's data: what is drawn is what the table says, for each way in which the chapters draw."""

import io

import matplotlib

matplotlib.use("Agg")

import nbformat
import numpy as np
import pandas as pd
import pytest

from lib import drawn, plots


def table(ax):
    text = drawn.csv(ax.figure)
    return pd.read_csv(io.StringIO(text), keep_default_na=False, na_values={"x": [""], "y": [""], "value": [""]})


def test_seeds_have_the_name_of_their_colour_and_chance_its_own(ax):
    plots.seeds(ax, [1, 2, 3], [[1, 2, 3], [3, 4, np.nan]], label="wide")
    plots.seeds(ax, [1, 2], [[7, 8], [9, 10]], label="narrow")
    plots.chance(ax, 0.5)
    ax.set(xlabel="step", ylabel="loss", title="t")
    rows = table(ax)
    lines = rows[rows["kind"] == "line"].groupby(["series", "part"])[["x", "y"]].agg(list)
    assert lines.loc[("wide", 0)].tolist() == [[1, 2, 3], [1, 2, 3]]
    assert [len(lines.loc[name]) for name in ("wide", "narrow")] == [3, 3]  # two seeds and their median
    level = rows[rows["kind"] == "level"]
    assert level["series"].tolist() == ["chance"] and level["y"].tolist() == [0.5] and level["x"].isna().all()
    assert set(rows["x_label"]) == {"step"} and set(rows["y_label"]) == {"loss"} and set(rows["title"]) == {"t"}


def test_maps_points_and_bars(ax):
    cells = np.arange(6.0).reshape(2, 3)
    ax.imshow(cells)
    ax.scatter([1, 2], [3, 4], label="runs")
    rows = table(ax)
    there = rows[rows["kind"] == "map"].pivot(index="y", columns="x", values="value").to_numpy()
    assert (there == cells).all()
    assert rows[rows["kind"] == "points"][["series", "x", "y"]].to_numpy().tolist() == [["runs", 1, 3], ["runs", 2, 4]]


@pytest.mark.parametrize("upright", [True, False])
def test_bars_have_the_names_of_their_places(ax, upright):
    (ax.bar if upright else ax.barh)(["a", "b"], [3, 4], **{"bottom" if upright else "left": [1, 1]}, label="n")
    rows = table(ax)
    place, end = ("x", "y") if upright else ("y", "x")
    assert rows[f"{place}_name"].tolist() == ["a", "b"] and rows[end].tolist() == [4, 5] and rows["value"].tolist() == [1, 1]
    assert rows["series"].tolist() == ["n", "n"]


def test_error_bars_are_two_ends_a_point(ax):
    ax.errorbar([1, 2], [3.0, 4.0], [[0.5, 1.0], [0.25, 2.0]], label="share")
    rows = table(ax)
    ends = rows[rows["kind"] == "area"].groupby("x")["y"].agg(list)
    assert ends.tolist() == [[2.5, 3.25], [3.0, 6.0]] and set(rows["series"]) == {"share"}


def test_a_long_line_is_thinned_to_what_can_be_seen(ax):
    x = np.linspace(0, 1, 20_001)
    ax.plot(x, np.sin(9 * x))
    rows = table(ax)
    assert 500 < len(rows) < 3_000 and rows["x"].iloc[[0, -1]].tolist() == [0, 1]
    grid = np.linspace(0, 1, 999)
    assert np.abs(np.interp(grid, rows["x"], rows["y"]) - np.sin(9 * grid)).max() < 0.01


def test_color_bars_are_no_panel_and_an_empty_figure_has_no_rows(ax):
    assert drawn.table(ax.figure).empty
    ax.figure.colorbar(ax.imshow(np.eye(2)))
    assert set(table(ax)["panel"]) == {0}


def test_data_are_taken_out_of_a_notebook_by_the_figures_names():
    def cell(name=None, shown=1):
        outputs = [nbformat.v4.new_output("display_data", {"image/png": "", drawn.MIME: f"{name}{i}"}) for i in range(shown)]
        metadata = {"mystnb": {"figure": {"name": name}}} if name else {}
        return nbformat.v4.new_code_cell("", outputs=outputs, metadata=metadata)

    notebook = nbformat.v4.new_notebook(cells=[cell("fig-a"), cell("fig-b", 2), cell(), nbformat.v4.new_markdown_cell("")])
    assert drawn.take(notebook, "c") == {"fig-a": "fig-a0", "fig-b": "fig-b0", "fig-b-2": "fig-b1", "fig-c": "None0"}
    assert drawn.take(notebook, "c") == {}
