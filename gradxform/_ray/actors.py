"""The processes of a server as Ray actors: they start and end together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import optax

from gradxform._checks import arguments, structures
from gradxform._ray.followers import CALLS, Follower
from gradxform._ray.layout import ServerLayout, Shardings
from gradxform._ray.leader import Leader
from gradxform._ray.messages import PushMessage
from gradxform._ray.process import LOOPBACK
from gradxform._ray.transport import RayTransport
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.placement import is_function
from gradxform._trees.types import T
from gradxform.engines._job import Job
from gradxform.engines._pool import LOOK, JobServer

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

Check: TypeAlias = Callable[[], object]  # Called in a wait; it may end it by raising.

GONE = 10.0  # Seconds that a killed process may take to end.
# Ray would start an actor again by itself, and repeat its calls. The engine does both.
OURS = {"max_restarts": 0, "max_task_retries": 0}
# With these an actor may be that of another run, outlive the run, or handle calls in
# another way.
REFUSED = ["get_if_exists", "lifetime", "max_pending_calls", "concurrency_groups"]


def options_of(
    name: str, given: Mapping[str, Any] | None, *refused: str
) -> dict[str, Any]:
    """Ray's options for the actors of a run.

    Raises:
      ValueError: the engine would not work with one of them.
    """
    options = dict(given or {})
    for option in (*REFUSED, "allow_out_of_order_execution", *refused):
        if option in options:
            raise ValueError(f"{name}: the engine cannot have {option}: leave it out.")
    most = options.get("max_concurrency", 1)
    arguments.in_range(f"{name}: max_concurrency", most, "[1, inf)", integer=True)
    return options | OURS


def layout_of(
    params: optax.Params, processes: int, shardings: Shardings | None
) -> ServerLayout | None:
    """The layout of parameters over several processes; None for one process.

    Raises:
      TypeError: one of the arguments has another type.
      ValueError: such a layout is impossible.
    """
    if processes == 1 and shardings is None:
        return None
    types = jax.eval_shape(params) if is_function(params) else params
    layout = ServerLayout.of(types, processes, shardings)
    return layout if layout.processes > 1 else None


class Processes:
    """Starts and ends the processes of a server, as Ray actors.

    Args:
      layout: of the parameters; None for one process.
      job: what the server runs.
      options: Ray's, for the actor of each.

    Attributes:
      layout: as given.
    """

    def __init__(
        self, layout: ServerLayout | None, job: Job, options: Mapping[str, Any]
    ) -> None:
        self._ray = ray = require("ray", "ray")
        self.layout, self._options = layout, dict(options)
        # What concerns workers may not be picklable, and stays here.
        own = job._replace(workers=(), pace=None, max_staleness=None)
        parts = iter([job.params])
        if layout is not None:  # A function that makes parameters stays whole.
            parts = (layout.part(job.params, k) for k in range(layout.processes))
        self._given = [[ray.put(own._replace(params=part))] for part in parts]
        self._actors: list[ActorHandle[Any]] = []  # The leader, then followers.
        self._cause: ObjectRef[str] | None = None  # The leader's last word.

    def start(self, checkpoint: Checkpoint | None, check: Check) -> ActorHandle[Any]:
        """Starts them; returns the actor that answers for them."""
        self.kill()
        if self.layout is not None:
            return self._group(self.layout, checkpoint, check)
        start = self._ray.remote(JobServer).options(**self._options).remote
        actor = start(*self._given[0], checkpoint, RayTransport)
        self._actors = [actor]
        return actor

    def _group(
        self, layout: ServerLayout, checkpoint: Checkpoint | None, check: Check
    ) -> ActorHandle[Leader]:
        ray = self._ray
        options = dict(self._options)
        threads = options.pop("max_concurrency") + 1  # One call waits for good.
        own = options | {"max_concurrency": threads}
        leader = ray.remote(Leader).options(**own).remote()
        self._actors = [leader]
        self._cause = leader.cause.remote()
        # Ray keeps the sequence of calls if there is one thread for them.
        remote = ray.remote(concurrency_groups={CALLS: threads})
        options.pop("name", None)  # Two actors cannot have one name.
        follower = remote(Follower).options(**options)
        self._actors += [follower.remote(k) for k in range(1, layout.processes)]
        asked: list[ObjectRef[str]] = [
            actor.__ray_call__.remote(lambda _: ray.util.get_node_ip_address())
            for actor in self._actors
        ]
        hosts = self.answers(asked, check)
        # On one machine nobody else needs to reach them.
        address = hosts[0] if len({*hosts}) > 1 else LOOPBACK
        (where,) = self.answers([leader.listen.remote(address)], check)
        _, *followers = self._actors
        known = [followers, *[where] * len(followers)]  # Whom each has to know.
        each = zip(self._actors, known, self._given, strict=True)
        joining: list[ObjectRef[None]] = [
            actor.join.remote(*own, layout, checkpoint) for actor, *own in each
        ]
        # If one dies meanwhile, the others wait for it in vain: so look at each.
        self.answers(joining, check)
        return leader

    def cause(self) -> str | None:
        """Why they have died, if they have said so."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            if self._cause is not None:
                said: str = self._ray.get(self._cause, timeout=0.0)
                return said
        return None

    def answers(self, asked: Sequence[ObjectRef[T]], check: Check) -> list[T]:
        """Their answers; raises as soon as one of them has raised."""
        left = [*asked]
        while left:
            done, left = self._ray.wait(left, num_returns=1, timeout=LOOK)
            if left:
                self._ray.get(done)  # It may raise.
                check()
        return self._ray.get([*asked])

    def kill(self) -> None:
        """Ends them; returns when they are gone."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._ray.kill(actor)
        deadline = time.monotonic() + GONE
        for actor in actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                while (left := deadline - time.monotonic()) > 0:
                    self._ray.get(actor.__ray_ready__.remote(), timeout=left)


def message(
    layout: ServerLayout | None, grads: optax.Updates, extra: dict[str, Any]
) -> tuple[optax.Updates | PushMessage, dict[str, Any]]:
    """The arguments of a push, as the server's actor takes them.

    Raises:
      TypeError: a leaf is no array; or the server has several processes, and ``grads``
        does not fit. The error names the first path.
      ValueError: no leaf has a gradient, and the server has several processes.
      RuntimeError: an array is deleted.
    """
    own = {"push_id": extra.pop("push_id", None)}
    if layout is not None:
        return PushMessage.of(layout, grads, extra), own
    # Before Ray pickles them. The server checks the rest.
    structures.check_usable(grads=grads, extra=extra)
    return grads, extra | own
