"""What a figure draws, as a table: every figure of a chapter carries its own data, and the site offers them as CSV.

One row a point, bar or cell of a map, in the figure's own units. A line of more than MANY points is thinned to what can be seen.

    panel   number of the axes, from 0, in reading order      title, x_label, y_label   their texts
    kind    line, points, bars, area (its outline), map, or level: a straight line across the axes at x or at y
    series  the name in the legend; an artist without one has that of its colour, if a legend names it
    part    number of the artist in its panel: one line, one cloud of points, one map
    x, y    place; of a bar its position and its end; of a map's cell its column and line
    value   of a map's cell or a contour; of a bar where it begins; of points the number that colours them
    x_name, y_name    the axis's name for that place, where it has names
"""

from __future__ import annotations

import re
import sys

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.collections import Collection, LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, Container
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

MIME = "text/csv"  # of a figure's data in an executed notebook
COLUMNS = ["panel", "title", "x_label", "y_label", "kind", "series", "part", "x", "y", "value", "x_name", "y_name"]
MANY = 500  # points of a line
AUTOMATIC = re.compile(r"_(child\d+|nolegend_|container\d+|image\d+)$")  # labels that matplotlib gives


def _columns(kind: str, artist, x, y, value=np.nan) -> pd.DataFrame:
    return pd.DataFrame({"kind": kind, "artist": artist, "x": x, "y": y, "value": value})


def _seen(ax: Axes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which points of a line to keep: all, or of more than MANY about one for each pixel that the line is long."""
    if len(x) <= MANY:
        return np.full(len(x), True)
    pixels = ax.transData.transform(np.column_stack([x, y]))
    way = np.nan_to_num(np.hypot(*np.diff(pixels, axis=0).T)).cumsum()
    return np.concatenate([[True], np.diff(np.floor(way), prepend=0) > 0]) | np.isnan(y) | (np.arange(len(x)) == len(x) - 1)


def _line(ax: Axes, line) -> pd.DataFrame:
    x, y = (np.asarray(values, dtype=float) for values in line.get_data(orig=False))
    along_x, along_y = line.get_transform().contains_branch_seperately(ax.transData)
    if along_x and along_y:
        x, y = x[keep := _seen(ax, x, y)], y[keep]
        return _columns("line" if line.get_linestyle() != "None" else "points", line, x, y)
    return _columns("level", line, x[:1] if along_x else np.nan, y[:1] if along_y else np.nan)


def _image(picture, cells: np.ndarray, x: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    lines, columns = (grid.ravel() for grid in np.meshgrid(y, x, indexing="ij"))
    return _columns("map", picture, columns, lines, np.ma.filled(np.ma.asarray(cells, dtype=float), np.nan).ravel())


def _collection(ax: Axes, one: Collection) -> pd.DataFrame | None:
    if isinstance(one, PathCollection):  # a scatter
        at = np.ma.filled(np.ma.asarray(one.get_offsets(), dtype=float), np.nan)
        values = one.get_array()
        return _columns("points", one, at[:, 0], at[:, 1], np.nan if values is None else np.asarray(values, dtype=float))
    if isinstance(one, QuadMesh):
        corners = one.get_coordinates()
        middle = (corners[:-1, :-1] + corners[1:, 1:]) / 2
        return _image(one, one.get_array().reshape(middle.shape[:2]), middle[0, :, 0], middle[:, 0, 1])
    if isinstance(one, ContourSet):
        drawn = [(level, path.vertices, _seen(ax, *path.vertices.T)) for level, path in zip(one.levels, one.get_paths(), strict=False)]
        return pd.concat([_columns("line", one, *at[keep].T, level) for level, at, keep in drawn])
    if isinstance(one, PolyCollection) or (isinstance(one, LineCollection) and one.get_transform() == ax.transData):
        paths = [path.vertices for path in one.get_paths() if len(path.vertices)]
        return pd.concat([_columns("area", one, at[:, 0], at[:, 1]) for at in paths]) if paths else None
    return None


def _panel(ax: Axes) -> list[pd.DataFrame]:
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    found = [_line(ax, line) for line in ax.lines]
    found += [_collection(ax, one) for one in ax.collections]
    for bar in bars:
        upright = bar.orientation == "vertical"
        boxes = [patch.get_bbox() for patch in bar.patches]
        place = [(box.x0 + box.x1) / 2 if upright else (box.y0 + box.y1) / 2 for box in boxes]
        begin, end = ([getattr(box, f"{'y' if upright else 'x'}{side}") for box in boxes] for side in (0, 1))
        found.append(_columns("bars", bar, *((place, end) if upright else (end, place)), begin))
    for picture in ax.images:
        cells = picture.get_array()
        if cells is not None and cells.ndim == 2:  # a picture in colours has no values
            left, right, bottom, top = picture.get_extent()
            (n, m), step = cells.shape, lambda a, b, k: a + (np.arange(k) + 0.5) * (b - a) / k
            low, high = (top, bottom) if picture.origin == "upper" else (bottom, top)
            found.append(_image(picture, cells, step(left, right, m), step(low, high, n)))
    return [part for part in found if part is not None and len(part)]


def _color(artist) -> str | None:
    """The one colour that tells an artist's series; None if it has several, or a colour map."""
    if isinstance(artist, Container):
        artist = artist[0]
    if getattr(artist, "get_array", lambda: None)() is not None:
        return None
    for ask in ("get_color", "get_facecolor", "get_edgecolor"):
        colors = getattr(artist, ask, lambda: ())()
        colors = [colors] if isinstance(colors, str) or np.ndim(colors) == 1 else list(colors)
        if len(found := {to_hex(color) for color in colors if len(color)}) == 1:
            return found.pop()
    return None


def _names(axis: Axis, places: pd.Series) -> list[str]:
    """The axis's own name for each place, where its ticks are words."""
    if not isinstance(axis.get_major_formatter(), FixedFormatter | StrCategoryFormatter):
        return [""] * len(places)
    ticks = zip(axis.get_majorticklocs(), (label.get_text() for label in axis.get_majorticklabels()), strict=False)
    words = {round(float(place), 6): text for place, text in ticks if not text.replace(".", "", 1).isdigit()}
    return [words.get(round(place, 6), "") for place in places]


def table(figure: Figure) -> pd.DataFrame:
    """The figure's data, columns as above; empty if it draws none."""
    axes, rows = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"], []
    called = [{_color(handle): label for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)} for ax in axes]
    shared = called[0] if sum(map(bool, called)) == 1 and called[0] else {}  # one legend for all panels
    for number, (ax, own) in enumerate(zip(axes, called, strict=True)):
        names = own or shared
        for part, found in enumerate(_panel(ax)):
            artist = found["artist"].iloc[0]
            label, color = AUTOMATIC.sub("", str(artist.get_label())).removeprefix("_"), _color(artist)
            by_color = names.get(color, "") if color and found["kind"].iloc[0] != "level" else ""
            texts = {"title": ax.get_title(), "x_label": ax.get_xlabel(), "y_label": ax.get_ylabel()}
            texts |= {"x_name": _names(ax.xaxis, found["x"]), "y_name": _names(ax.yaxis, found["y"])}
            rows.append(found.drop(columns="artist").assign(panel=number, part=part, series=label or by_color, **texts))
    return pd.concat(rows, ignore_index=True)[COLUMNS] if rows else pd.DataFrame(columns=COLUMNS)


def csv(figure: Figure) -> str:
    """The figure's data as CSV text, six digits a number."""
    return table(figure).to_csv(index=False, float_format="%.6g")


def attach() -> None:
    """In a notebook, let every figure that is shown carry its data beside its picture, as `text/csv`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class Formatter(BaseFormatter):
        format_type = Unicode(MIME)
        print_method = ObjectName("_repr_csv_")

    formatter = Formatter(parent=shell.display_formatter)
    formatter.for_type(mpl.figure.Figure, csv)
    shell.display_formatter.formatters[MIME] = formatter


def take(notebook, chapter: str) -> dict[str, str]:
    """Take the figures' data out of an executed notebook: name -> CSV text; the name stands in the cell's metadata."""
    found: dict[str, str] = {}
    for cell in notebook.cells:
        name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name") or f"fig-{chapter}"
        for output in cell.get("outputs", ()):
            if text := output.get("data", {}).pop(MIME, None):
                number = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
                found[f"{name}-{number + 1}" if number else name] = text
    return found
