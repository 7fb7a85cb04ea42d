"""The host's side: one object with state, and how it outlives its process.

A push goes through these modules in this order. ``parameter_server`` makes the cheap
checks. ``programs`` finds or compiles the step for the push, brings the push to the
``placement`` of the parameters, and waits until it is there; ``rows`` pads row-sparse
gradients to one of few sizes. ``serial_executor`` lets no signal interrupt the work
under the lock: the step, and the one assignment of a new ``records.Version``.
``waiters`` wakes the workers that waited for this step. A pull copies the arrays, or
reads some of their ``rows``.

On Ray the server is an ``actor``, which publishes each version once. All arrays travel
by ``wire``.

A ``recoverable`` server saves itself in ``checkpoints`` while workers go on, and starts
from the newest complete one of the ``same_job``. The thread of a ``saver`` writes them,
and a ``store`` has them in a ``folder``, which belongs to one run at a time. ``extras``
imports packages that not every user has.

In a server of several processes, each process has a part of each large array. The
``layout`` says which part, and the parts are ``sharded`` on one mesh of all processes.
The processes are a ``group``: the leader is the server for everybody else, and each
``follower`` does what the leader tells it over a ``channel``. Pushes and pulls travel
in ``messages``: each process receives and sends only its own parts.

Imports all subpackages above it.
"""
