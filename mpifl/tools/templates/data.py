"""MyData: images of your own.

    mpifl data quickstart --data.source '{name: dataset, path: "my_data.py:MyData"}'
    mpifl run quickstart --data.source '{name: dataset, path: "my_data.py:MyData"}'

Pictures in a folder for each class need no code, nor do arrays: see sources `folder` and `npz` in
`docs/data.md`. If your class reads files, name them with `reads: [DIR]`: then data are prepared again when
they change.
"""

from __future__ import annotations

import torch


class MyData(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Bright columns on noise; the label is the column.

    Args:
        root: the folder `data.root`.
        train: whether to hold the training part; otherwise the test part.
    """

    def __init__(self, root: str, train: bool) -> None:
        self.root = root
        self.seed = 0 if train else 10_000
        self.count = 1000 if train else 400

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        """Return an image [H, W] or [C, H, W] of floats in [0, 1] (or bytes), and its label."""
        label = i % 4
        image = torch.rand(8, 8, generator=torch.Generator().manual_seed(self.seed + i)) / 2
        image[:, label] += 0.5
        return image, label
