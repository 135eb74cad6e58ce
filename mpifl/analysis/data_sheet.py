"""The sheet that `mpifl data` draws: sample images of each group, class counts and sizes of each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import UserError

SPLITS = (  # colours of Okabe and Ito, with dashes for greyscale
    ("training", "#0072B2", "-"),
    ("validation", "#D55E00", "--"),
    ("test", "#000000", ":"),
)
COUNT_COLOURS = "Blues"  # white means none; lightness decreases steadily, for greyscale
SHARE_STYLES = (("#0072B2", ""), ("#E69F00", "//"))
INCH_WIDE, INCH_CELL, INCH_MARGIN, GAP = 10.0, 0.66, 2.6, 0.08  # the gap is a fraction of a cell
MAX_TICKS = 20


@dataclass(frozen=True)
class Strip:
    """A row of sample images.

    Attributes:
        title: whose images they are.
        images: images, uint8 [C, H, W]; None for an empty place.
        captions: text below each image.
    """

    title: str
    images: Sequence[np.ndarray | None]
    captions: Sequence[str] = ()


@dataclass(frozen=True)
class Sheet:
    """The content of a sheet.

    Attributes:
        title: the title.
        when: text that names the visit to which the counts refer; empty if all visits have the same data.
        strips: rows of sample images; empty if samples are not images.
        columns: headings above the images; empty if every image has its own caption.
        clients: the clients shown below the images, in ascending order, int64 [n].
        groups: their groups, int64 [n]; None if there are none.
        counts: their number of training images of each class, int64 [n, L]; None if labels are no classes.
        sizes: their number of training, validation and test images, int64 [n, 3].
        shares: shares of the groups in the data of one client at two visits, float64 [2, K]; None if all
            visits have the same data.
        share_title: title of the panel of shares.
    """

    title: str
    when: str
    strips: Sequence[Strip]
    columns: Sequence[str]
    clients: np.ndarray
    groups: np.ndarray | None
    counts: np.ndarray | None
    sizes: np.ndarray
    shares: np.ndarray | None = None
    share_title: str = ""


def draw(sheet: Sheet, path: Path) -> None:
    """Write a sheet as a PNG file.

    Args:
        sheet: the content.
        path: the file.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # heavy: only when something is drawn
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    wide = max((len(strip.images) for strip in sheet.strips), default=0)
    cell = INCH_CELL * (1.25 if sheet.columns else 1.5)  # captions take room
    panels = [(cell * len(sheet.strips) + 0.4, _images)] if sheet.strips else []
    panels += [(1.6, _shares)] if sheet.shares is not None else []
    panels += [(2.6, _counts)] if sheet.counts is not None else []
    panels += [(1.7, _sizes)]
    heights = [height for height, _ in panels]
    size = (max(INCH_WIDE, INCH_MARGIN + wide * INCH_CELL * 1.2), sum(heights) + 0.8)
    figure = Figure(size, dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04))
    figure.suptitle(sheet.title, fontsize=11, fontweight="bold")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (_, panel), axis in zip(panels, axes, strict=True):
        axis.tick_params(labelsize=8)
        panel(axis, sheet)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError("--sheet", str(path), f"cannot be written ({error.strerror})") from error


def _images(axis: Any, sheet: Sheet) -> None:
    """Draw all strips in one panel."""
    from matplotlib.patches import Rectangle

    rows, wide = len(sheet.strips), max(len(strip.images) for strip in sheet.strips)
    step_x, step_y = 1 + GAP, 1 + GAP + (0.0 if sheet.columns else 0.28)
    for r, strip in enumerate(sheet.strips):
        for c, image in enumerate(strip.images):
            x, y = c * step_x, r * step_y
            if image is None:
                axis.text(x + 0.5, y + 0.5, "none", ha="center", va="center", fontsize=7, color="0.5")
                continue
            axis.imshow(_rgb(image), extent=(x, x + 1, y + 1, y), interpolation="nearest")
            axis.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor="0.7", linewidth=0.5))
            if not sheet.columns and c < len(strip.captions):
                axis.text(x + 0.5, y + 1.04, strip.captions[c], ha="center", va="top", fontsize=7)
    axis.set(xlim=(-GAP, wide * step_x), ylim=(rows * step_y, -GAP), aspect="equal", anchor="W")
    axis.set_yticks([r * step_y + 0.5 for r in range(rows)], [strip.title for strip in sheet.strips])
    axis.set_xticks([c * step_x + 0.5 for c in range(len(sheet.columns))], sheet.columns)
    axis.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)


def _rgb(image: np.ndarray) -> np.ndarray:
    """Return an image [1 or 3, H, W] as uint8 [H, W, 3]."""
    return np.ascontiguousarray(np.broadcast_to(image, (3, *image.shape[1:])).transpose(1, 2, 0))


def _shares(axis: Any, sheet: Sheet) -> None:
    """Draw the shares of the groups at two visits."""
    assert sheet.shares is not None
    places = np.arange(sheet.shares.shape[1])
    for visit, (share, (colour, hatch)) in enumerate(zip(sheet.shares, SHARE_STYLES, strict=True)):
        kwargs = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": f"visit {visit}"}
        bars = axis.bar(places + 0.4 * visit - 0.2, share, 0.38, **kwargs)
        axis.bar_label(bars, [f"{s:.2f}" for s in share], fontsize=7, padding=1)
    axis.set_xticks(places, [f"group {g}" for g in places])
    axis.set_ylim(0, 1.15 * float(sheet.shares.max()))
    axis.set_ylabel("share of the images", fontsize=9)
    axis.set_title(sheet.share_title, fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1.0), borderpad=0)
    axis.spines[["top", "right"]].set_visible(False)


def _counts(axis: Any, sheet: Sheet) -> None:
    """Draw the number of training images of each class at each client."""
    from matplotlib.colors import PowerNorm

    assert sheet.counts is not None
    n, classes = sheet.counts.shape
    held = sheet.counts[sheet.counts > 0]
    uneven = bool(len(held)) and held.max() > 8 * np.median(held)  # small counts would look like zero
    image = axis.imshow(
        sheet.counts.T,
        aspect="auto",
        origin="lower",
        cmap=COUNT_COLOURS,
        norm=PowerNorm(0.5 if uneven else 1.0, 0, max(1, int(sheet.counts.max()))),
        interpolation="nearest",
        extent=(-0.5, n - 0.5, -0.5, classes - 0.5),
    )
    bar = axis.figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03)
    bar.set_label("training images" + (", square-root scale" if uneven else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    axis.set_yticks(_thinned(classes))
    axis.set_ylabel("class", fontsize=9)
    numbered = _number_groups(axis, sheet)
    title = f"Training images of each class at each client{sheet.when}"
    axis.set_title(title, fontsize=9, loc="left", pad=16 if numbered else 6)
    _clients_below(axis, sheet)


def _sizes(axis: Any, sheet: Sheet) -> None:
    """Draw the number of images of each client in each split."""
    places = np.arange(len(sheet.clients) + 1) - 0.5
    for values, (name, colour, dashes) in zip(sheet.sizes.T, SPLITS, strict=True):
        if values.any():
            steps = np.append(values, values[-1])
            axis.step(places, steps, where="post", color=colour, linestyle=dashes, linewidth=1.6, label=name)
    positive = sheet.sizes[sheet.sizes > 0]
    if len(positive) and positive.max() > 50 * positive.min():
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * float(sheet.sizes.max()))
    axis.set_ylabel("images", fontsize=9)
    axis.set_title(f"Images of each client{sheet.when}", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1.0), borderpad=0)
    axis.spines[["top", "right"]].set_visible(False)
    _clients_below(axis, sheet)


def _number_groups(axis: Any, sheet: Sheet) -> bool:
    """Label the blocks of clients of one group if they are few; return whether they are labelled."""
    groups = sheet.groups
    if groups is None or np.count_nonzero(np.diff(groups)) >= MAX_TICKS:
        return False
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    for start, stop in zip(starts, [*starts[1:], len(groups)], strict=True):
        text = f"group {groups[start]}"
        axis.annotate(
            text,
            ((start + stop - 1) / 2, 1),
            xytext=(0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    return True


def _clients_below(axis: Any, sheet: Sheet) -> None:
    """Label the axis of clients, and draw a line between groups."""
    n = len(sheet.clients)
    ticks = _thinned(n)
    axis.set(xlim=(-0.5, n - 0.5))
    axis.set_xticks(ticks, [str(sheet.clients[t]) for t in ticks])
    axis.set_xlabel("client", fontsize=9)
    if sheet.groups is not None:
        for border in np.flatnonzero(np.diff(sheet.groups)):
            for colour, width in (("white", 2.4), ("0.2", 0.8)):  # visible on dark and on light
                axis.axvline(border + 0.5, color=colour, linewidth=width, zorder=1)


def _thinned(count: int) -> np.ndarray:
    """Return at most MAX_TICKS round positions in 0..count - 1."""
    steps = (s * 10**e for e in range(9) for s in (1, 2, 5))
    return np.arange(0, count, next(s for s in steps if count <= s * MAX_TICKS))
