"""The records that a parameter server keeps, returns and accepts."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._gates.counters import outermost

PushId: TypeAlias = tuple[Hashable, int]  # A worker, and the number of its push.
Ahead: TypeAlias = Mapping[int, int]  # How far workers' clocks are ahead of answers.


class PushResult(NamedTuple):
    """The result of one push.

    Attributes:
      applied: False if a gate has left it out: it was stale, a spike or not finite.
      staleness: steps taken since the worker's local step.
      global_step: after the push.
    """

    applied: bool
    staleness: int
    global_step: int


class ServerClosedError(RuntimeError):
    """A call to a server that was closed, or that has lost its parameters.

    The message says which of the two. A closed server tells workers this way that the
    run is over. A server that lost its parameters works again after
    :meth:`ParameterServer.restore`.
    """


class TakesNoMoreError(RuntimeError):
    """The workers have made all pushes that the server takes."""


class ServerStats(NamedTuple):
    """What a server has done since it was made.

    Attributes:
      accepted: pushes that were applied or added; an accumulator takes several for one
        step.
      dropped: pushes that came too late, or that a gate has left out otherwise.
      staleness: the number of pushes for each staleness, in steps.
      global_step: steps taken.
      lost: why the server has lost its parameters and needs
        :meth:`ParameterServer.restore`; None while all is well.
    """

    accepted: int
    dropped: int
    staleness: dict[int, int]
    global_step: int
    lost: str | None = None


class Answer(NamedTuple):
    """The last answer to a worker, and how many were accepted; by default none."""

    number: int = -1  # Of its push.
    local_step: int = -1  # Of its push.
    result: PushResult = PushResult(False, 0, 0)
    accepted: int = 0


@dataclasses.dataclass
class Tally:
    """What has become of the pushes: counts, and the last answer to each worker."""

    pushes: int = 0
    accepted: int = 0
    # Workers of engines are integers, and the numbers of their pushes begin with 0.
    answers: dict[Any, Answer] = dataclasses.field(default_factory=dict)

    def copy(self) -> Tally:
        """One that later pushes do not change."""
        return dataclasses.replace(self, answers=dict(self.answers))

    def last(self, worker: Hashable) -> Answer:
        """The last answer to a worker."""
        return self.answers.get(worker, Answer())

    def count(
        self, result: PushResult, push_id: PushId | None = None, local_step: int = 0
    ) -> None:
        """One more push, of a worker if it has a ``push_id``."""
        self.pushes += 1
        self.accepted += result.applied
        if push_id is not None:
            worker, number = push_id
            accepted = self.last(worker).accepted + result.applied
            self.answers[worker] = Answer(number, local_step, result, accepted)


class ServerStatus(NamedTuple):
    """A server's counts at the beginning or the end of an incarnation."""

    incarnation: str
    global_step: int
    tally: Tally
    accumulated: int = 0  # Pushes accepted since the last step.
    # For the user, about the checkpoint that it goes on from; None without one.
    notes: Sequence[str] | None = None
    ahead: Mapping[int, int] = {}  # See `RecoverableServer.note`.
    run: str | None = None  # Identifies it in its directory of checkpoints.


class Snapshot(NamedTuple):
    """All that a server needs to go on, taken at one moment."""

    pushes: int  # How many it has answered.
    state: dict[str, Any]
    counters: dict[str, Any]
    # Is called before it is written; raises if another process lacks its part.
    ready: Callable[[], object] = lambda: None


class GlobalStep(int):
    """A global step that knows its server, and the server's incarnation at that time.

    An incarnation ends when the server is restored, or dies. After that the same number
    means other parameters. Arithmetic makes it a plain integer.
    """

    incarnation: str

    def __new__(cls, value: int, incarnation: str) -> GlobalStep:
        self = super().__new__(cls, value)
        self.incarnation = incarnation
        return self

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        return int(self), self.incarnation


class Version(NamedTuple):
    """All that a step replaces, in one assignment."""

    leaves: list[jax.Array]  # Of parameters and state.
    global_step: int
    incarnation: str
    edition: int = 0  # Grows where the parameters may have changed.

    @classmethod
    def of(cls, params: optax.Params, state: optax.OptState) -> Version:
        """The first version of a new incarnation."""
        leaves = jax.tree.leaves((params, state))
        global_step = int(jax.device_get(outermost(state, "global_step")))
        return cls(leaves, global_step, secrets.token_hex(8))

    def of_params(self) -> tuple[str, int]:
        """Identifies the parameters: versions that agree in it have the same ones."""
        return self.incarnation, self.edition

    def step(self) -> GlobalStep:
        """The step that a worker gets when it pulls this version."""
        return GlobalStep(self.global_step, self.incarnation)


def as_step(name: str, value: int) -> int:
    """A caller's step, checked, as an integer; a :class:`GlobalStep` stays one."""
    if type(value) not in (int, GlobalStep):  # Faster than the checks.
        arguments.check_scalar(name, value, integer=True)
        return operator.index(value)
    return value


def is_past(step: int, incarnation: str) -> bool:
    """Whether a step is known to come from another incarnation."""
    return isinstance(step, GlobalStep) and step.incarnation != incarnation


def check_step(local_step: int, version: Version) -> None:
    """Raises ``ValueError`` unless this version, or an earlier one, had that step."""
    if is_past(local_step, version.incarnation):
        raise ValueError(
            f"local_step={local_step} was pulled before the server was restored, "
            "or from another server: pull again."
        )
    if not 0 <= local_step <= version.global_step:
        arguments.in_range("local_step", local_step, f"[0, {version.global_step}]")


def as_push_id(push_id: object, *, of_run: bool) -> PushId:
    """A caller's pair of a worker and a number, checked; the number as an integer.

    A run saves its workers as JSON, and lists them in ascending order. So of a run the
    worker is an index, and comes back as an integer, too.

    Raises:
      TypeError: it is no such pair; or the worker of a run is no integer.
      ValueError: the worker of a run is negative.
    """
    if not (
        isinstance(push_id, tuple)
        and len(push_id) == 2
        and isinstance(push_id[0], Hashable)
    ):
        raise TypeError(f"push_id must be a pair (worker, number), got {push_id!r}.")
    worker, number = push_id
    arguments.check_scalar("the number in push_id", number, integer=True)
    number = operator.index(number)
    if not of_run:
        return worker, number
    if isinstance(worker, bool) or not isinstance(worker, int | np.integer):
        raise TypeError(
            f"push_id: in a run the worker must be an integer, got {worker!r}. Take "
            "an index that no worker of the run has."
        )
    arguments.in_range("the worker in push_id", int(worker), "[0, inf)")
    return int(worker), number


def summary(error: BaseException) -> str:
    """The first and the last line of an error: a long one may hold a traceback."""
    # JAX may append places of its own (``JAX_TRACEBACK_FILTERING=off``).
    text, _, _ = str(error).partition("=== Source Location Trace")
    lines = text.strip().splitlines()
    ends = " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))
    return f"{type(error).__name__}: {ends}"
