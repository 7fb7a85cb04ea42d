"""Type variables: trees that come out in the type in which they came in."""

from __future__ import annotations

from typing import TypeVar

Params = TypeVar("Params")
State = TypeVar("State")
