"""`mpifl data`: a table of a configuration's clients and a sheet of their images; trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from mpifl.analysis.data_sheet import Sheet, Strip, draw
from mpifl.analysis.figures import COLOURS
from mpifl.core.errors import first_of
from mpifl.core.federation import CLASSES, IMAGES, MASKS, MULTI_HOT, NUMBERS, Split
from mpifl.core.optional_packages import need_figures
from mpifl.data import PoolFederation, histogram, label_distance, open_federation
from mpifl.data.pool import void_of
from mpifl.data.transforms import ToTensor
from mpifl.experiment import loader
from mpifl.experiment.schema import Config

MAX_COUNTED, MAX_SHOWN, MAX_STRIPS = 2000, 500, 10
PER_STRIP, MAX_LABEL_COLUMNS = 10, 12  # images, columns with headings
LOOKED_AT = 8  # clients searched for images
MAX_NAMED = 20  # classes
PALETTE = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in ("#000000", *COLOURS[:-1])], np.uint8)


def look(config: Config, sheet: Path, say: Callable[[str], None]) -> str:
    """Draw the sheet of a configuration and return its table; only on rank 0.

    Args:
        config: the configuration.
        sheet: PNG file to write.
        say: called with lines of progress.

    Raises:
        UserError: Matplotlib is not installed, the data cannot be opened, or the sheet cannot be written.
    """
    need_figures("--sheet", str(sheet))
    federation = open_federation(config.data, config.seed.data, say)
    clients = _evenly(federation.num_clients, MAX_COUNTED)
    counts = _counts(federation, clients)
    draw(_sheet(config, federation, clients, counts), sheet)
    return "\n".join(_table(config, federation, clients, counts))


def _counts(federation: PoolFederation, clients: np.ndarray) -> np.ndarray | None:
    """Return training samples of each client by class [n, L]; None if labels are no classes."""
    return histogram(federation, clients=clients) if federation.info.labels == CLASSES else None


def _title(config: Config, federation: PoolFederation) -> str:
    tree, clients = loader.to_tree(config)["data"], f"{federation.num_clients:,} clients"
    return f"{tree['source']['name']}, scenario {tree['scenario']['name']}: {clients}"


# -- the table -----------------------------------------------------------------------------------------------


def _table(
    config: Config, federation: PoolFederation, clients: np.ndarray, counts: np.ndarray | None
) -> list[str]:
    """Return the lines of the table."""
    parts = _parts(federation, clients)
    head = ("", "clients", "training", "validation", "test", "classes", "label distance")
    rows = [head, ("", "", *["min / median / max"] * 3, "per client", "mean (max)")]
    for name, members in parts:
        sizes = federation.sizes[clients[members]]
        spreads = (" / ".join(f"{int(q)}" for q in np.quantile(s, (0, 0.5, 1))) for s in sizes.T)
        of_classes = ("-", "-") if counts is None else _class_columns(counts, members)
        rows.append((name, str(len(members)), *spreads, *of_classes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    info = federation.info
    inputs = [(f"{part.name} ", part.shape) for part in info.parts] or [("", federation.shape)]
    shape = ", ".join(name + " x ".join(map(str, sides)) for name, sides in inputs)
    words = {CLASSES: "classes", MULTI_HOT: "labels", NUMBERS: "targets", MASKS: "classes of pixels"}
    labels = words.get(info.labels, info.labels)
    more = f"{federation.num_classes} {labels}, {info.inputs} {shape}, data seed {config.seed.data}"
    return [f"{_title(config, federation)}, {more}", "", *lines, "", *_remarks(federation, clients)]


def _class_columns(counts: np.ndarray, members: np.ndarray) -> tuple[str, str]:
    """Return the number of classes of some of the clients, and their label distance to all."""
    held, far = (counts[members] > 0).sum(axis=1), label_distance(counts)[members]
    classes = f"{held.min()}" if held.min() == held.max() else f"{held.min()} to {held.max()}"
    return classes, f"{far.mean():.2f} ({far.max():.2f})"


def _parts(federation: PoolFederation, clients: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return (name, positions in `clients`) of each group, then of all clients."""
    groups = np.zeros(0, int) if federation.groups is None else federation.groups[clients]
    parts = []
    for group in np.unique(groups).tolist():
        name = _name_of(federation.names, group)
        parts.append((f"group {group}{': ' * bool(name)}{name}", np.flatnonzero(groups == group)))
    return [*parts, ("all", np.arange(len(clients)))]


def _name_of(names: Sequence[str], number: int) -> str:
    """Return the name of a group or class; empty if it has none."""
    return names[number] if number < len(names) else ""


def named_classes(names: Sequence[str]) -> str:
    """Return numbers and names of classes in a line: `0 cat, 1 dog`."""
    return first_of([f"{c} {name}" for c, name in enumerate(names)], MAX_NAMED)


def _remarks(federation: PoolFederation, clients: np.ndarray) -> list[str]:
    """Return the lines below the table."""
    names = federation.class_names
    lines = [f"classes                {named_classes(names)}"] if names else []
    lines += [f"test images            {federation.test_pool:,} different ones in all"]
    if not federation.has_test_data():
        lines.append("test data              none: a run is refused, unless it has evaluation.train")
    if len(clients) < federation.num_clients:
        lines.append(f"counted                {len(clients):,} clients, evenly spaced")
    lines += [f"further test set       {name}" for name in federation.extra]
    if federation.targets is not None:
        lines.append(f"targets                clients {federation.targets[0]} to {federation.targets[-1]}")
    public = federation.public()
    if public:
        lines.append(f"server's own sets      {len(public)} of {len(public[0])} images")
    if federation.changes:
        said = "a client's data are drawn anew at every visit; counted at visit 0"
        lines.append(f"visits                 {said}")
    return lines


# -- the sheet -----------------------------------------------------------------------------------------------


def _sheet(
    config: Config, federation: PoolFederation, clients: np.ndarray, counts: np.ndarray | None
) -> Sheet:
    """Return the content of the sheet."""
    shown = _evenly(len(clients), MAX_SHOWN)
    by_label = federation.num_classes <= MAX_LABEL_COLUMNS
    dynamic, named = federation.changes, federation.class_names
    pictures = federation.info.inputs == IMAGES and federation.info.labels in (CLASSES, MASKS)
    by_label = by_label and federation.info.labels != MASKS  # each image has a caption of its own
    strips = []
    if pictures:
        strips = [*(_public_strips(federation) if dynamic else _group_strips(federation))]
    for visit in (0, 1) if dynamic and pictures else ():
        group = 0 if federation.groups is None else int(federation.groups[0])
        strips.append(_strip(federation, [0], f"client 0 (group {group})\nvisit {visit}", visit=visit))
    mixtures = [federation.mixture(0, visit) for visit in (0, 1)] if dynamic else []
    return Sheet(
        title=_title(config, federation),
        when=", visit 0" if dynamic else "",
        strips=strips,
        columns=[_name_of(named, c) or f"label {c}" for c in range(federation.num_classes * by_label)],
        clients=clients[shown],
        groups=None if federation.groups is None else federation.groups[clients[shown]],
        counts=None if counts is None else counts[shown],
        sizes=federation.sizes[clients[shown]],
        shares=np.array(mixtures) if mixtures and mixtures[0] is not None else None,
        share_title="Share of each group in the images of client 0, at two visits",
    )


def _group_strips(federation: PoolFederation) -> list[Strip]:
    """Return a strip for each group, or for some clients if there are no groups."""
    if federation.groups is None:
        some = _evenly(federation.num_clients, 6)
        return [_strip(federation, [int(k)], f"client {k}\n{federation.sizes[k, 0]} images") for k in some]
    strips = []
    for group in np.unique(federation.groups)[:MAX_STRIPS]:
        members = np.flatnonzero(federation.groups == group)
        title = f"group {group}, {len(members)} clients\n{_name_of(federation.names, int(group))}"
        strips.append(_strip(federation, members[:LOOKED_AT].tolist(), title.rstrip()))
    for name in federation.extra:
        members = federation.targets if federation.targets is not None else np.arange(1)
        group = int(federation.groups[members[0]])
        title = f"group {group}, test set\n{name}"
        strips.append(_strip(federation, members[:LOOKED_AT].tolist(), title, split=name))
    return strips


def _public_strips(federation: PoolFederation) -> list[Strip]:
    """Return a strip for each of the server's own sets; if it has none, the strips of the groups."""
    sets = federation.public()[:MAX_STRIPS]
    titles = [f"group {g}, server's set\n{_name_of(federation.names, g)}" for g in range(len(sets))]
    strips = [
        _chosen(*_pixels(federation, s), federation.num_classes, title)
        for s, title in zip(sets, titles, strict=True)
    ]
    return strips or _group_strips(federation)


def _pixels(federation: PoolFederation, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return (images uint8 [n, C, H, W], labels) of a normalised split."""
    assert isinstance(federation.to_tensor, ToTensor), "only images have a strip"
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1) for v in (federation.to_tensor.mean, federation.to_tensor.std)
    )
    return ((split.x * std + mean) * 255).round().clamp(0, 255).byte().numpy(), split.y.numpy()


def _strip(
    federation: PoolFederation, clients: Sequence[int], title: str, split: str = "train", visit: int = 0
) -> Strip:
    """Return a strip of images of some clients."""
    parts = [federation.samples(k, split, visit) for k in clients]
    images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return _chosen(images, labels, federation.num_classes, title)


def _chosen(images: np.ndarray, labels: np.ndarray, num_classes: int, title: str) -> Strip:
    """Return a strip with one image of each label; with many labels, ten images of labels present.

    If labels are masks, it has images and, beside each, its mask in colours.
    """
    if labels.ndim > 1:
        return _with_masks(images, labels, title)
    where = {int(c): np.flatnonzero(labels == c) for c in np.unique(labels)}
    if num_classes <= MAX_LABEL_COLUMNS:
        return Strip(title, [images[where[c][0]] if c in where else None for c in range(num_classes)])
    present = np.array([*where])[_evenly(len(where), PER_STRIP)]
    places = sorted((int(c), i) for i in range(PER_STRIP) for c in present if i < len(where[int(c)]))
    places = sorted(sorted(places, key=lambda p: p[1])[:PER_STRIP])
    return Strip(title, [images[where[c][i]] for c, i in places], [f"label {c}" for c, _ in places])


def _with_masks(images: np.ndarray, masks: np.ndarray, title: str) -> Strip:
    """Return a strip of images, each followed by its mask: a colour for each class, white where ignored.

    Args:
        images: uint8 [n, C, H, W].
        masks: as the pool stores them [n, H, W].
        title: title of the strip.
    """
    shown: list[np.ndarray | None] = []
    captions: list[str] = []
    ignored = masks == void_of(masks.dtype)
    painted = PALETTE[np.where(ignored, 0, masks).astype(np.int64) % len(PALETTE)]  # [n, H, W, 3]
    painted[ignored] = 255
    for image, colours in zip(images[: PER_STRIP // 2], painted, strict=False):
        shown += [image, colours.transpose(2, 0, 1)]
        captions += ["", "classes"]
    return Strip(title, shown, captions)


def _evenly(count: int, most: int) -> np.ndarray:
    """Return at most `most` of 0..count - 1, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
