"""Asynchronous training in one call: workers, a server, and what happens when they die.

An engine is a context manager ``engine(job, checkpoint=...)`` that gives a
:class:`Run`: the pushes, one by one as they are answered, and the server to ask for
parameters and state. What workers compute, the :class:`Job` says; how they come to run,
the engine:

- :func:`simulated`: one after the other, by a virtual clock. A run repeats exactly.
- :func:`threads`: one thread each, on a device each where they are told so.
- :func:`ray`: one process each, on as many machines as the Ray cluster has.

The rooms: ``_job`` has what an engine runs and what it tells; ``_work`` one gradient of
a worker; ``_stops`` when it is given up; ``_streams`` who draws its minibatches from
where; ``_ledger`` what became of the pushes; ``_crew`` what all runs have in common;
``_ending`` how they end; ``_simulated``, ``_threads`` and ``_ray`` the engines;
``_reach`` whether there is a Ray cluster; ``_servers`` the server on it, as others see
it, ``_group`` one of several processes; ``_tensorboard`` what one can watch a run
with.
"""

from gradxform._server.checkpoints import Checkpoint as Checkpoint
from gradxform.engines._job import Counts as Counts
from gradxform.engines._job import Job as Job
from gradxform.engines._job import Push as Push
from gradxform.engines._job import Run as Run
from gradxform.engines._job import Server as Server
from gradxform.engines._job import Worker as Worker
from gradxform.engines._ray import ray as ray
from gradxform.engines._simulated import simulated as simulated
from gradxform.engines._tensorboard import TensorBoard as TensorBoard
from gradxform.engines._threads import threads as threads
