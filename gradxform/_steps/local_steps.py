"""Local steps: a worker trains on its own, and pushes its total change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, TypeAlias, cast

import jax
import numpy as np
import optax

from gradxform._checks import arguments, keywords
from gradxform._devices import host
from gradxform._gates.conditional import typed_cond
from gradxform._jax import versions
from gradxform._rows import boundary
from gradxform._steps.apply import P, Step, compiled, learning_leaves, training_step
from gradxform._trees import dtypes, maps
from gradxform._trees.extra_args import Words
from gradxform._trees.types import Prefix

_Carry: TypeAlias = tuple[optax.Params, optax.OptState]
# A list of the loss, and with `has_aux` the aux; None if a minibatch is left out.
_StepResult: TypeAlias = Any


def local_steps(
    loss_fn: Callable[Concatenate[Any, P], Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    trainable: Prefix[bool] | None = None,
    unroll: int | bool = 1,
    donate: bool = True,
) -> Step[P]:
    r"""Many compiled training steps of one worker, and what to push after them.

    .. math::

        w_0 &= w, \qquad w_h, s_h = tx(\nabla L(w_{h-1}, batch_h), s_{h-1}, w_{h-1}) \\
        g &= w - w_H

    These are the steps of :func:`minimize`, one after the other, in one program. ``g``
    is the pseudo-gradient. An outer optimizer on the server, such as
    :func:`~gradxform.contrib.delayed_nesterov`, takes it for a gradient at the
    parameters that were pulled. With plain SGD at a learning rate of 1 and a single
    worker, the server would arrive where the worker is. Workers talk to the server only
    once in H steps: this is local SGD, federated averaging, or DiLoCo.

    The local optimizer's state is the worker's own and goes on from one call to the
    next. The pulled parameters stay valid.

    Args:
      loss_fn: ``loss_fn(params, *batch, **keywords)`` returns a scalar, or ``(scalar,
        aux)`` if ``has_aux`` is set.
      tx: the local optimizer, any ``optax.GradientTransformation``.
      has_aux: as in ``jax.value_and_grad``.
      trainable: which parameters learn, as in :func:`minimize`. The pseudo-gradient of
        the others is ``None``.
      unroll: as in ``jax.lax.scan``. On CPU a convolution takes ten times as long
        inside a loop as outside: there it is worth the longer compile to unroll all H
        steps with True.
      donate: whether the memory of ``state`` may be reused. Then do not use it again.
        The memory of ``params`` is never reused.

    Returns:
      ``steps(params, state, *batches, num_steps=None, **keywords) -> (grads, state,
      losses[, aux])``, jitted. ``params`` are the pulled parameters, and ``state``
      begins as ``tx.init(params)``. Each leaf of ``batches`` has a first axis of length
      H, and ``loss_fn`` sees one entry of it at each step. ``losses`` and ``aux`` have
      this axis, too. ``grads`` has the shapes and dtypes of ``params``. The difference
      is computed in at least float32, and rounded once.

      Keywords are those of :func:`minimize`. A keyword of the loss has an axis of steps
      in front, as the batches have; what is static is the same in each step, and so is
      a keyword of ``tx``.

      Each H needs a program of its own. If H changes often, use ``num_steps`` instead,
      an int32 scalar. It says how many of the H steps to take. The batches after them
      are ignored, and their losses and ``aux`` are 0. Above H it means H, below 0 it
      means 0.

    Raises:
      ValueError: there are no batches; a leaf of them has no entry, or not as many as
        the others; no parameter is trainable; a state that is donated lies on the host.
      TypeError: ``params`` holds :class:`IndexedSlices`; ``num_steps`` is not an
        integer; ``tx`` is not a transformation; nobody reads a keyword, or the batches
        hold what is no array.

    References:
      Stich, `Local SGD converges fast and communicates little
      <https://arxiv.org/abs/1805.09767>`__, 2018.
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`__, 2023.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((x @ params["w"] - y) ** 2)
    >>> x = jax.random.normal(jax.random.key(0), (8, 16, 3))  # eight batches of 16
    >>> y = x @ jnp.array([1.0, -2.0, 0.5])
    >>> outer = gx.drop_stale(gx.contrib.delayed_nesterov(1.0, 0.5, num_delay=2), 4)
    >>> server = gx.ParameterServer({"w": jnp.zeros(3)}, outer)
    >>> local = gx.adagrad(0.1)
    >>> steps = gx.local_steps(loss_fn, local)
    >>> state = [local.init({"w": jnp.zeros(3)}) for worker in range(2)]
    >>> for push in range(40):
    ...     params, seen = server.pull()
    ...     grads, state[push % 2], losses = steps(params, state[push % 2], x, y)
    ...     result = server.push(grads, seen)
    >>> losses.shape  # one for each local step
    (8,)
    >>> assert losses[-1] < 1e-4 < 3.0 < loss_fn({"w": jnp.zeros(3)}, x, y)
    """
    arguments.check_flags(donate=donate)
    step = training_step(loss_fn, tx, has_aux=has_aux, trainable=trainable)
    takes = Words.of(loss_fn, skipped=1)
    versions.before_tracing()

    def steps(
        params: optax.Params,
        state: optax.OptState,
        /,
        *batches: object,
        num_steps: jax.typing.ArrayLike | None = None,
        **words: object,
    ) -> tuple[Any, ...]:
        hint = "Pull the whole table, or push the gradients of its rows at each step."
        boundary.check_dense("local_steps", params, "trains whole parameters", hint)
        of_loss, extra = keywords.routed(words, takes, keywords.named_by(tx, state))
        statics, arrays = keywords.divided(of_loss)
        length, params = _length(batches, arrays), host.to_device(params)
        if donate:
            _check_donated(state)
        indices: Any = None  # Steps have indices, int32[H], only for `num_steps`.
        if num_steps is not None:
            arguments.check_scalar("num_steps", num_steps, integer=True)
            indices = np.arange(length, dtype=np.int32)

        def train(
            carry: _Carry, numbered: tuple[Any, tuple[object, ...], dict[str, Any]]
        ) -> tuple[_Carry, _StepResult]:
            index, batch, arrays = numbered
            given = {**extra, **keywords.joined(statics, arrays)}

            def one_step() -> tuple[_Carry, _StepResult]:
                trained, state, *result = step(*carry, *batch, **given)
                return (trained, state), result

            if num_steps is None:
                return one_step()
            wanted = index < dtypes.saturated(num_steps)
            return typed_cond(wanted, one_step, lambda: (carry, None))

        (trained, state), result = jax.lax.scan(
            train, (params, state), (indices, batches, arrays), unroll=unroll
        )
        # g = w - w_H, for trainable parameters
        learning = learning_leaves(trainable, params)
        grads = maps.map_updates(_difference, learning, trained)
        return grads, state, *result

    return cast(Step[P], compiled(steps, loss_fn, tx, (1,) if donate else ()))


def _check_donated(state: optax.OptState) -> None:
    """Raises ``ValueError`` for a state on the host."""
    if any(map(host.is_on_host, jax.tree.leaves(state))):
        # JAX would give their memory to the pseudo-gradients.
        raise ValueError(
            "local_steps cannot donate a state in the host's memory: pass "
            "donate=False, or a state that was not given to on_host."
        )


def _difference(pulled: jax.Array, trained: jax.Array) -> jax.Array:
    return (dtypes.widen(pulled) - dtypes.widen(trained)).astype(pulled.dtype)


def _length(batches: tuple[object, ...], arrays: dict[str, Any]) -> int:
    """H, the length of the first axis of every leaf of the batches and keywords."""
    shapes = {
        f"{name}{jax.tree_util.keystr(path)}": np.shape(leaf)
        for name, tree in {"batches": batches, **arrays}.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    lengths = {shape[:1] for shape in shapes.values()}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "batches must have a first axis of one length in all leaves, with an entry "
            f"for each step, at least one: got {shapes or 'no batches'}."
        )
    return lengths.pop()[0]
