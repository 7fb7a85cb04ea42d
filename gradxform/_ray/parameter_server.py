"""The parameter server, which ``ray.remote`` makes an actor."""

from __future__ import annotations

import sys

import optax

from gradxform._ray.transport import RayTransport
from gradxform._server.core import of_one_process
from gradxform._server.parameter_server import ThreadServer
from gradxform._server.transport import Transport
from gradxform._trees.types import Params


class ParameterServer(ThreadServer[Params]):
    """Parameters and optimizer state that workers on many threads pull and push to.

    Every push is one compiled :func:`apply_gradients`, one push after the other. All
    methods may be called from any thread, and from signal handlers. Only :meth:`wait`
    waits for another worker. ``ray.remote(gx.ParameterServer)`` does the same on many
    machines. Its ``max_concurrency`` must exceed the number of workers, as some wait.

    A pull gives the worker a copy of its own, which stays valid and may be donated.
    Gradients may come from any device. The server moves them, never the parameters.

    A push that raises changes nothing, and harms only the worker that pushed. Errors in
    a gradient show before its step begins. An exception may interrupt a method at any
    moment: the server is then at the old step or the new one. (JAX itself may not
    survive an exception in the pushing thread while that traces the first of a kind.)

    There is one limit. The server updates its arrays in place, so a step that fails
    while it runs (out of memory, or in a callback) destroys them. Every call then
    raises :class:`ServerClosedError`, which names the cause, until :meth:`restore`
    brings back an earlier :meth:`state`. With ``donate=False`` such a failure changes
    nothing either, but a step needs memory for a second model and optimizer state. A
    Ray actor that was started again (``max_restarts``) has lost its parameters, too.

    Args:
      params: the initial parameters; they are copied. Those that :func:`on_host` has
        moved are refused with a ``ValueError``.
      tx: any ``optax.GradientTransformation`` but ``optax.lookahead``. A gate in it
        (:func:`drop_stale`, :func:`conditional_accumulator`) decides what is dropped;
        without one, or with :func:`accumulate`, nothing is too late. It receives
        ``local_step`` and all extra arguments of :meth:`push`.
      donate: whether steps update the server's own arrays in place.
      require_finite: whether gradients that hold NaN or inf are refused with an error,
        at the price of one more pass over them. Padding of :class:`IndexedSlices`
        counts for nothing.

    References:
      The parameter servers of TensorFlow 1.x, ``tf.train.SyncReplicasOptimizer`` and
      ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax, threading
    >>> tx = gx.drop_stale(optax.sgd(0.1), max_staleness=4)
    >>> server = gx.ParameterServer({"w": jnp.array([1.0, -2.0])}, tx)
    >>> def work():
    ...     for _ in range(50):
    ...         params, seen = server.pull()
    ...         server.push(jax.tree.map(lambda w: 2 * w, params), seen)
    >>> threads = [threading.Thread(target=work) for _ in range(4)]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> params, global_step = server.pull()
    >>> assert jnp.allclose(params["w"], 0, atol=1e-3)
    >>> stats = server.stats()
    >>> assert stats.accepted + stats.dropped == 200
    >>> assert stats.accepted == global_step
    """

    def __init__(
        self,
        params: Params,
        tx: optax.GradientTransformation,
        *,
        donate: bool = True,
        require_finite: bool = False,
    ) -> None:
        core = of_one_process(params, tx, donate=donate, require_finite=require_finite)
        is_actor = hasattr(type(self), "__ray_actor_class__")
        super().__init__((RayTransport if is_actor else Transport)(core))
        if is_actor:
            context = sys.modules["ray"].get_runtime_context()
            if context.was_current_actor_reconstructed:
                core.lose("its Ray actor has died and was started again")
