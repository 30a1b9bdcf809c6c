"""The figures' common style: what a line shows when seeds are missing, stopped early, or of another length."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from lib import plots


def bold(ax):
    return [line for line in ax.lines if line.get_linewidth() > 1]


def test_the_ground_is_opaque_white_on_screen_and_on_disk(ax, tmp_path):
    ax.plot([0, 1], [0, 1])
    ax.figure.savefig(tmp_path / "figure.png")
    assert (plt.imread(tmp_path / "figure.png")[0, 0] == 1).all()


def test_palette_is_ordered_and_distinct():
    colors = plots.palette([64, 8, 16, 8])
    assert list(colors) == [8, 16, 64] and len(set(colors.values())) == 3
    brightness = [sum(to_rgb(color)) for color in colors.values()]
    assert brightness == sorted(brightness)
    assert len(plots.palette([1])) == 1 and plots.palette([]) == {}


def test_seeds_show_each_seed_and_their_median(ax):
    plots.seeds(ax, [0, 1, 2], [[0, 1, np.nan], [0, 3, np.nan], [0, 8, np.nan]], label="loss")
    assert len(ax.lines) == 4
    np.testing.assert_array_equal(bold(ax)[0].get_ydata(), [0, 3, np.nan])
    with pytest.raises(ValueError, match="3 values of x"):
        plots.seeds(ax, [0, 1, 2], [[0, 1]])


def test_a_run_that_stopped_keeps_its_last_value_in_the_median(ax):
    table = pd.DataFrame({"run": ["a", "a", "b", "b", "b", "c", "c", "c"], "step": [0, 1, 0, 1, 2, 0, 1, 2],
                          "test_loss": [0.5, 0.1, 0.5, 0.4, 0.3, 0.5, 0.05, 0.05], "d": 8})
    plots.curves(ax, table, by="d", label="$d$ = {d}")
    median, = bold(ax)
    np.testing.assert_allclose(median.get_ydata(), [0.5, 0.1, 0.1])
    assert median.get_label() == "$d$ = 8"


def test_curves_group_by_several_columns(ax):
    table = pd.DataFrame({"run": list("aabb"), "step": [0, 1, 0, 1], "train_loss": 0.5, "d": [8, 8, 16, 16], "T": 4})
    colors = plots.curves(ax, table, "train_loss", by=["d", "T"])
    assert list(colors) == [(8, 4), (16, 4)]
    assert [line.get_label() for line in bold(ax)] == ["d = 8, T = 4", "d = 16, T = 4"]
    with pytest.raises(ValueError, match="no column loss"):
        plots.curves(ax, table, "loss")


def test_reference_lines_are_grey_and_named(ax):
    plots.chance(ax, 0.5, "no learning")
    plots.reference(ax, [0, 1], [0, 1], "theory")
    assert [line.get_color() for line in ax.lines] == [plots.COLORS["grey"]] * 2
    assert [text.get_text() for text in ax.texts] == ["no learning"]


def waits():
    return pd.DataFrame({"mixer": ["slow", "slow", "fast", "fast"], "emerged": [True, False, True, True],
                         "emergence": [40.0, np.nan, 10.0, 20.0], "observed_until": [40.0, 100.0, 10.0, 20.0]})


def test_strip_has_the_earliest_median_on_top_and_censored_runs_open(ax):
    plots.strip(ax, waits(), "mixer")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fast", "slow"] and ax.yaxis_inverted()
    assert [line.get_xdata()[0] for line in bold(ax)] == [15, 70]
    points = {(x, y): len(dots.get_facecolors()) > 0 for dots in ax.collections for x, y in dots.get_offsets()}
    assert points == {(10, 0): True, (20, 0): True, (40, 1): True, (100, 1): False}
    assert ax.get_xlim()[1] > 100


def test_shares_are_drawn_with_their_intervals(ax):
    rates = pd.DataFrame({"share": [0.0, 0.5], "low": [0.0, 0.2], "high": [0.4, 0.8]})
    plots.shares(ax, [1, 2], rates, label="lax")
    (bars,) = ax.containers
    assert bars.lines[0].get_ydata().tolist() == [0, 0.5]
    assert [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()] == [[0, 0.4], [0.2, 0.8]]


def test_a_table_is_shown_in_words_and_without_raw_nothings():
    raw = pd.DataFrame({"median_step": [1.234, np.inf], "share": [np.nan, 0.5], "runs": [3, 4], "best_mixer": ["rwkv", "attention"], "seen": [True, False]},
                       index=pd.MultiIndex.from_tuples([("mlp_mixer", 1.0), ("gated_deltanet", np.inf)], names=["mixer", "score_bias"]))
    kept = raw.copy()
    shown = plots.table(raw)
    assert list(shown.columns) == ["median step", "share", "runs", "best mixer", "seen"] and list(shown.index.names) == ["mixer", "score bias"]
    assert list(shown.index) == [("MLP-Mixer", 1.0), ("Gated DeltaNet", np.inf)]
    assert shown["median step"].tolist() == [1.23, "not reached"] and shown["share"].tolist() == ["–", 0.5]
    assert shown["best mixer"].tolist() == ["RWKV", "attention"] and shown["runs"].dtype == int and shown["seen"].tolist() == [True, False]
    pd.testing.assert_frame_equal(raw, kept)


def test_every_mixer_has_a_name_of_its_own():
    from lib.models.mixers import MIXERS

    assert set(plots.MIXERS) == {"attention", *MIXERS}
