"""Types of annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax

# Trees that come out in the type in which they came in.
Params = TypeVar("Params")
State = TypeVar("State")
# Ids of rows, by the path of their table.
Rows = Mapping[str, jax.typing.ArrayLike]
