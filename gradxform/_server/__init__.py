"""The host's side: one object with a memory, and how it outlives its process.

A push goes through these rooms in this order: ``parameter_server`` looks at what is
cheap to look at; ``programs`` finds, or compiles, the step for what it holds, in
``rows`` padded to one of few sizes, brings it to the ``places`` of the parameters and
waits until it is there; ``own_thread`` sees to it that no signal interrupts what then
happens under the lock: the step, and the one assignment of a new ``records.Version``;
``waiters`` wakes those whose step has come. A pull copies, or has ``rows`` read.

On Ray the server is an ``actor``, which publishes each version once, and all arrays
travel by ``wire``.

A ``recoverable`` server saves itself in ``checkpoints`` while workers go on, and begins
where the newest whole one is; their ``folder`` is one run's at a time. ``extras``
imports what not every user has.

A server of several processes has each array in parts; their ``layout`` says which, and
they are ``placed`` on the mesh of all. The processes are a ``group``: a leader, which
is the server to all others, and each ``follower`` does what the leader tells it over a
``channel``. What workers push and pull travels in ``parcels``, to each process and from
each the parts that it has.

Imports all wings above it.
"""
