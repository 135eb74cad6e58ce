"""The only import of torchvision, which is slow, and as published fails with a CPU build of torch.

PyPI's torchvision is built for CUDA; where its compiled operators do not load, `import torchvision` fails
with `operator torchvision::nms does not exist`. Data sets, transforms and models need no operator, so
it is enough to declare the two missing schemas.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

MISSING = "torchvision::nms"  # in the message of an import that fails
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
T = TypeVar("T")
_schemas: list[Any] = []  # a torch.library.Library undefines its schemas when it is collected


@cache
def torchvision() -> ModuleType:
    """Return torchvision, imported at the first call; missing operators are declared only if that fails."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if MISSING not in str(error):
            raise
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]  # half-imported: the second try starts afresh
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + _NMS)
    _schemas.append(library)
    return importlib.import_module("torchvision")


def with_operators(load: Callable[[], T]) -> T:
    """Return what a function imports that may import torchvision itself; called again if operators lack."""
    try:
        return load()
    except Exception as error:
        if MISSING not in str(error):
            raise
    torchvision()
    return load()
