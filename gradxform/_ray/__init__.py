"""Everything that needs Ray or more than one process.

``engine`` is the engine on Ray: ``connect`` looks for the cluster, ``servers`` is the
server as other processes see it, and arrays travel by ``wire``. The other modules are a
server of several processes, for models that do not fit into one.

All processes share one mesh (``mesh``). The ``layout`` says which part of each large
array lies in which process. Each ``process`` makes arrays of the mesh from its parts,
and holds them in a core and a reader of its own, as a server of one process does. All
of them run the same compiled steps in the same sequence.

One of them is the ``leader``: it is the server for everybody else, remembers its
answers, and decides. In each turn it first tells each ``follower`` what to do, over a
``channel``, so all processes have the same sequence of turns. Turns are short: all
processes prepare a push or a pull before its turn, each its own part. Pushes and pulls
travel in ``messages``: each process receives and sends only its own parts.

All processes write their parts of the same checkpoints (``group_checkpoints``).
``actors`` starts and ends the processes, as Ray actors.

Imports all subpackages above it.
"""
