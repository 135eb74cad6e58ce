"""Packages that extras of mpifl install; the only import of transformers, and what keeps it silent."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .errors import UserError
from .torchvision_compat import torchvision, with_operators

REPORT = "report"  # extra: figures
VISION = "vision"  # extra: downloads of data sets, networks


def is_there(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(package) is not None


def need_figures(key: str, value: object) -> None:
    """Raise `UserError` unless figures can be drawn; see `need_package`."""
    need_package("matplotlib", REPORT, key, value)


def need_package(package: str, extra: str, key: str, value: object) -> None:
    """Raise `UserError` unless a package is installed, without importing it.

    Args:
        package: name of the module.
        extra: the extra of mpifl that installs it.
        key: the option that needs it.
        value: its value.
    """
    if not is_there(package):
        raise _missing(package, extra, key, value)


def optional(package: str, extra: str, key: str, value: object) -> Any:
    """Import a package that an extra of mpifl installs.

    Args:
        package: name of the module.
        extra: the extra, for error messages.
        key: the option that needs it.
        value: its value.

    Raises:
        UserError: it is not installed.
    """
    try:
        return with_operators(lambda: importlib.import_module(package))
    except ImportError as error:
        raise _missing(package.split(".")[0], extra, key, value) from error


def _missing(package: str, extra: str, key: str, value: object) -> UserError:
    return UserError(key, value, f'needs {package}: pip install "mpifl[{extra}]"')


def torchvision_package(key: str, value: object) -> ModuleType:
    """Return the package torchvision; see `need_package`."""
    need_package("torchvision", VISION, key, value)
    return torchvision()


def transformers_package(extra: str, key: str, value: object) -> Any:
    """Return the package transformers; see `need_package`."""
    need_package("transformers", extra, key, value)
    if is_there("torchvision"):
        torchvision()  # which transformers imports, and which fails with some builds of PyTorch
    return importlib.import_module("transformers")


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Keep transformers from printing tables, advice and bars of progress in a block."""
    logging = importlib.import_module("transformers.utils.logging")
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
