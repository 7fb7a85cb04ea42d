"""Asynchronous training in one call: workers, a server, and what happens when they die.

An engine is a context manager ``engine(job, checkpoint=...)`` that gives a
:class:`Run`: the pushes, one by one as they are answered, and the server, which gives
parameters and state. The :class:`Job` says what workers compute. The engine decides how
they run:

- :func:`simulated`: one after the other, by a virtual clock. A run repeats exactly.
- :func:`threads`: each on a thread, and on a device of its own if the job says so.
- :func:`ray`: each in a process, on as many machines as the Ray cluster has.

``Job.pace`` says when a worker may begin its next gradient: :func:`bounded_staleness`,
:func:`stale_synchronous`, :func:`admission`, or a function of a :class:`Progress`.

The modules: ``_job`` has the job and the records of its run; ``_work`` computes
one gradient, or cancels it; ``_pacing`` has the rules, and ``_scheduler`` asks them;
``_ledger`` counts the gradients; ``_pool`` is the common part of all runs; ``_ending``
ends them; ``_simulated`` and ``_threads`` are engines. The third is in the subpackage
``_ray``. ``_tensorboard`` writes the curves of a run.
"""

import typing as _typing

from gradxform._server.checkpoints import Checkpoint as Checkpoint
from gradxform.engines._job import Counts as Counts
from gradxform.engines._job import Job as Job
from gradxform.engines._job import Push as Push
from gradxform.engines._job import Run as Run
from gradxform.engines._job import Server as Server
from gradxform.engines._job import Worker as Worker
from gradxform.engines._job import WorkerCounts as WorkerCounts
from gradxform.engines._pacing import Progress as Progress
from gradxform.engines._pacing import admission as admission
from gradxform.engines._pacing import bounded_staleness as bounded_staleness
from gradxform.engines._pacing import stale_synchronous as stale_synchronous
from gradxform.engines._simulated import simulated as simulated
from gradxform.engines._tensorboard import TensorBoard as TensorBoard
from gradxform.engines._threads import threads as threads

# `_ray` imports modules of this package, so it is imported when the name is first used.
if _typing.TYPE_CHECKING:
    from gradxform._ray.engine import ray as ray
else:
    __all__ = [n for n in sorted({*globals(), "ray"}) if n[0] != "_"]

    def __getattr__(name: str) -> object:
        if name != "ray":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gradxform._ray.engine import ray

        return ray

    def __dir__() -> list[str]:
        return sorted({*globals(), "ray"})
