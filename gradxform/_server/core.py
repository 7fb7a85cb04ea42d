"""Parameters and state, and all rules about pushes: the center of every server.

It knows neither threads nor files nor other processes. Methods that run "in a turn"
change or read the arrays; whoever holds the core calls them one after the other.
"""

from __future__ import annotations

import collections
import functools
import math
import queue
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._gates import gate
from gradxform._gates.worker_mean import num_workers_of
from gradxform._server import records
from gradxform._server.placement import Arrays, Specs, copy, initialize
from gradxform._server.programs import Prepared, PushPrograms, prepare
from gradxform._trees.states import has_gate

Prepare: TypeAlias = Callable[[PushPrograms, optax.Updates, dict[str, Any]], Prepared]
Woken: TypeAlias = queue.SimpleQueue[int | records.ServerClosedError]


class ServerCore:
    """What a server holds, and how one push changes it.

    Args:
      tx: a transformation behind a gate.
      params: the parameters, where they will stay.
      state: the state of ``tx``, where it will stay.
      donate: whether a step takes the memory of parameters and state.
      prepare: makes a push ready for its turn.

    Attributes:
      specs: of parameters and state.
      version: parameters and state, and their step. Every step replaces it.
      takes: how many more pushes with a ``push_id`` it takes.
      numbered: whether it is that of a run: workers have indices, and the numbers of a
        worker's pushes are 0, 1, 2 and so on.
      ahead: see :meth:`RecoverableServer.note`.
      after_step: is called in the turn of a push that has made a step.
      waiting: the step that each caller of `wait` waits for, by the queue of its
        answer. Who waits adds its queue, looks once more at :meth:`outcome`, and
        removes the queue at the end, outside of any turn.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: optax.Params,
        state: optax.OptState,
        donate: bool,
        prepare: Prepare,
    ) -> None:
        self.specs = Specs(params, state)
        self._programs, self._prepare = PushPrograms(tx, self.specs, donate), prepare
        # A gate inside of another transformation lets that one change the parameters.
        self._gated = gate.gate_of(tx) is not None
        self._num_workers = num_workers_of(state)
        self._weighs = has_gate(state, "total_weight")
        self._devices = len(self.specs.placement.everywhere.device_set)
        self.version = records.Version.of(params, state)
        self.takes = math.inf
        self.numbered = False
        self.ahead: records.Ahead = {}
        self.after_step: Callable[[], object] | None = None
        self._accumulated = 0  # Pushes accepted since the last step.
        self._tally = records.Tally()
        self._staleness: collections.Counter[int] = collections.Counter()
        self.waiting: dict[Woken, int] = {}
        self._closed = False
        self._lost: str | None = None
        self._failed = False  # Whether the last step has raised an error.

    # Pushes.

    def prepare(self, grads: optax.Updates, extra: dict[str, Any]) -> Prepared:
        """Makes a push ready for its turn; see :meth:`ParameterServer.push`."""
        worker, n = extra.get("worker"), self._num_workers
        if n is not None and worker is not None:
            # In the compiled step it is traced, and `worker_mean` would drop the push.
            index = jax.device_get(worker)
            arguments.in_range("worker", index, f"[0, {n})", integer=True)
        if self._weighs and extra.get("weight") is not None:  # Traced there, too.
            weight = np.asarray(jax.device_get(extra["weight"])).tolist()
            extra = extra | {"weight": arguments.in_range("weight", weight, "[0, inf)")}
        return self._prepare(self._programs, grads, extra)

    def commit(
        self, prepared: Prepared, local_step: int, push_id: records.PushId | None = None
    ) -> records.PushResult:
        """In a turn: runs the step of a push, and replaces the version.

        Raises:
          TakesNoMoreError: the workers have made all their pushes.
          ValueError: ``local_step`` is of another incarnation; ``push_id`` is below the
            last one of its worker, or leaves out a number of a run.
        """
        self.check_usable()
        if push_id is not None:
            if (answer := self._answer_to(push_id)) is not None:
                return answer
            if self.takes <= 0:
                raise records.TakesNoMoreError(
                    "the server takes no more pushes of workers."
                )
        records.check_step(local_step, self.version)
        before = self.version.global_step
        result = self._run(prepared, local_step)
        self._tally.count(result, push_id, int(local_step))
        self.takes -= push_id is not None
        after_step = self.after_step  # Another thread may take it away.
        if after_step is not None and self.version.global_step > before:
            after_step()
        return result

    def _answer_to(self, push_id: records.PushId) -> records.PushResult | None:
        """The answer that this push received earlier; None if it is new."""
        worker, number = push_id
        known = self._tally.answers.get(worker)
        if known is not None and number == known.number:
            return known.result
        if known is not None and number < known.number:
            raise ValueError(
                f"push_id={push_id} comes after {worker, known.number}: give each "
                "push of a worker a higher number than the one before."
            )
        expected = self._tally.last(worker).number + 1
        if self.numbered and number != expected:  # The counts of a run rely on it.
            raise ValueError(
                f"push_id={push_id}: the next push of worker {worker} has the number "
                f"{expected}. In a run the pushes of a worker have the numbers 0, 1, "
                "2 and so on."
            )
        return None

    def _run(self, prepared: Prepared, local_step: int) -> records.PushResult:
        old = self.version
        self._failed = True  # Until it is done.
        try:
            leaves, counted = prepared.step(
                old.leaves, prepared.leaves, np.int32(local_step)
            )
            if self._devices > 1:  # The counters come from one device alone.
                jax.block_until_ready(leaves)
            with jax.transfer_guard_device_to_host("allow"):
                global_step, dropped = counted.tolist()
        except BaseException as error:
            if any(x.is_deleted() for x in old.leaves):
                lost = self.lose(
                    f"a step failed after it had taken them, {records.summary(error)}"
                )
                error.add_note(str(lost))
            raise
        self._failed = False
        stepped = global_step != old.global_step
        edition = old.edition + (stepped or not self._gated)
        self.version = records.Version(leaves, global_step, old.incarnation, edition)
        applied = not dropped
        staleness = old.global_step - local_step
        self._accumulated = 0 if stepped else self._accumulated + applied
        self._staleness[staleness] += 1
        if stepped:
            self._wake()
        return records.PushResult(applied, staleness, global_step)

    # Waiting.

    def outcome(self, global_step: int) -> int | records.ServerClosedError | None:
        """The answer to a wait; None if it still has to wait."""
        error, version = self.unusable(), self.version
        if error is not None:
            return error
        past = records.is_past(global_step, version.incarnation)
        passed = past or version.global_step > global_step
        return version.global_step if passed else None

    def _wake(self) -> None:
        # Twice is no harm: each queue is for one wait, which takes one answer.
        for woken, global_step in self.waiting.copy().items():
            if (answer := self.outcome(global_step)) is not None:
                woken.put(answer)

    # Service.

    def unusable(
        self, *, if_closed: bool = True, if_lost: bool = True
    ) -> records.ServerClosedError | None:
        """The error of each call now; None while it serves."""
        if if_closed and self._closed:
            return records.ServerClosedError("the parameter server is closed.")
        if if_lost and self._lost is not None:
            return records.ServerClosedError(
                f"the parameter server has lost its parameters: {self._lost}. Call "
                "restore(state) with an earlier state()."
            )
        return None

    def check_usable(self, **of: bool) -> None:
        """Raises that error."""
        if (error := self.unusable(**of)) is not None:
            raise error

    def lose(self, why: str) -> records.ServerClosedError | None:
        """In a turn: the parameters are lost."""
        self._lost = why
        self._wake()
        return self.unusable()

    def close(self) -> None:
        """In a turn: ends the service, and wakes all who wait."""
        self._closed = True
        self._wake()

    def stats(self) -> records.ServerStats:
        """In a turn: see :meth:`ParameterServer.stats`."""
        return records.ServerStats(
            accepted=self._tally.accepted,
            dropped=self._tally.pushes - self._tally.accepted,
            staleness=dict(sorted(self._staleness.items())),
            global_step=self.version.global_step,
            lost=self._lost,
        )

    def status(self) -> records.ServerStatus:
        """In a turn: where it stands."""
        return records.ServerStatus(
            self.version.incarnation,
            self.version.global_step,
            self._tally.copy(),
            self._accumulated,
            ahead=self.ahead,
        )

    def __str__(self) -> str:
        """The step, the size of the parameters, and whether service has ended."""
        params = self.version.leaves[: self.specs.num_params]
        size, step = sum(x.size for x in params), self.version.global_step
        said = f"global_step={step}, parameters={size}, arrays={len(params)}"
        return f"{said}, ended" if self.unusable() else said

    # State.

    def state(self) -> Arrays:
        """In a turn: a copy of parameters and state; also after the end of service."""
        self.check_usable(if_closed=False)
        return copy(self.specs.arrays(self.version.leaves))

    def restore(self, arrays: Arrays) -> None:
        """In a turn: begins a new incarnation with parameters and state.

        The counts go on. A worker that repeats an older push must pull again.
        """
        self.check_usable(if_lost=False)
        self.version = records.Version.of(**arrays)
        self._lost, self._failed = None, False
        self._accumulated = 0
        self._tally.answers.clear()
        self._wake()

    def snapshot(self) -> records.Snapshot | None:
        """In a turn: all that another server needs to go on.

        None before the first push, and after a step that has failed: the parameters or
        the state may be the cause.
        """
        if self._failed or not self._tally.pushes:
            return None
        answers = [[worker, *x] for worker, x in self._tally.answers.items()]
        counters = {
            "global_step": self.version.global_step,
            "accepted": self._tally.accepted,
            "staleness": {str(steps): n for steps, n in self._staleness.items()},
            "accumulated": self._accumulated,
            "answers": answers,
            "ahead": [*self.ahead.items()],  # JSON has no keys but strings.
        }
        return records.Snapshot(self._tally.pushes, self.state(), counters)

    def resume(self, snapshot: records.Snapshot) -> None:
        """In a turn: goes on from a snapshot, whose arrays are at their places."""
        self.restore(snapshot.state)
        counters = snapshot.counters
        self._accumulated, self.ahead = counters["accumulated"], dict(counters["ahead"])
        staleness = {int(steps): n for steps, n in counters["staleness"].items()}
        self._staleness = collections.Counter(staleness)
        answers = {
            worker: records.Answer(number, step, records.PushResult(*result), accepted)
            for worker, number, step, result, accepted in counters["answers"]
        }
        self._tally = records.Tally(snapshot.pushes, counters["accepted"], answers)
        self.takes -= sum(answer.number + 1 for answer in answers.values())


def of_one_process(
    params: optax.Params,
    tx: optax.GradientTransformation,
    *,
    donate: bool = True,
    require_finite: bool = False,
) -> ServerCore:
    """The core of a server whose arrays this process holds."""
    arguments.check_flags(donate=donate, require_finite=require_finite)
    tx, params, state = initialize(tx, params)
    prepare_it = functools.partial(prepare, require_finite)
    return ServerCore(tx, params, state, donate, prepare_it)
