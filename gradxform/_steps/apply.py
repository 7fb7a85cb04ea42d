"""The verbs: apply gradients, minimize a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, cast, overload

import jax
import optax

from gradxform._checks import arguments, keywords, structures
from gradxform._devices import host
from gradxform._gates import gate, missing
from gradxform._jax import versions
from gradxform._layers import layers as layered
from gradxform._layers import tpu
from gradxform._rows import boundary, table_rows
from gradxform._rows.lookup import Tables, value_and_grad
from gradxform._steps.donation import Donating
from gradxform._trees import maps
from gradxform._trees.extra_args import Words, accepted_kwargs
from gradxform._trees.types import Leaf, Params, Prefix, PyTree, State

P = ParamSpec("P")
# Parameters, state, the loss, and with ``has_aux`` the aux.
_Result: TypeAlias = tuple[Params, State, jax.Array, *tuple[Any, ...]]


class Step(Protocol[P]):
    """What :func:`minimize` returns: it is called as the loss, with ``state`` beside.

    Python cannot describe the keywords of a loss together with others. So beside one
    that a gate reads, type checkers take any batch.
    """

    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: P.args, **keywords: P.kwargs
    ) -> _Result[Params, State]: ...
    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: Any, local_step: Any, **_: Any
    ) -> _Result[Params, State]: ...
    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: Any, weight: Any, **_: Any
    ) -> _Result[Params, State]: ...
    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: Any, last: Any, **_: Any
    ) -> _Result[Params, State]: ...
    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: Any, worker: Any, **_: Any
    ) -> _Result[Params, State]: ...
    @overload
    def __call__(
        self, params: Params, state: State, /, *batch: Any, value: Any, **_: Any
    ) -> _Result[Params, State]: ...
    @overload  # Of local steps.
    def __call__(
        self, params: Params, state: State, /, *batch: Any, num_steps: Any, **_: Any
    ) -> _Result[Params, State]: ...

    @property
    def lower(self) -> Callable[..., jax.stages.Lowered]: ...


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree[Leaf],
    state: State,
    params: Params,
    **extra: object,
) -> tuple[Params, State]:
    """The whole step: gradients through ``tx``, its updates onto the parameters.

    The result is that of ``tx.update`` followed by :func:`apply_updates`. If ``tx`` is
    a gate, such as :func:`drop_stale`, one conditional guards both together: a push
    that is skipped costs next to nothing, and no copy of the model is made.

    Jit it and donate ``params`` and ``state``, in this order, to update them in place:
    JAX pairs donated buffers with results by shape and order, and the other order costs
    a copy of the model. If a worker may still hold ``params``, do not donate them. A
    state may begin with the parameters' own arrays, as in ``optax.contrib.prodigy``.
    Then donate a copy of it; :func:`minimize` makes one by itself.

    Args:
      tx: any ``optax.GradientTransformation``.
      grads: gradients of the structure and shapes of ``params``. ``None`` leaves a
        parameter and its state as they are; so does the ``float0`` that ``jax.grad``
        with ``allow_int=True`` gives for integers, and an ``optax.MaskedNode``.
      state: the state of ``tx``.
      params: the parameters. A part of a table, :class:`TableRows`, is a table of its
        own here, and its state is the state of its rows.
      **extra: extra arguments of ``tx``, such as ``local_step``. Nobody has to read
        ``value``, ``grad`` and ``value_fn``.

    Returns:
      ``(params, state)``, dtypes and shapes as given.

    Raises:
      TypeError: ``grads`` and ``params`` differ in structure or shape (the message
        names the first such path); nothing in ``tx`` reads an extra argument; or ``tx``
        has an ``optax.lookahead``: its parameters have another structure than the
        gradients.
      ValueError: no leaf has a gradient.

    References:
      ``tf.train.Optimizer.apply_gradients``.

    >>> import functools, gradxform as gx, jax, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(0.25), max_staleness=0)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def push(params, state, grads, local_step):
    ...     return gx.apply_gradients(tx, grads, state, params, local_step=local_step)
    >>> params = {"w": jnp.array([1.0])}
    >>> state = tx.init(params)
    >>> grads = {"w": jnp.array([2.0])}
    >>> params, state = push(params, state, grads, 0)  # fresh
    >>> params, state = push(params, state, grads, 0)  # one step late
    >>> params, state.global_step, state.stale_count
    ({'w': Array([0.5], dtype=float32)}, Array(1, dtype=int32), Array(1, dtype=int32))
    """
    return applied(tx, grads, state, params, extra)


def applied(
    tx: optax.GradientTransformation,
    grads: PyTree[Leaf],
    state: State,
    params: Params,
    extra: dict[str, object],
    given: Collection[str] = (),
) -> tuple[Params, State]:
    """:func:`apply_gradients`; nobody has to read the extra arguments in ``given``."""
    structures.check_no_lookahead(params, state)
    structures.check_shapes("grads", grads, "params", params)
    grads, arrays = host.to_device((grads, params))
    new, state = _on_device(tx, grads, arrays, state, extra, given)
    return host.to_memory_of(new, params), state


def _on_device(
    tx: optax.GradientTransformation,
    grads: PyTree[Leaf],
    params: Params,
    state: State,
    extra: dict[str, object],
    given: Collection[str],
    loss: Words | None = None,
) -> tuple[Params, State]:
    """:func:`apply_gradients` for gradients like the parameters, on the device."""
    structures.check_some_gradient("grads", grads)
    extra = host.to_device(extra)
    grads, arrays = table_rows.as_arrays(grads, params)
    grads = missing.normalized(grads, arrays)

    def update(extra: dict[str, Any]) -> Any:
        return gate.step(tx, grads, state, arrays, extra, applies=False)

    keywords.check_read(tx, state, extra, update, loss=loss, given=given)
    with boundary.explained(grads):
        new, state = gate.step(tx, grads, state, arrays, extra, applies=True)
    if arrays is not params:
        new = table_rows.with_rows(params, new)
    return cast(Params, new), state


def minimize(
    loss_fn: Callable[Concatenate[Any, P], Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    trainable: Prefix[bool] | None = None,
    tables: Tables = (),
    layers: Collection[str] = (),
    two_passes: bool = False,
    donate: bool = True,
) -> Step[P]:
    r"""A compiled training step: the gradients of a loss, and their application.

    .. math:: g = \nabla_w L(w, batch), \qquad w, s \leftarrow tx(g, s, w)

    It is ``jax.value_and_grad`` and :func:`apply_gradients` in one program, so the
    compiler sees the whole step. It returns the new parameters, the new state, and the
    loss of the old parameters. On a mesh with automatic axes the compiler decides where
    results lie; the page on sharding pins them.

    Args:
      loss_fn: ``loss_fn(params, *batch, **keywords)`` returns a scalar, or with
        ``has_aux`` ``(scalar, aux)``.
      tx: any ``optax.GradientTransformation``.
      has_aux: as in ``jax.value_and_grad``.
      trainable: which parameters learn: a tree of bools, a prefix of the parameters'
        tree, or a function ``params -> tree``; by default all. For the others no
        gradient is computed, and their state stays as it is.
      tables: which parameters get row-sparse gradients; see :func:`value_and_grad`.
      layers: paths of parameters, or of trees of them, such as ``"decoder/layers"``.
        They are stacks: a ``jax.lax.scan`` of the loss goes over each of them, as in
        models with ``flax.linen.scan`` or ``flax.nnx.scan``. Nothing else reads them
        that gives the loss a derivative by them. The backward pass applies ``tx`` to
        each layer as soon as its gradient is known, or adds it to the sum of
        :func:`accumulate`. So no array holds the gradients of all layers, but for a
        stack that learns in several scans: its gradient is one array. It computes
        each layer again, as with ``jax.checkpoint``. The numbers are those of the step
        without ``layers``. The update of a layer may read this layer, its index, the
        loss and scalars, but no other layer and no gradient of another parameter. It
        may add up over named mesh axes. The page on larger models says what a loss may
        do with a stack.
      two_passes: whether ``tx`` may also read sums over all gradients of the
        ``layers``, their maximum and the like. A clip by their norm does so, and so do
        :func:`skip_spikes` and a gate that looks for NaN. A first backward pass
        computes these sums and keeps no gradient. It costs the time of one more
        backward pass, with each push. A sum that depends on another sum, as in
        ``optax.lamb``, would need a third pass, so it is an error.
      donate: whether the step may reuse the memory of ``params`` and ``state``. Then do
        not use them again. Shared arrays are copied first: a hyperparameter that is an
        array of yours, or parameters with which a state begins. With False both stay
        valid, and each step needs room for new ones.

    Returns:
      ``step(params, state, *batch, **keywords) -> (params, state, loss[, aux])``,
      jitted. ``state`` begins as ``tx.init(params)``. A keyword that the loss names
      goes to the loss, any other to ``tx``, such as ``local_step``, and one that both
      name goes to both; a loss with ``**kwargs`` takes all that no gate names. What is
      no array in a keyword of the loss is static, leaf by leaf: each value of a flag, a
      string or a function has a program of its own, and a number is an array.

      ``tx`` also receives the loss as ``value``, its gradient as ``grad``, and the loss
      of this batch as a function of the parameters, ``value_fn``, if its ``update``
      takes them. Line searches and ``optax.lbfgs`` need all three. By layers there is
      only ``value``.

    Raises:
      ValueError: no parameter is trainable; ``tables`` or ``layers`` names no
        parameter; ``tables`` names one that is not trainable; or ``layers`` names one
        that something else than a ``scan`` reads with a derivative.
      TypeError: as :func:`value_and_grad`; ``tx`` is no transformation; it mixes
        ``layers``, as a clip by the norm of all gradients does without ``two_passes``,
        or needs ``grad`` or ``value_fn`` with ``layers``; a keyword is read by nobody,
        or holds what is no array and has no hash; or the batch holds what is no array.

    References:
      ``tf.train.Optimizer.minimize``, where ``trainable`` is ``var_list``.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((params["w"] * x + params["b"] - y) ** 2)
    >>> tx = gx.adagrad(1.0)
    >>> step = gx.minimize(loss_fn, tx, trainable={"w": True, "b": False})
    >>> params = {"w": jnp.array(0.0), "b": jnp.array(1.0)}
    >>> state, x = tx.init(params), jnp.arange(4.0)
    >>> for _ in range(100):
    ...     params, state, loss = step(params, state, x, 2 * x + 1)
    >>> assert loss < 1e-6 and abs(params["w"] - 2) < 1e-3 and params["b"] == 1.0

    >>> def loss_fn(params, x):
    ...     x, _ = jax.lax.scan(lambda x, w: (x * w, None), x, params["layers"])
    ...     return (x - 1) ** 2
    >>> params = {"layers": jnp.array([1.0, 2.0, 3.0])}
    >>> step = gx.minimize(loss_fn, optax.sgd(0.01), layers=["layers"], donate=False)
    >>> new, _, loss = step(params, optax.sgd(0.01).init(params), 1.0)
    >>> assert loss == 25 and jnp.allclose(new["layers"], jnp.array([0.4, 1.7, 2.8]))

    >>> def loss_fn(params, x, *, mask, train):
    ...     errors = (x * params["w"] - 1) ** 2 if train else abs(x * params["w"] - 1)
    ...     return jnp.sum(errors * mask)
    >>> tx, params = gx.accumulate(optax.sgd(0.1), 1), {"w": jnp.array(3.0)}
    >>> step = gx.minimize(loss_fn, tx, donate=False)
    >>> args = params, tx.init(params), jnp.array([1.0, 2.0])
    >>> of_loss = {"mask": jnp.array([0.0, 1.0]), "train": True}
    >>> assert step(*args, **of_loss, weight=8.0)[2] == 25.0
    """
    arguments.check_flags(donate=donate, two_passes=two_passes)
    step = training_step(
        loss_fn,
        tx,
        has_aux=has_aux,
        trainable=trainable,
        tables=tables,
        layers=layers,
        two_passes=two_passes,
    )
    return cast(Step[P], compiled(step, loss_fn, tx, (0, 1) if donate else ()))


def training_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool,
    trainable: Prefix[bool] | None,
    tables: Tables = (),
    layers: Collection[str] = (),
    two_passes: bool = False,
) -> Callable[..., Any]:
    """The step of :func:`minimize`, not yet compiled."""
    arguments.check_transformation("tx", tx)
    layered.check_paths(layers)
    if tables or layers:
        versions.before_tracing()
    takes = Words.of(loss_fn, skipped=1)

    def step(
        params: optax.Params,
        state: optax.OptState,
        /,
        *batch: object,
        **words: object,
    ) -> tuple[Any, ...]:
        structures.check_no_lookahead(params, state)
        learning = learning_leaves(trainable, params)
        named = keywords.named_by(tx, state)
        _check_tables(tables, learning, params, named)
        stacked = layered.paths_of(layers, params) if layers else set()
        of_loss, extra = keywords.routed(words, takes, named)

        def loss(learning: optax.Params, words: dict[str, Any] = of_loss) -> Any:
            merged = maps.map_leaves(
                lambda p, frozen: host.to_device(frozen) if p is None else p,
                learning,
                params,
            )
            return loss_fn(merged, *batch, **words)  # Its results.

        def on_device(words: dict[str, Any]) -> Any:
            return loss(host.to_device(learning), words)

        keywords.check_loss_reads(on_device, of_loss, takes, named)

        if stacked:
            _check_by_layers(tx, learning, state, params, extra, takes)

            def by_layer(*args: Any) -> tuple[Any, ...]:
                result, *new = layered.step(
                    lambda p: (*loss(p),) if has_aux else (loss(p),),
                    tx,
                    stacked,
                    tables,
                    lambda value: {**accepted_kwargs(tx, {"value": value}), **extra},
                    *args,
                    two_passes=two_passes,
                )
                return *host.to_memory_of(tuple(new), (params, state)), *result

            return tpu.with_bytes(by_layer, learning, params, state)
        trees = learning, params, state
        return _at_once(loss, tx, tables, trees, extra, takes, named, has_aux=has_aux)

    return step


def _at_once(
    loss: Callable[[optax.Params], Any],
    tx: optax.GradientTransformation,
    tables: Tables,
    trees: tuple[optax.Params, optax.Params, optax.OptState],
    extra: dict[str, Any],
    takes: Words,
    named: Collection[str],
    *,
    has_aux: bool,
) -> tuple[Any, ...]:
    """The step of :func:`minimize` for all layers at once.

    ``trees`` are the trainable parameters, all of them, and the state.
    """
    learning, given, state = trees
    params, words = host.to_device(given), {*extra, *named}
    gradient = value_and_grad(loss, tables=tables, has_aux=has_aux)
    value, grads = gradient(host.to_device(learning))
    value, aux = (value[0], value[1:]) if has_aux else (value, ())
    value_fn = _value_fn(loss, params, words, has_aux=has_aux)
    own = {"value": value, "grad": grads, "value_fn": value_fn}
    extra = {**accepted_kwargs(tx, own), **extra}
    params, state = _on_device(tx, grads, params, state, extra, (), takes)
    return host.to_memory_of(params, given), state, value, *aux


def compiled(
    step: Callable[..., Any],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    donated: tuple[int, ...],
) -> keywords.Jitted | Donating:
    """A jitted step, to which arguments with these numbers are donated.

    Bools in a keyword for ``tx`` alone are arrays. So ``last`` of :func:`accumulate`
    makes no second program.
    """

    def keeps_bools(name: str, args: tuple[Any, ...]) -> bool:
        takes = Words.of(loss_fn, skipped=1)
        if name in takes.names or not takes.others:
            return name not in takes.names
        return name in keywords.named_by(tx, args[1])

    jitted = keywords.Jitted(
        step, trees=2, keeps_bools=keeps_bools, donate_argnums=donated
    )
    return Donating(jitted, tx, params_too=0 in donated) if donated else jitted


def _value_fn(
    loss: Callable[[optax.Params], Any],
    params: optax.Params,
    words: Collection[str],
    *,
    has_aux: bool,
) -> Callable[..., jax.Array]:
    """The loss of a batch as a function of all parameters, for a line search.

    Optax's searches refuse an extra argument of others that it does not name: those of
    the step, and ``staleness``, which :func:`drop_stale` gives to what is behind it. As
    a tree without leaves it may be an argument of a jitted update.
    """

    def value_fn(new: optax.Params, **_: object) -> jax.Array:
        result = loss(table_rows.with_rows(params, new))
        value: jax.Array = result[0] if has_aux else result
        return value

    names = ["new", *sorted({*words, "staleness"}.difference(keywords.CONVENTIONAL))]
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    vars(value_fn)["__signature__"] = inspect.Signature(
        [inspect.Parameter(name, kinds[name != "new"]) for name in names]
    )
    return jax.tree_util.Partial(value_fn)


def _check_by_layers(
    tx: optax.GradientTransformation,
    learning: optax.Params,
    state: optax.OptState,
    params: optax.Params,
    extra: dict[str, Any],
    takes: Words,
) -> None:
    """Raises ``TypeError`` for keywords that a step by layers cannot give or take.

    There is no gradient yet. One like the parameters shows what an update reads.
    """
    whole = {"grad", "value_fn"}
    if found := sorted(whole & ({*extra} | keywords.named_by(tx, state))):
        raise TypeError(
            f"minimize(layers=...) cannot give this transformation {found[0]}: it "
            "reads the gradients, or evaluates the loss, of all layers at once, as a "
            "line search does. Leave out layers, or take another transformation."
        )

    def update(extra: dict[str, Any]) -> Any:
        # A step brings layers to the device, so an update sees none on the host.
        args = host.to_device((learning, state, params, extra))
        return gate.step(tx, *args, applies=False)

    keywords.check_read(tx, state, extra, update, loss=takes)


def learning_leaves(
    trainable: Prefix[bool] | None, params: optax.Params
) -> optax.Params:
    """The trainable parameters; None for the others."""
    given = True if trainable is None else trainable
    mask = structures.bools("trainable", given, params)
    learning = jax.tree.map(lambda learns, p: p if learns else None, mask, params)
    structures.check_learnable(learning)
    return learning


def _check_tables(
    tables: Tables,
    learning: optax.Params,
    params: optax.Params,
    named: Collection[str],
) -> None:
    """Raises if a table cannot get a row-sparse gradient here.

    Raises:
      TypeError: the transformation reads a dense gradient: it names ``grad``.
      ValueError: a table is not trainable, or parameters lie on the host.
    """
    if tables and "grad" in named:
        raise TypeError(
            "tables get row-sparse gradients, and this transformation reads dense ones "
            "as grad, as a line search does. Leave out tables."
        )
    on_host = [path for path, p in maps.leaves_with_path(params) if host.is_on_host(p)]
    if tables and on_host:
        raise ValueError(
            "minimize takes no tables beside parameters in the host's memory, got "
            f"those at {structures.path_name(on_host[0])}. Leave out tables, or put "
            "params on the device."
        )
    if callable(tables):
        return
    for path, p in maps.leaves_with_path(learning):
        if p is None and (name := structures.path_str(path)) in tables:
            raise ValueError(
                f"tables names {name!r}, which is not trainable, so it gets no "
                "gradient. Leave it out of tables, or let trainable be True there."
            )
