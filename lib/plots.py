"""One visual language for all chapters: white ground, colour-blind-safe, seeds as thin lines, references in grey."""

import sys
import warnings
from collections.abc import Iterable, Sequence

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patheffects import withStroke

from lib import drawn

COLORS = {  # Okabe and Ito's colours, told apart under every common colour blindness
    "blue": "#0072B2", "orange": "#D55E00", "green": "#009E73", "pink": "#CC79A7",
    "sky": "#56B4E9", "amber": "#E69F00", "black": "#222222", "grey": "#767676",
}

MIXERS = {"attention": "attention", "mlp_mixer": "MLP-Mixer", "mlp_mixer_unmasked": "MLP-Mixer, no mask", "linear_rnn": "linear RNN", "mamba": "Mamba",
          "gated_deltanet": "Gated DeltaNet", "rwkv": "RWKV", "xlstm": "xLSTM"}  # fmt: skip

STYLE = {
    "figure.figsize": (6.4, 3.8), "figure.dpi": 100, "savefig.dpi": 200, "figure.constrained_layout.use": True,
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white", "savefig.transparent": False,
    "font.size": 11, "axes.titlesize": 11, "axes.labelsize": 11, "legend.fontsize": 9.5,
    "xtick.labelsize": 10, "ytick.labelsize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.7, "lines.linewidth": 1.9,
    "legend.frameon": False, "mathtext.fontset": "cm", "svg.hashsalt": "book",
    "axes.prop_cycle": mpl.cycler(color=[c for name, c in COLORS.items() if name not in ("black", "grey")]),
}


def use() -> None:
    """Set the book's style for all figures that follow; in a notebook also the resolution (2x PNG, opaque white), and
    let figures carry their data (`lib.drawn`)."""
    mpl.rcParams.update(STYLE)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina", bbox_inches="tight", facecolor="white")
        drawn.attach()  # after the former, which forgets how figures are shown


def words(name):
    """A name as a reader would write it: mixers by their own names, spaces for underscores; what is no name stays."""
    return MIXERS.get(name, name.replace("_", " ")) if isinstance(name, str) else name


def table(frame: pd.DataFrame, digits: int = 2) -> pd.DataFrame:
    """A table to show: names in words, numbers rounded, "–" where there is none and "not reached" where a wait has no end."""
    frame = frame.round(digits).rename(columns=words, index=words)
    frame.index.names, frame.columns.names = ([words(name) for name in axis.names] for axis in (frame.index, frame.columns))
    for column, kind in frame.dtypes.items():
        if pd.api.types.is_float_dtype(kind) and not np.isfinite(frame[column]).all():
            frame[column] = frame[column].astype(object).where(frame[column].notna(), "–").replace(np.inf, "not reached")
        elif not pd.api.types.is_numeric_dtype(kind):
            frame[column] = frame[column].map(words)
    return frame


def palette(values: Iterable) -> dict:
    """Value -> colour for an ordered parameter (d, T, p ...): distinct values, sorted, from dark to light."""
    ordered = sorted(set(values))
    shades = np.linspace(0.05, 0.82, len(ordered)) if len(ordered) != 1 else [0.3]
    return {value: to_hex(mpl.colormaps["viridis"](shade)) for value, shade in zip(ordered, shades, strict=True)}


def chance(ax: Axes, value: float, label: str = "chance") -> None:
    """Dotted grey line at the level that knowing nothing attains, with its name at the right end."""
    ax.axhline(value, color=COLORS["grey"], linestyle=":", linewidth=1.3, zorder=1, label=f"_{label}")
    ax.annotate(label, (1, value), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points",
                ha="right", va="bottom", fontsize=9, color=COLORS["grey"], zorder=4, path_effects=[withStroke(linewidth=2.5, foreground="white")])


def reference(ax: Axes, x: Sequence[float], y: Sequence[float], label: str | None = None, **style) -> None:
    """Dashed grey line: what a theory or a paper says, to hold measured points against."""
    defaults = {"color": COLORS["grey"], "linestyle": "--", "linewidth": 1.4, "zorder": 1, "label": label}
    ax.plot(x, y, **{**defaults, **style})


def seeds(ax: Axes, x: Sequence[float], ys: Sequence[Sequence[float]], *, color: str | None = None,
          label: str | None = None) -> None:
    """Every seed as a thin line and their median as a bold one; ys is (seed, x), NaN where a seed has no value."""
    ys = np.atleast_2d(np.asarray(ys, dtype=float))
    if ys.shape[1] != len(x):
        raise ValueError(f"seeds: {len(x)} values of x, but each seed has {ys.shape[1]}")
    color = color or ax._get_lines.get_next_color()
    if len(ys) > 1:
        ax.plot(x, ys.T, color=color, linewidth=0.7, alpha=0.45)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value has no median, and none is drawn
        median = np.nanmedian(ys, axis=0)
    ax.plot(x, median, color=color, label=label)


def curves(ax: Axes, table: pd.DataFrame, y: str = "test_loss", by: str | Sequence[str] = (), *, x: str = "step",
           label: str | None = None, colors: dict | None = None) -> dict:
    """Learning curves (columns run, x, y and those in `by`): one colour a group, a thin line a run, a bold median.

    A run that stopped early counts with its last value in the median: dropping it would leave only the slow ones.
    `label` is a format of the columns in `by`, such as "$d$ = {d}". Returns group -> colour.
    """
    by = [by] if isinstance(by, str) else list(by)
    if missing := {"run", x, y, *by} - set(table.columns):
        raise ValueError(f"curves: the table has no column {', '.join(sorted(missing))}")
    groups = dict(list(table.groupby(by if len(by) != 1 else by[0], sort=True))) if by else {"": table}
    colors = colors or palette(groups)
    for group, rows in groups.items():
        names = dict(zip(by, group if len(by) > 1 else [group], strict=True)) if by else {}
        wide = rows.pivot(index=x, columns="run", values=y).interpolate(method="index", limit_area="inside")
        if wide.shape[1] > 1:
            ax.plot(wide.index, wide, color=colors[group], linewidth=0.7, alpha=0.45)
        text = label.format(**names) if label else ", ".join(f"{name} = {value}" for name, value in names.items())
        ax.plot(wide.index, wide.ffill().median(axis=1), color=colors[group], label=text or None)
    return colors


def emergence(ax: Axes, table: pd.DataFrame, x: str, by: str, *, law=None, label: str = "{by} = {value}") -> dict:
    """Emergence steps against x on log axes: a dot a run, an open triangle where it was censored, and a line a group.

    `table` is `lib.emergence.emergence`'s. The line is `law` (a `lib.fit.PowerLaw`) or else the median over seeds.
    Ordered values of `by` get ordered colours, names distinct ones. Returns group -> colour.
    """
    names = table[by].drop_duplicates()
    colors = palette(names) if names.map(lambda v: not isinstance(v, str)).all() else dict(zip(names, COLORS.values(), strict=False))
    for value, rows in table.groupby(by, sort=False):
        seen, late = rows[rows["emerged"]], rows[~rows["emerged"]]
        style = dict(color=colors[value], label=label.format(by=by, value=value))
        ax.scatter(seen[x], seen["emergence"], s=18, alpha=0.75, linewidths=0, **style)
        ax.scatter(late[x], late["observed_until"], s=26, marker="^", facecolors="none", edgecolors=colors[value])
        line = rows.drop_duplicates(x).sort_values(x)
        height = rows.groupby(x)["observed_until"].median() if law is None else law.predict(line)
        ax.plot(line[x], height, color=colors[value], linewidth=1.2)
    ax.set(xscale="log", yscale="log", ylabel="emergence (steps)")
    ticks = sorted(set(table[x]))
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    return colors


def strip(ax: Axes, table: pd.DataFrame, by: str) -> None:
    """Emergence steps on a log axis, a line a name in `by`, the earliest median on top and of equal ones the one that more
    runs reach: a dot a run, an open triangle where it was censored, a bar at the median. `table` is `lib.emergence.emergence`'s."""
    order = table.groupby(by).agg(median=("observed_until", "median"), share=("emerged", "mean"))
    medians = order.sort_values(["median", "share"], ascending=[True, False])["median"]
    for place, (name, median) in enumerate(medians.items()):
        rows = table[table[by] == name]
        there, late = rows[rows["emerged"]], rows[~rows["emerged"]]
        ax.plot([median, median], [place - 0.3, place + 0.3], color=COLORS["black"], linewidth=1.6)
        ax.scatter(there["emergence"], [place] * len(there), s=22, color=COLORS["blue"], alpha=0.75, linewidths=0)
        ax.scatter(late["observed_until"], [place] * len(late), s=28, marker=">", facecolors="none", edgecolors=COLORS["blue"])
    seen = table["observed_until"]
    ax.set(xscale="log", xlabel="emergence (steps)", ylim=(len(medians) - 0.5, -0.5), xlim=(seen.min() / 1.6, seen.max() * 1.6))
    ax.set_yticks(range(len(medians)), map(words, medians.index))
    ax.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())


def shares(ax: Axes, x: Sequence[float], rates: pd.DataFrame, *, color: str | None = None, label: str | None = None) -> None:
    """Shares of runs with their intervals as bars; `rates` is `lib.emergence.solve_rate`'s, one row for each x."""
    color = color or ax._get_lines.get_next_color()
    span = np.clip([rates["share"] - rates["low"], rates["high"] - rates["share"]], 0, None)
    ax.errorbar(x, rates["share"], span, color=color, label=label, marker="o", markersize=4, linewidth=1.4, elinewidth=0.9, capsize=2)
    ax.set(ylim=(-0.04, 1.04))


def slope(ax: Axes, x: Sequence[float], y: Sequence[float], exponent: float, label: str) -> None:
    """Dashed grey line of a power law with this exponent through the geometric centre of the points (log axes)."""
    x, y = (np.log(np.asarray(values, dtype=float)) for values in (x, y))
    line = np.array([x.min(), x.max()])
    reference(ax, np.exp(line), np.exp(y.mean() + exponent * (line - x.mean())), label)
