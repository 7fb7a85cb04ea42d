"""Whether a checkpoint and a run belong to the same job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


class OtherJobError(ValueError):
    """A checkpoint is complete, but belongs to another job."""


def described(state: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of every array, by its path."""
    flat, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): _short(x) for path, x in flat}


def _short(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    return jax.core.ShapedArray(x.shape, x.dtype).str_short()


def check(where: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Compares the arrays of a checkpoint with those of a run.

    Args:
      where: the path of the checkpoint.
      saved: its arrays, as :func:`described`.
      wanted: those of the run.

    Raises:
      OtherJobError: they differ. The message names the first path where they do.
    """
    for path in {**wanted, **saved}:
        if saved.get(path) != wanted.get(path):
            raise OtherJobError(
                f"checkpoint: {where} is of another job. At {path} it has "
                f"{saved.get(path, 'nothing')}, and this job "
                f"{wanted.get(path, 'nothing')}. Give another directory."
            )
