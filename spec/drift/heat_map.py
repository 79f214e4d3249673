"""A picture of drift: layers and kinds of state down, rounds across."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from spec.drift.experiment import Point, Report
from spec.drift.parts import MODEL, Where

POINTS = {
    Point.VERIFY_IN: "before verify",
    Point.ROW: "rows of the window",
    Point.COMMIT: "after commit",
}
ROW_INCHES, MOST_INCHES = 0.2, 90.0


def magnitudes(report: Report, point: Point) -> Float[np.ndarray, "places rounds"]:
    """Largest difference of each place and round: NaN where all bits are equal, infinite where
    one of the two has no such rows or a value that is not finite."""
    out = np.full((len(report.wheres), len(report.accepted)), np.nan)
    place = {where: i for i, where in enumerate(report.wheres)}
    for cell in report.cells:
        if cell.point is point:
            found, at = cell.difference, (place[cell.where], cell.round)
            # Equal values of other bits, and rows that only one has, have no magnitude.
            out[at] = np.fmax(out[at], found.max_abs if found.max_abs > 0 else np.inf)
    return out


def name(where: Where) -> str:
    """A layer and kind in words."""
    layer, kind = where
    return kind if layer == MODEL else f"layer {layer} {kind}"


def write_heat_map(report: Report, path: Path, *, title: str) -> None:
    """Write the picture; its suffix is its format.

    Raises:
      ValueError: matplotlib is missing, or does not know the format.
      OSError: the file cannot be written.
    """
    try:
        # An optional extra: nothing else may depend on it.
        figure_module: Any = importlib.import_module("matplotlib.figure")
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "a heat map needs matplotlib: install the extra `plot` (qwen-hybrid[plot])"
        ) from error
    height = min(ROW_INCHES * len(report.wheres) + 2.0, MOST_INCHES)
    width = 4.0 + 3.0 * max(1.0, len(report.accepted) / 50)
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(POINTS), sharey=True)
    found = {point: magnitudes(report, point) for point in POINTS}
    every = np.concatenate([m[np.isfinite(m)] for m in found.values()])
    low, high = (np.log10(every.min()), np.log10(every.max())) if every.size else (-8.0, 0.0)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="white", over="black")
    image = None
    for panel, (point, label) in zip(panels, POINTS.items(), strict=True):
        levels = np.ma.masked_invalid(np.where(np.isposinf(found[point]), 1e300, found[point]))
        image = panel.imshow(
            np.ma.log10(levels),
            aspect="auto",
            # Zero must not fade into its neighbours.
            interpolation="nearest",
            cmap=colours,
            vmin=low,
            vmax=max(high, low + 1),
        )
        panel.set_title(label, fontsize=9)
        panel.set_xlabel("round")
    panels[0].set_yticks(range(len(report.wheres)), [name(w) for w in report.wheres], fontsize=7)
    figure.colorbar(
        image,
        ax=list(panels),
        label="log10 of the largest difference",
        extend="max",
        extendfrac=0.02,
        aspect=60,
    )
    figure.suptitle(f"{title}\nwhite: every bit equal; black: no value to compare", fontsize=9)
    figure.savefig(path, dpi=100)
