"""Everything that needs Ray or more than one process.

``parameter_server`` is the public server, which ``ray.remote`` makes an actor: its
``transport`` sends each version once to workers in other processes, in ``messages``.
Arrays travel by ``wire``. ``engine`` is the engine on Ray: ``connect`` looks for the
cluster, and ``servers`` is the server as the driver and the workers see it. ``actors``
starts and ends its processes, as Ray actors.

A model that does not fit into one process has a server of several, which share one
mesh. The ``layout`` says which part of each large array lies in which process. Each
``process`` makes arrays of the mesh from its parts, and holds them in a core and a
reader of its own. All of them run the same compiled steps in the same sequence.

One of them is the ``leader``: it is the server for everybody else, and decides. In each
turn it first commands its ``followers``, by calls that Ray keeps in their sequence.
Turns are short: all processes prepare a push or a pull before its turn, each its own
part. If one of them dies, Ray tells the leader, and all end. They write their parts of
the same checkpoints.
"""
