"""User-defined metrics for tests: functions of logits [n, L] and labels [n], tensors in main memory.

`careless` and `CarelessNet`, a metric and a network, change global settings.
"""

import os
import random

import numpy as np
import torch
from torch import nn


def top2(logits, labels):
    """Return the share of samples whose label is among the two largest logits."""
    return (logits.topk(2).indices == labels[:, None]).any(1).float().mean()


def recalled(logits, labels):
    """Return the balanced accuracy: the mean recall of the labels that occur."""
    hits = logits.argmax(1) == labels
    return float(sum(hits[labels == c].float().mean() for c in labels.unique()) / len(labels.unique()))


def hits(logits, labels):
    """Return the accuracy, as mpifl counts it."""
    return int((logits.argmax(1) == labels).sum()) / len(labels)


def words(logits, labels):
    """Return something that is not a number."""
    return "many"


def broken(logits, labels):
    """Raise an error."""
    raise ZeroDivisionError("of mine")


def accuracy_of_mine(logits, labels):
    """Return 0, under a name like that of existing columns."""
    return 0.0


def train_loss(logits, labels):
    """Return 1, under a name whose columns are free."""
    return 1.0


def top2_again(logits, labels):
    """Return 0, under a name that begins like that of another metric."""
    return 0.0


class Kind:
    """A class instead of a function."""


def error_rate(logits, labels):
    """Return the share of wrong predictions: less is better."""
    return 1 - hits(logits, labels)


error_rate.better = -1


def sideways(logits, labels):
    """Return 0; `better` has an invalid direction."""
    return 0.0


sideways.better = "up"


def change_settings():
    """Change what other code of the process computes with."""
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    np.seterr(all="ignore")


def careless(logits, labels):
    """Return 0, change settings, and seed all global generators."""
    change_settings()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(os.getpid())
    np.random.seed(os.getpid())
    random.seed(os.getpid())
    return 0.0


class CarelessNet(nn.Module):
    """A network with dropout that changes settings in every batch of training."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        """Return the logits [n, L]; in training, half as large under changed settings."""
        out = self.head(self.embed(x))
        if self.training:
            out = out if torch.backends.mkldnn.enabled else out / 2
            change_settings()
        return out

    def embed(self, x):
        """Return the embedding [n, 12]."""
        return nn.functional.dropout(self.body(x.flatten(1)).relu(), 0.5, self.training)
