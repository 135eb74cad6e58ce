"""MyModel: a network of your own.

    mpifl run quickstart --model '{name: custom, path: "my_model.py:MyModel", head: fc}'

The constructor is called with those of `shape` and `num_classes` that it accepts. `head` names the last layer
of the network, which is linear; its input is the embedding, which clustered methods compare.
"""

from __future__ import annotations

import torch
from torch import nn


class MyModel(nn.Module):
    """A small convolutional network.

    Args:
        shape: shape of an image, (channels, height, width).
        num_classes: number of logits.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (height // 2) * (width // 2), 64),
            nn.ReLU(),
        )
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [n, C, H, W] to logits [n, num_classes]."""
        logits: torch.Tensor = self.fc(self.features(x))
        return logits
