"""A function of parameters that come from the host a layer at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
import optax

from gradxform._checks import keywords, structures
from gradxform._devices import host
from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.versions import Op
from gradxform._layers import layers as layered
from gradxform._layers import tpu
from gradxform._layers.forward import Forward, Use
from gradxform._layers.stacks import StackVariable
from gradxform._layers.turns import EvaluationReader
from gradxform._trees import maps
from gradxform._trees.types import Path, T

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Evaluated(Protocol[P, R_co]):
    """What :func:`evaluate` returns."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @property
    def lower(self) -> Callable[..., jax.stages.Lowered]: ...


def evaluate(
    f: Callable[P, R_co], *, layers: Collection[str] = ()
) -> Evaluated[P, R_co]:
    r"""A compiled ``f(params, *args)``, whose parameters may lie on the host.

    .. math:: y = f(w, args)

    It is the forward pass of a step by layers alone: for losses and metrics of a test
    set, and to sample from a model. It keeps no activations. A ``jax.lax.scan`` of
    ``f`` that goes over a stack reads one layer of it at a time. So parameters on the
    host need room for about two layers on the device. ``f`` may take gradients by its
    other arguments, as ``jax.grad`` by the inputs of a model: then a layer at a time
    comes in their backward pass, too.

    Any number of scans may go over a stack, also within loops, conditionals and
    ``jax.jit``, such as the loop that samples one token after another. Then each turn
    brings all layers once. What else reads a stack gets the whole of it.

    A cache with an entry for each layer is an input of such a scan, and one of its
    results. If it is a leaf of ``params`` that ``layers`` names, and a loop carries it,
    it stays where it lies, as on the host: a layer of it comes, and goes back.

    Args:
      f: ``f(params, *args, **kwargs)`` returns any tree of arrays.
      layers: paths of parameters, or of trees of them, as for :func:`minimize`. All
        else that lies on the host comes whole, other arguments too.

    Returns:
      The same function, jitted. What is no array in a keyword, such as a flag or Flax's
      ``mutable=["cache"]``, is static: each value has a program of its own. To donate
      an argument, such as a cache, put ``jax.jit`` around it:
      ``jax.jit(gx.evaluate(f, layers=...), donate_argnums=1)``.

    Raises:
      ValueError: ``layers`` names no parameter, or one that no scan goes over; or one
        on the host by which the result is differentiated.
      TypeError: ``layers`` is no sequence of paths; or ``f`` returns no arrays.

    References:
      Ren et al., `ZeRO-Offload <https://arxiv.org/abs/2101.06840>`__, 2021.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> params = gx.on_host({"layers": jnp.full((4, 16, 16), 0.5)}, min_size=1)
    >>> def f(params, x):
    ...     return jax.lax.scan(lambda x, w: (x @ w, x.sum()), x, params["layers"])
    >>> y, sums = gx.evaluate(f, layers=["layers"])(params, jnp.ones((1, 16)))
    >>> assert jnp.all(y == 8.0**4)
    >>> assert sums.tolist() == [16, 128, 1024, 8192]
    """
    layered.check_paths(layers)
    if layers:
        versions.before_tracing()

    def evaluated(params: optax.Params, /, *args: Any, **kwargs: Any) -> R_co:
        paths = layered.paths_of(layers, params)
        args, kwargs = host.to_device((args, kwargs))

        def of_params(params: optax.Params) -> R_co:
            if not paths:
                return f(host.to_device(params), *args, **kwargs)
            return _by_layers(lambda params: f(params, *args, **kwargs), paths, params)

        results = tpu.with_bytes(of_params, params) if paths else of_params(params)
        if not jax.tree.leaves(results):
            raise TypeError(f"f must return arrays, got {results!r}.")
        return results

    return cast(Evaluated[P, R_co], keywords.Jitted(evaluated, trees=1))


def _by_layers(
    f: Callable[[optax.Params], T], paths: Collection[Path], params: optax.Params
) -> T:
    """``f(params)``, with the layers of the stacks at these paths one by one."""
    leaves, treedef = maps.flatten(params)
    names = [path for path, _ in maps.leaves_with_path(params)]
    stacks = {
        n: host.undifferentiated(leaves[n], structures.path_str(name))
        for n, name in enumerate(names)
        if name in paths
    }
    others = host.to_device([x for n, x in enumerate(leaves) if n not in stacks])

    def of_stacks(stacks: Mapping[int, jax.Array]) -> T:
        rest = iter(others)
        filled = [stacks[n] if n in stacks else next(rest) for n in range(len(leaves))]
        return f(jax.tree.unflatten(treedef, filled))

    types = {
        n: jax.typeof(x).update(memory_space=host.DEVICE) for n, x in stacks.items()
    }
    with jax.disable_jit(False):  # Otherwise it would unroll each scan.
        closed, shapes = jax.make_jaxpr(of_stacks, return_shape=True)(types)
    reader = EvaluationReader(dict(stacks), itertools.count(len(leaves)))
    variables = [StackVariable(n, structures.path_str(names[n])) for n in stacks]
    closed = programs.with_placements(closed)
    program = programs.InnerProgram.of(closed)
    results = Forward(reader).results(program, variables)
    for x in variables:
        if x.path not in reader.scanned:
            raise ValueError(_unscanned(x.path, reader.uses.get(x.path)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _unscanned(path: str, use: Use | None) -> str:
    """Why the layers of a stack came at once, and what to do."""
    why, hint = "no jax.lax.scan of f goes over its layers", "Leave"
    if use:
        why += f": {jaxprs.with_line(use.eqn)} takes the whole stack"
        if jaxprs.name_of(use.eqn) == Op.SHARD_MAP:
            hint = "Put jax.shard_map around gx.evaluate. Or leave"
    return (
        f"{path!r} is one of layers, but {why}. {hint} {path!r} out of layers: then it "
        "comes whole."
    )
