"""Accuracy against energy and bytes: the figure of docs/costs.md from the sweep `sweeps/energy`.

mpifl sweep sweeps/energy --output.id figure
python docs/examples/energy.py runs/energy-figure energy.png
"""

from __future__ import annotations

import sys

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

import mpifl


def main(sweep: str, image: str) -> None:
    """Write an image: the curve of each method, its mean over seeds, against energy and against bytes."""
    runs = mpifl.table(sweep, of="metrics")
    runs["kJ"] = runs["joules"] / 1e3
    runs["MB"] = (runs["federation_bytes_up"] + runs["federation_bytes_down"]) / 1e6
    figure = Figure((8, 3.4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for method, rows in runs.groupby("configuration", sort=False):
        mean = rows.groupby("round")[["kJ", "MB", "accuracy_mean"]].mean()
        for axes, cost in ((left, "kJ"), (right, "MB")):
            axes.plot(mean[cost], 100 * mean["accuracy_mean"], "o-", ms=3, lw=1.2, label=method)
    left.set(xscale="log", xlabel="energy of all clients, kJ", ylabel="mean accuracy, %")
    right.set(xscale="log", xlabel="MB sent, up and down")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(alpha=0.25, which="both")
    figure.savefig(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
