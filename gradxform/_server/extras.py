"""Packages that not every user has."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(package: str, extra: str) -> ModuleType:
    """Imports a package that not every user needs.

    Raises:
      ImportError: one line with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        hint = f"run python -m pip install 'gradxform[{extra}]'"
        raise ImportError(f"{error}: {hint}") from error
