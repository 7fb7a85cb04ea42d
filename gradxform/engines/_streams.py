"""Streams of minibatches: each belongs to one worker, in the process that made it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradxform.engines._job import Worker


def check_shared(workers: Mapping[int, Worker]) -> None:
    """Raises ``ValueError`` if two workers draw from one stream.

    Threads that do so sometimes get "generator already executing", or lose minibatches.
    """
    owners: dict[int, int] = {}
    for index, worker in workers.items():
        for stream in streams(worker.batch):
            owner = owners.setdefault(id(stream), index)
            if owner != index:
                raise ValueError(
                    f"workers: {owner} and {index} draw from one stream, a "
                    f"{type(stream).__name__}: give each one of its own. To share it, "
                    "let batch call a function that draws from it under a lock."
                )


def check_none(index: object, worker: Worker) -> None:
    """Raises ``ValueError`` if a worker would take a stream to another process."""
    for stream in streams(worker.batch):
        raise ValueError(
            f"workers: worker {index} draws from a stream, a {type(stream).__name__}. "
            "On Ray it works in another process, which cannot share the stream, and "
            "which is replaced if it dies: let batch be a function of the number, or "
            "let it make the stream when it is first called."
        )


def streams(batch: Callable[..., Any]) -> list[Iterator[Any]]:
    """The iterators that a function refers to, as it probably draws from them.

    Iterators of the functions that it calls do not count: such a function may hold a
    lock while it draws.
    """
    held: list[Any] = []
    batch = inspect.unwrap(batch)
    while isinstance(batch, functools.partial):
        held += [*batch.args, *batch.keywords.values()]
        batch = batch.func
    owner, function = (
        getattr(batch, "__self__", None),
        getattr(batch, "__func__", batch),
    )
    if not inspect.isroutine(batch):  # An object that can be called.
        owner, function = batch, type(batch).__call__
    if not isinstance(owner, types.ModuleType):  # The owner of a built-in function.
        held += [owner, *getattr(owner, "__dict__", {}).values()]
    if isinstance(function, types.FunctionType):
        names, known = function.__code__.co_names, function.__globals__
        held += [known[name] for name in names if name in known]
        held += [*(function.__defaults__ or ())]
        held += [*(function.__kwdefaults__ or {}).values()]
        held += [x for cell in function.__closure__ or () for x in _contents(cell)]
    return [each for each in held if isinstance(each, Iterator)]


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # It is not filled yet.
        return []
