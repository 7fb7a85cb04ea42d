"""Packages that not every user has."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def require(package: str, extra: str) -> ModuleType:
    """Imports a package that not every user needs.

    Raises:
      ImportError: one line with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _with_hint(error, extra) from error


def check_installed(package: str, extra: str) -> None:
    """Raises the error of :func:`require` if it is not there, but imports nothing."""
    parts = package.split(".")
    levels = (".".join(parts[: n + 1]) for n in range(len(parts)))
    if not all(map(importlib.util.find_spec, levels)):  # It asks no further.
        raise _with_hint(ModuleNotFoundError(f"No module named {package!r}"), extra)


def _with_hint(error: ImportError, extra: str) -> ImportError:
    return ImportError(f"{error}: run python -m pip install 'gradxform[{extra}]'")
