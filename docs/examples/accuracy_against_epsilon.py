"""Accuracy against epsilon: the figure of docs/privacy.md from a sweep over methods and privacy.

mpifl sweep sweeps/privacy --output.id figure
python docs/examples/accuracy_against_epsilon.py runs/privacy-figure privacy.png
"""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.figure import Figure

import mpifl


def main(sweep: str, image: str) -> None:
    """Write an image: a line for each method; horizontal lines for clipping alone, and for neither."""
    runs = mpifl.table(sweep, of="final")
    figure = Figure((5.5, 3.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for i, (method, rows) in enumerate(runs.groupby("algorithm.name", sort=False)):
        private = rows[np.isfinite(rows["epsilon"].astype(float))].sort_values("epsilon")
        axes.plot(private["epsilon"], private["accuracy_mean"], "o-", color=f"C{i}", label=method)
        for name, dash in (("central", ":"), ("none", "--")):
            without = rows[(rows["privacy.name"] == name) & ~np.isfinite(rows["epsilon"].astype(float))]
            label = f"{method}, {'clipped, no noise' if name == 'central' else 'neither'}"
            axes.axhline(without["accuracy_mean"].mean(), color=f"C{i}", ls=dash, label=label)
    axes.set(xscale="log", xlabel="epsilon", ylabel="mean accuracy")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.25)
    figure.savefig(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
