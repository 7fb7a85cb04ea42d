"""A ``keras.optimizers.Optimizer`` around a transformation of optax or gradxform.

Keras keeps an optimizer's state in variables. Here each leaf of the transformation's
state has one. A step puts their values back into the tree, runs the whole step on it,
and assigns the leaves of the new tree.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from gradxform._trees import states

_NEEDS = (
    "gradxform.keras needs Keras 3 with its JAX backend: run python -m pip install "
    "'gradxform[keras]', and set the environment variable KERAS_BACKEND=jax before "
    "the first import of keras"
)
try:
    import keras
except ImportError as error:
    raise ImportError(f"{error}. {_NEEDS}.") from error
if keras.backend.backend() != "jax":
    raise ImportError(f"{_NEEDS}. Its backend is {keras.backend.backend()!r}.")

T = TypeVar("T")
_RATE = ".hyperparams['learning_rate']"  # Where optax.inject_hyperparams has it.
_SCHEDULE = ".hyperparams_states['learning_rate']"  # It is there for a schedule.
_PARTS = (
    *("clipnorm", "clipvalue", "global_clipnorm"),
    *("weight_decay", "use_ema", "gradient_accumulation_steps"),
)
_NO_EFFECT = (
    "{} has no effect here: clips, weight decay, its mask, averages and accumulation "
    "are parts of the transformation. Build one that has them, as by optax.chain."
)


@keras.saving.register_keras_serializable(package="gradxform")
class Optimizer(keras.optimizers.Optimizer):
    """Trains a Keras model with a transformation of optax or of this library.

    ``model.compile`` takes it, and ``fit`` trains as with an optimizer of Keras: with
    callbacks, metrics, ``jit_compile``, ``steps_per_execution``, ``LossScaleOptimizer``
    and ``keras.distribution``. A step is that of :func:`gradxform.apply_gradients`.

    The parameters are an ``OrderedDict`` of arrays, from each trainable variable's
    ``path``, such as ``"sequential/dense/kernel"``, to its value. Masks and labels see
    these paths: ``jax.tree.map_with_path(lambda path, _: ..., params)`` makes them.

    Clips, weight decay and the accumulation of gradients are parts of the
    transformation, so Keras's arguments for them do not exist here, and neither does
    ``use_ema``. In ``fit`` no gradient is late: a gate gets its own global step as
    ``local_step``, and gates side by side get the largest of theirs. Other extra
    arguments do not exist in Keras. A ``BCOO`` gradient is made dense.

    Attributes:
      variables: ``iterations``, then one variable for each leaf of the state. A leaf is
        sharded like its parameters.
      iterations: the number of gradients so far. A gate may have dropped some of them.
      learning_rate: the variable of the rate that ``optax.inject_hyperparams`` keeps in
        the state. ``ReduceLROnPlateau`` and other callbacks read and set it. A rate
        that is set before ``build`` is kept.

    Args:
      tx: the transformation, or a function without arguments that returns it. Keras
        can save the optimizer if :func:`gradxform.from_config` built ``tx``, or if it
        is a function that ``keras.saving.register_keras_serializable`` has registered.
      loss_scale_factor: as in ``keras.optimizers.Optimizer``: the loss is multiplied by
        it, and the gradients are divided by it.
      name: as in ``keras.optimizers.Optimizer``.

    Raises:
      TypeError: ``tx`` is neither; at ``build``, its update needs an extra argument
        that Keras does not give; at ``get_config``, Keras cannot save it;
        ``learning_rate`` is set to a schedule.
      AttributeError: ``learning_rate`` is read or set, but no state keeps it; a clip,
        weight decay, ``use_ema`` or ``gradient_accumulation_steps`` is set.

    References:
      ``keras.optimizers.Optimizer``.

    >>> import gradxform as gx, keras, numpy as np
    >>> from gradxform.keras import Optimizer
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> tx = gx.from_config({"name": "adagrad", "learning_rate": 0.5})
    >>> model.compile(optimizer=Optimizer(tx), loss="mse")
    >>> x = np.eye(2, dtype="float32")
    >>> history = model.fit(x, x @ [[1.0], [-2.0]], epochs=100, verbose=0)
    >>> model.evaluate(x, x @ [[1.0], [-2.0]], verbose=0) < 1e-3
    True
    """

    _leaves: dict[str, _Leaf]

    def __init__(
        self,
        tx: optax.GradientTransformation | Callable[[], optax.GradientTransformation],
        *,
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        built = _built_by(tx)
        super().__init__(
            # Keras would call it, but the property below is there first.
            learning_rate=lambda: self.learning_rate,
            loss_scale_factor=loss_scale_factor,
            name=name,
        )
        # Keras rebuilds each tuple in an attribute, and that would lose the config. It
        # counts each variable in one as the optimizer's own.
        object.__setattr__(self, "_given", tx)
        object.__setattr__(self, "_tx", built)
        object.__setattr__(self, "_leaves", {})

    def __setattr__(self, name: str, value: object) -> None:
        if name in _PARTS and value not in (None, False):
            raise AttributeError(_NO_EFFECT.format(name))
        super().__setattr__(name, value)

    def exclude_from_weight_decay(self, *_: object, **__: object) -> None:
        """Raises ``AttributeError``: weight decay is a part of the transformation."""
        raise AttributeError(_NO_EFFECT.format("exclude_from_weight_decay"))

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the state for these variables, as ``fit`` does before its first step.

        Args:
          variables: the trainable variables of a model.

        Raises:
          TypeError: the transformation needs an extra argument that Keras cannot give.
        """
        if self.built:
            return
        params = _by_path(variables, [v.value for v in variables])
        state = self._tx.init(params)
        try:  # In `fit` an error of a step comes when Keras has freed the weights.
            if params:  # Without any `fit` makes no step.
                jax.eval_shape(self._step, params, state, params)
        except TypeError as error:
            raise TypeError(
                "Keras gives a transformation the gradients, the parameters, and "
                "local_step if it is a gate. With these alone its update fails: "
                f"{error}"
            ) from error
        super().build(variables)
        leaves, self._structure = jax.tree.flatten_with_path(state)
        del state
        kept = {}
        while leaves:  # A leaf is freed when its variable has a copy.
            keys, leaf = leaves.pop(0)
            path = jax.tree_util.keystr(keys)
            kept[path] = self._variable(path, leaf)
            if path in self._leaves:  # A rate that was read or set before.
                kept[path].assign(self._leaves[path].read())
        self._leaves = kept

    def _variable(self, path: str, leaf: jax.typing.ArrayLike) -> _Leaf:
        """A variable with the value and the sharding of a leaf of the state."""
        leaf = jnp.array(leaf)  # A copy: a leaf may be a parameter, and Keras donates.
        random = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = jax.random.key_data(leaf) if random else leaf
        variable = self.add_variable(
            value.shape,
            dtype=value.dtype.name,
            layout=_layout(value),
            name=re.sub(r"\W+", "_", path).strip("_") or "state",
        )
        variable.assign(value)
        return _Leaf(variable, jax.random.key_impl(leaf) if random else None)

    def _backend_apply_gradients(
        self, grads: Sequence[jax.Array], trainable_variables: Sequence[keras.Variable]
    ) -> None:
        """The step on all variables at once; Keras's own goes through them one by one.

        Keras calls it with the variables that have a gradient.
        """
        variables = self._trainable_variables
        # Keras's optimizers take JAX's sparse arrays, too.
        grads = [g.todense() if hasattr(g, "todense") else g for g in grads]
        given = dict(zip(map(id, trainable_variables), grads, strict=True))
        leaves = self._leaves.values()
        params, state = self._step(
            _by_path(variables, [given.get(id(v)) for v in variables]),
            jax.tree.unflatten(self._structure, [leaf.read() for leaf in leaves]),
            _by_path(variables, [v.value for v in variables]),
        )
        for variable, value in zip(variables, params.values(), strict=True):
            variable.assign(value)
        for leaf, value in zip(leaves, jax.tree.leaves(state), strict=True):
            leaf.assign(value)

    def _step(
        self, grads: optax.Updates, state: optax.OptState, params: optax.Params
    ) -> tuple[optax.Params, optax.OptState]:
        extra = {}
        if "local_step" in states.words(state):
            # A gradient ahead of a gate's global step is not late for it.
            found = states.gates(state, "global_step")
            steps = [gate.global_step for _, gate in found]
            extra["local_step"] = functools.reduce(jnp.maximum, steps)
        return gx.apply_gradients(self._tx, grads, state, params, **extra)

    @property
    def learning_rate(self) -> keras.Variable:
        """The rate in the state of ``optax.inject_hyperparams``."""
        if not self._leaves:  # Before `build` the rate is that of a state without more.
            for keys, leaf in jax.tree.leaves_with_path(self._tx.init(OrderedDict())):
                path = jax.tree_util.keystr(keys)
                if "['learning_rate']" in path:
                    variable = keras.Variable(leaf, name="learning_rate")
                    self._leaves[path] = _Leaf(variable, None)
        found = [x for path, x in self._leaves.items() if path.endswith(_RATE)]
        if len(found) != 1:
            raise AttributeError(
                f"the optimizer's state holds {len(found)} learning rates and must "
                "hold one, to read or to set learning_rate: make the transformation "
                "with optax.inject_hyperparams, as in "
                "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        return found[0].variable

    @learning_rate.setter
    def learning_rate(self, learning_rate: jax.typing.ArrayLike) -> None:
        variable = self.learning_rate
        if callable(learning_rate):
            raise TypeError(
                f"learning_rate must be a number, got {learning_rate!r}: give a "
                "schedule to the transformation, as in optax.adam(schedule)."
            )
        if any(_SCHEDULE in path for path in self._leaves):
            raise AttributeError(
                "learning_rate comes from a schedule, and the next step would "
                "overwrite it: give optax.inject_hyperparams a number instead."
            )
        variable.assign(learning_rate)

    def get_config(self) -> dict[str, Any]:
        """What ``model.save`` writes: the transformation without its state.

        Raises:
          TypeError: Keras cannot save the transformation.
        """
        given = self._given
        try:
            # Keras writes lambdas and methods, too, but nobody could load them.
            if inspect.isfunction(given) and given.__name__ != "<lambda>":
                tx = keras.saving.serialize_keras_object(given)
            else:
                tx = gx.get_config(given)
        except TypeError as error:
            raise TypeError(
                "Keras cannot save this optimizer, because its transformation has no "
                "config. Build it by gradxform.from_config. Or give Optimizer a "
                "function that returns it, no lambda and no method, and decorate the "
                "function with keras.saving.register_keras_serializable()."
            ) from error
        return {
            "tx": tx,
            "loss_scale_factor": self.loss_scale_factor,
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> Optimizer:
        """The optimizer that ``get_config`` describes; ``load_model`` calls this.

        Args:
          config: what ``get_config`` returned.
          custom_objects: the function that returns the transformation, by its name,
            if it is not registered.
        """
        tx = config["tx"]
        if "class_name" in tx:  # So Keras writes a function.
            tx = keras.saving.deserialize_keras_object(tx, custom_objects)
        else:
            tx = gx.from_config(tx)
        return cls(**{**config, "tx": tx})


class _Leaf(NamedTuple):
    """A leaf of a transformation's state, in a variable of Keras."""

    variable: keras.Variable
    key: object  # How to make a random key of the value; None if it is none.

    def read(self) -> jax.Array:
        value = self.variable.value
        if self.key is None:
            return value
        return jax.random.wrap_key_data(value, impl=self.key)

    def assign(self, value: jax.Array) -> None:
        self.variable.assign(value if self.key is None else jax.random.key_data(value))


def _built_by(
    tx: optax.GradientTransformation | Callable[[], optax.GradientTransformation],
) -> optax.GradientTransformation:
    built = tx() if callable(tx) else tx
    if not isinstance(built, optax.GradientTransformation):
        raise TypeError(
            "tx must be a GradientTransformation, or a function without arguments that "
            f"returns one, got {built!r}. For optax.MultiSteps pass its "
            "gradient_transformation()."
        )
    return built


def _by_path(
    variables: Sequence[keras.Variable], values: Sequence[T]
) -> OrderedDict[str, T]:
    """Values under the paths of their variables, in the order of the variables.

    A path that is there already gets a number: layers may give one name twice.
    """
    tree: OrderedDict[str, T] = OrderedDict()
    for variable, value in zip(variables, values, strict=True):
        path = variable.path
        while path in tree:
            path += f"_{len(tree)}"
        tree[path] = value
    return tree


def _layout(value: jax.Array) -> object:
    """The sharding of a value; what has none is on all devices of the distribution."""
    if isinstance(value.sharding, jax.sharding.NamedSharding):
        return value.sharding
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    replicated = [None] * value.ndim
    return keras.distribution.TensorLayout(replicated, distribution.device_mesh)
