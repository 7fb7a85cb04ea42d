"""The host's side: one object with state, and how it outlives its process.

A ``parameter_server`` holds a ``transport``, and that holds a ``core``: parameters,
state and all rules about pushes. A push gets the compiled step for its types from
``programs`` and is brought to the ``placement`` of the parameters.
``serial_executor`` lets no signal interrupt the work in a turn: the step, and the one
assignment of a new ``records.Version``. A pull is one request, which the ``reader``
checks, and for which it reads the arrays. If a callback of a step asks its own server,
``callbacks`` gives it an error.

A ``recoverable`` server saves itself while workers go on, and starts from the newest
complete one of its ``checkpoints``. A ``store`` writes them, on a thread of its own.
Its ``folder`` belongs to one run at a time. ``extras`` imports packages that not every
user has.
"""
