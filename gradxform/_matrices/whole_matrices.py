"""Whole matrices on a mesh: each device updates some of them.

The update is traced once, uncut. Its cores run on whole matrices, equal ones together.
Everything else is evaluated as it is, where it lies.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from gradxform._checks import arguments, structures
from gradxform._devices import mesh as meshes
from gradxform._jax import compilers, jaxprs, versions
from gradxform._matrices import cores, division, due, exchange, placements, unplaced
from gradxform._matrices.layout import Arguments, Group, Layout
from gradxform._matrices.placements import AnyMesh, Args, Names, Placements
from gradxform._slices.rules import shape_of
from gradxform._trees import states
from gradxform._trees.extra_args import with_any_extra_args, words_of
from gradxform._trees.types import Path, Prefix

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

_UNKNOWN = (
    "whole_matrices needs shardings here: where arrays are traced, automatic axes do "
    "not say where they lie. Pass whole_matrices(inner, shardings) with those of the "
    "parameters: jax.tree.map(lambda p: p.sharding, params)."
)


_UNTYPED = (
    "whole_matrices: updates at {} have no type on the mesh of the others, whose axes "
    "are explicit. A state that jax.jit(tx.init) makes outside of a mesh has none. "
    "Call init and update under jax.set_mesh(mesh)."
)
_TWICE = (
    "whole_matrices is inside of another whole_matrices, which does the same already: "
    "take one of them away."
)
_UNTRACED = (
    "whole_matrices: init cannot trace an update with gradients and parameters alone, "
    "so all arrays of the state lie as their parameters, and travel in each step. If "
    "the update needs no extra arguments, the first step raises this error: {}: {}"
)


class _TwiceError(TypeError):
    """One is inside of another one."""


# Whether an update is traced that is already inside of one.
_is_inside = contextvars.ContextVar("is_inside", default=False)


def whole_matrices(
    inner: optax.GradientTransformation,
    shardings: Prefix[jax.sharding.Sharding] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs what an optimizer does with matrices on whole ones, where a mesh cuts them.

    .. math:: w_{t+1} = w_t + inner(g_t, s_t, w_t)

    Muon multiplies matrices, so it needs whole ones. From parts of them XLA gathers
    each again for each product. Here each device gets some matrices whole, by one
    ``all_to_all``, does all that ``inner`` does with them, and gives them back by
    another one: in all 2 / D of the parameters' bytes on D devices. Others call it
    layer sharding, or distributed Muon. All else that ``inner`` does stays where it
    lies. State, labels and checkpoints are those of ``inner``.

    The update is traced once, as if no array was cut. So ``inner`` may be any
    transformation that treats the matrices of each parameter by themselves: Muon,
    SOAP, Shampoo, PSGD Kron, Dion, or one of your own, with products of matrices, QR,
    ``eigh``, SVD, Cholesky or triangular solves. Along axes of layers, experts or heads
    matrices stand alone. Nobody has to name these axes: operations show them. Equal
    matrices go together, also from several leaves. A mesh axis that cuts an array along
    such an axis moves nothing. One along which devices have the same arrays shares the
    work.

    **State.** Factors and eigenbases of a stack may lie *by matrix*: on the device that
    has the matrix, so they do not travel, and each device has 1 / D of them.
    ``gx.abstract_state(whole_matrices(...), params)`` says so, ``init`` on parameters
    that are on their mesh makes them there, and a step keeps them there. It needs a
    number of layers, experts and heads that the devices divide. Other arrays of the
    state, S of the parameters' bytes, lie as their parameters and travel:
    (2 + 2 S) / D.

    To know these places ``init`` traces an update, so it raises the errors of ``inner``
    and of ``shardings``. If the update may need extra arguments, such as a loss, and
    cannot be traced without, the state lies as its parameters. A ``RuntimeWarning``
    quotes the error, unless the state tells which arguments they are.

    **Conditionals and loops** over a whole tree are divided by parameter, so gates
    inside work. If all devices know the predicate, an array that only one branch needs
    travels only when that branch runs: factors and new eigenbases every k steps,
    gradients where a gate inside lets them through. Leaves that draw a predicate each,
    as in Kron, go together. Their devices take them one after another, so each runs its
    own branch, and the arrays of all travel if one of them is due. By ``vmap`` over a
    stack a conditional is a selection, as everywhere in JAX: both branches run.

    **Cost.** Tracing takes two to five times as long. The number of equal matrices is
    padded to a multiple of the devices that share them, so a device has at least one:
    one stack of 32 matrices on 256 chips costs a chip 8 times the products that XLA
    would divide, and 8 times the traffic. Without ``jax.jit`` explicit axes compile at
    each call.

    Args:
      inner: any transformation.
      shardings: those of the parameters, ``jax.tree.map(lambda p: p.sharding,
        params)``: a ``NamedSharding`` for each, or one for a whole branch. Explicit
        axes, and arrays outside of ``jax.jit``, say where they lie, so they need none.
        Wrong ones cost traffic, and no number changes.

    Returns:
      A transformation with the state of ``inner``. On one device, and if ``inner`` does
      nothing with matrices, its update is that of ``inner``. On explicit axes each
      result has the type of the array that it replaces.

    Raises:
      TypeError: ``inner`` is no transformation, or has a ``whole_matrices`` inside;
        ``shardings`` are not those of the parameters; or an update mixes matrices of
        several parameters, also by a number in a loop over all of them or by one
        function with a derivative of its own, or has effects between them. The message
        names the operation, and its line.
      ValueError: it is traced on automatic axes without ``shardings``; they do not fit
        a parameter's shape; or it is inside of ``jax.shard_map``, with parts of arrays.

    References:
      Jordan, `Muon <https://kellerjordan.github.io/posts/muon>`__, 2024.
      Liu et al., `Muon is scalable for LLM training
      <https://arxiv.org/abs/2502.16982>`__, 2025.
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`__, 2025.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> def orthogonalized(g, _):
    ...     g = g / jnp.linalg.norm(g)
    ...     for _ in range(5):
    ...         g = 1.5 * g - 0.5 * g @ g.T @ g
    ...     return g
    >>> muon = optax.stateless_with_tree_map(orthogonalized)
    >>> tx = gx.whole_matrices(optax.chain(optax.trace(0.9), muon))
    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    >>> layers = [jax.random.normal(jax.random.key(n), (16, 32)) for n in range(8)]
    >>> params = jax.device_put(layers, NamedSharding(mesh, P("fsdp")))
    >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    >>> expected = orthogonalized(layers[7], None)
    >>> assert jnp.allclose(jax.device_get(updates[7]), expected, atol=1e-5)
    """
    arguments.check_transformation("inner", inner)
    versions.before_tracing()
    inner = with_any_extra_args(inner)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        args = updates, params, state, extra
        if _is_inside.get():
            raise _TwiceError(_TWICE)
        placed = placements.found(inner.init, args, shardings)
        if names := _manual_axes():
            _check_whole(inner, args, names)
        elif not placed.is_one_device:
            step = CutStep.of(inner, args)
            # Explicit axes multiply no parts, also of matrices that no core needs.
            is_explicit = placed.types and cores.has_matrices(step.closed.jaxpr)
            if step.update.of_matrices or is_explicit:
                return step.on(placed)
        return inner.update(updates, state, params, **extra)

    def init_fn(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        return _where_matrices_are(inner, params, state, shardings)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _where_matrices_are(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    shardings: Prefix[jax.sharding.Sharding] | None,
) -> optax.OptState:
    """A new state: arrays of matrices are on the devices that have the matrices.

    It stays as it is where nobody knows these devices yet, and where an update needs
    extra arguments.
    """
    args: Args = params, params, state, {}
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    is_on_mesh = any(not jax.typeof(x).sharding.mesh.empty for x in arrays)
    if _manual_axes() or not is_on_mesh:
        return state
    placed = placements.found(inner.init, args, shardings)
    mesh = placed.mesh
    if mesh is None or placed.is_one_device:
        return state
    try:
        step = CutStep.of(inner, args)
    except Exception as error:  # Without an extra argument it may be any.
        may_need_more = words_of(inner).others or words_of(inner).names
        if isinstance(error, _TwiceError) or not may_need_more:
            raise
        if not states.words(state):
            name = type(error).__name__
            warnings.warn(_UNTRACED.format(name, error), RuntimeWarning, stacklevel=3)
        return state
    leaves, treedef = jax.tree.flatten(state)
    start = len(step.leaves) - len(leaves)
    is_explicit = bool(placed.types)
    context = jax.sharding.get_abstract_mesh()
    if is_explicit and (context.empty or mesh.axis_names != mesh.explicit_axes):
        return state  # JAX makes no such array without the context.
    for n, names in step.there(placed).items():
        sharding = NamedSharding(mesh, placements.spec_of(names))
        put: Callable[..., jax.Array] = (
            jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
        )
        leaves[n - start] = put(leaves[n - start], sharding)
    return jax.tree.unflatten(treedef, leaves)


@dataclasses.dataclass(frozen=True)
class CutStep:
    """An update that is traced.

    Attributes:
      leaves: the leaves of its arguments.
      given: the indices of those that are arrays; others are constants.
      closed: the update, as a function of these arrays.
      structure: that of the results.
      replaces: for each result the index of the leaf that it replaces, or -1.
      num_updates: how many of the first leaves are updates.
      paths: those of the leaves, behind the number of their argument.
    """

    leaves: Sequence[Any]
    given: Sequence[int]
    closed: ClosedJaxpr
    update: cores.TracedUpdate
    structure: Any
    replaces: Sequence[int]
    num_updates: int
    paths: Sequence[Path]

    @classmethod
    def of(cls, inner: optax.GradientTransformationExtraArgs, args: Args) -> CutStep:
        """Traces ``inner``, as if no array was cut."""
        leaves, treedef = jax.tree.flatten(args)
        paths = [path[1:] for path, _ in jax.tree.leaves_with_path(args)]
        given = [n for n, x in enumerate(leaves) if placements.is_array(x)]

        def call(arrays: Sequence[jax.Array]) -> Any:
            filled = [*leaves]
            for n, x in zip(given, arrays, strict=True):
                filled[n] = x
            updates, params, state, extra = jax.tree.unflatten(treedef, filled)
            return inner.update(updates, state, params, **extra)

        types = [_uncut(leaves[n]) for n in given]
        trace = jax.make_jaxpr(call, return_shape=True)
        with _inside():
            closed, results = unplaced.traced(trace, types)
        with unplaced.tracing():
            update = cores.TracedUpdate(closed)
            if update.of_matrices:
                closed = division.divided(update.closed, cores.FEW, update.owners)
                if closed is not update.closed:
                    update = cores.TracedUpdate(closed)
        structure: Any = jax.tree.structure(results)
        updates, params, state, _ = args
        start, end = (len(jax.tree.leaves(x)) for x in (updates, (updates, params)))
        replaces = [*range(start), *range(end, end + len(jax.tree.leaves(state)))]
        if structure != jax.tree.structure((updates, state)):
            replaces = [-1] * structure.num_leaves
        closed = update.closed
        return cls(leaves, given, closed, update, structure, replaces, start, paths)

    def on(self, placed: Placements) -> tuple[optax.Updates, optax.OptState]:
        """The results of the step on a mesh."""
        self._check_types(placed)
        if placed.mesh is None:
            raise ValueError(_UNKNOWN)
        arrays = [*self.closed.consts, *(self.leaves[n] for n in self.given)]
        layout = Layout.of(self.update, self._arguments(placed), _sizes(placed.mesh))
        run = functools.partial(self.run, groups=layout.groups())
        if placed.types:
            meshes.check_reduced("updates", self.leaves, ())
            results = self._typed(arrays, run, layout.names, placed.types)
        else:
            results = run(arrays, mesh=placed.mesh)
        return jax.tree.unflatten(self.structure, results)

    def _check_types(self, placed: Placements) -> None:
        """Raises ``ValueError`` if updates have no type on an explicit mesh."""
        updates = self.leaves[: self.num_updates]
        for n, x in enumerate(updates if placed.types else ()):
            if isinstance(x, jax.core.Tracer) and jax.typeof(x).sharding.mesh.empty:
                raise ValueError(_UNTYPED.format(structures.path_name(self.paths[n])))

    def there(self, placed: Placements) -> dict[int, Names]:
        """How the mesh should cut leaves of the state that lie where matrices are."""
        assert placed.mesh is not None
        if not self.update.of_matrices:
            return {}
        arguments = self._arguments(placed._replace(known=()))
        try:
            layout = Layout.of(self.update, arguments, _sizes(placed.mesh))
        except cores.NoCoreError:  # An update raises it.
            return {}
        pairs = zip(self.given, self.closed.jaxpr.invars, strict=True)
        return {n: layout.names[x] for n, x in pairs if x in layout.there}

    def _arguments(self, placed: Placements) -> Arguments:
        """The variables of arguments, and where they lie."""
        outvars = self.closed.jaxpr.outvars
        variables = dict(zip(self.given, self.closed.jaxpr.invars, strict=True))

        def named(names: Mapping[int, Names]) -> dict[Var, Names]:
            return {x: names[n] for n, x in variables.items() if n in names}

        pairs = [
            (y, n)
            for y, n in zip(outvars, self.replaces, strict=True)
            if jaxprs.is_variable(y) and n in variables
        ]
        return Arguments(
            named(placed.names),
            lambda: named(placed.likely()),
            {x for n, x in variables.items() if n in placed.known},
            {variables[n]: y for y, n in pairs if n >= self.num_updates},
            tuple(x for n, x in variables.items() if n < self.num_updates),
            {y: variables[n] for y, n in pairs},
        )

    def _typed(
        self,
        arrays: Sequence[jax.Array],
        run: Callable[..., list[jax.Array]],
        names: Mapping[Var, Names],
        types: Mapping[int, NamedSharding],
    ) -> list[jax.Array]:
        """The results on explicit axes, which are automatic inside.

        A result has the type of the argument that it replaces. What depends on no array
        of the mesh stays outside.
        """
        jaxpr, mesh = self.closed.jaxpr, next(iter(types.values())).mesh
        env = self._env(arrays)
        explicit, eqns = mesh.explicit_axes, self.update.equations
        typed = jaxprs.descendants(
            eqns,
            (x for x, y in env.items() if jax.typeof(y).sharding.mesh.explicit_axes),
        )
        outside = [eqn for eqn in eqns if typed.isdisjoint(eqn.outvars)]
        jaxprs.advance(jaxprs.needed(outside, jaxpr.outvars), env)
        shardings: dict[int, NamedSharding] = {}
        for k, x in jaxprs.among(jaxpr.outvars, typed).items():
            replaced = self.replaces[k]
            cuts = [[n for n in each if n in explicit] for each in names.get(x, ())]
            shardings[k] = NamedSharding(mesh, placements.spec_of(cuts))
            if replaced in types and self.leaves[replaced].shape == shape_of(x):
                shardings[k] = types[replaced]

        def inside(*arrays: jax.Array) -> list[jax.Array]:
            results = run(arrays, mesh=jax.sharding.get_abstract_mesh())
            return [results[k] for k in shardings]

        # Without `jit` it would take only arrays that all lie on the mesh.
        places, axes = [*shardings.values()], explicit
        inside = jax.jit(jax.sharding.auto_axes(inside, axes=axes, out_sharding=places))
        with jax.disable_jit(False):
            found = dict(zip(shardings, inside(*arrays), strict=True))
        outvars = enumerate(jaxpr.outvars)
        return [
            found[k] if k in found else jaxprs.read(env, [x])[0] for k, x in outvars
        ]

    def _env(self, arrays: Sequence[jax.Array]) -> dict[Var, Any]:
        """The values of the program's constants and arguments."""
        jaxpr = self.closed.jaxpr
        return dict(zip([*jaxpr.constvars, *jaxpr.invars], arrays, strict=True))

    def run(
        self, arrays: Sequence[jax.Array], groups: Sequence[Group], mesh: AnyMesh
    ) -> list[jax.Array]:
        """The results, with groups one after another."""
        jaxpr, env = self.closed.jaxpr, self._env(arrays)
        of_groups = [core for group in groups for core in group.cores]
        inside = set[int]().union(*(core.indices for core in of_groups))
        levels = {id(eqn): self.update.levels[n] for n, eqn in self._numbered(inside)}
        outside = jaxprs.needed(
            [eqn for _, eqn in self._numbered(inside)],
            [*jaxpr.outvars, *(x for core in of_groups for x in core.reads)],
        )
        last: list[jax.Array] = []
        for level in sorted({*levels.values(), *(core.level for core in of_groups)}):
            ready = [eqn for eqn in outside if levels[id(eqn)] == level]
            jaxprs.advance(ready, env)
            for group in groups:
                if group.cores[0].level == level:
                    last = _run_group(group, env, last, mesh)
        return jaxprs.read(env, jaxpr.outvars)

    def _numbered(self, inside: Collection[int]) -> list[tuple[int, JaxprEqn]]:
        """The equations that are in no core."""
        return [(n, e) for n, e in enumerate(self.update.equations) if n not in inside]


def _run_group(
    group: Group, env: dict[Var, Any], last: list[jax.Array], mesh: AnyMesh
) -> list[jax.Array]:
    """Adds the results of some cores to the values; they wait for the last ones."""
    first = group.layouts[0].reads
    arrays = [
        [env[x] for x, kind in zip(core.reads, first, strict=True) if kind is not None]
        for core in group.cores
    ]
    pairs = zip(group.cores[0].reads, first, strict=True)
    same = [env[x] for x, kind in pairs if kind is None]
    arrays, _ = compilers.barrier((arrays, last))
    layouts = tuple(group.layouts)
    f = exchange.on_whole(group.matrices.results, layouts, group.names, mesh)
    results = f(arrays, same, [_flag(group, x, env) for x in group.conditions])
    for core, made in zip(group.cores, results, strict=True):
        env.update(zip(core.makes, made, strict=True))
    return [x for made in results for x in made]


def _flag(group: Group, condition: due.Condition, env: Mapping[Var, Any]) -> jax.Array:
    """Whether a condition holds: one for all cores, or one for each of them."""
    used = {k for path in condition for k, _ in path}
    numbers = [{k: core.reads[k] for k in used} for core in group.cores]
    if all(of == numbers[0] for of in numbers):
        numbers = numbers[:1]
    found = [due.holds(condition, {k: env[x] for k, x in of.items()}) for of in numbers]
    return found[0] if len(found) == 1 else jnp.stack(found)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def _sizes(mesh: AnyMesh) -> dict[str, int]:
    """The mesh axes of several devices."""
    return {name: n for name, n in mesh.shape.items() if n > 1}


def _uncut(x: Any) -> jax.ShapeDtypeStruct:
    t = jax.typeof(x)
    return jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type)


def _manual_axes() -> list[str]:
    """The mesh axes of several devices of a ``shard_map`` around."""
    mesh = jax.sharding.get_abstract_mesh()
    return [name for name in mesh.manual_axes if mesh.shape[name] > 1]


def _check_whole(
    inner: optax.GradientTransformationExtraArgs, args: Args, names: Sequence[str]
) -> None:
    """Raises ``ValueError`` if ``inner`` may multiply parts that a device has."""
    mesh, (updates, params, state, extra) = jax.sharding.get_abstract_mesh(), args
    others = set(mesh.axis_names).difference(mesh.manual_axes)
    is_part = any(mesh.shape[name] > 1 for name in others) or any(
        isinstance(x, jax.Array) and not meshes.is_equal(x, names)
        for x in jax.tree.leaves(args)
    )
    if is_part:
        program = jax.make_jaxpr(lambda: inner.update(updates, state, params, **extra))
        if cores.has_matrices(program().jaxpr):
            raise ValueError(
                "whole_matrices is inside of jax.shard_map, where a device sees only "
                f"its part over {', '.join(names)}: call update outside of shard_map."
            )
