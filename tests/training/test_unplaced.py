"""A program without its mesh: no type, literal, parameter or context in it has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._jax import jaxprs
from gradxform._matrices import unplaced
from tests.in_numpy import Program

pytestmark = pytest.mark.every

X = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
NAMES = {"sharding_constraint", "reshard"}
ON = {
    kind: AbstractMesh((2, 2), ("x", "y"), (kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}


def placed(mesh):
    """It places an array at its end, in a ``jit``, in a branch and in a loop."""

    def place(x):
        there = NamedSharding(mesh, P("x"))
        if mesh.explicit_axes:
            return jax.sharding.reshard(x, there)
        return lax.with_sharding_constraint(x, there)

    @jax.jit
    def half(x):
        return place(x) * 0.5

    def f(x, n):
        x = place(x + jnp.arange(4.0)[None])
        y = lax.cond(n > 0, lambda x: place(x) @ jnp.ones((4, 4)), lambda x: x, x)
        z = jnp.matmul(x, y, out_sharding=there(mesh)) if mesh.explicit_axes else x @ y
        return half(x), lax.fori_loop(0, 3, lambda _, x: half(x), z)

    return f


def there(mesh):
    return NamedSharding(mesh, P("x", None))


def traced(f, mesh):
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(f)(X, 1)


def walked(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs.inside(eqn):
            yield from walked(inner)


def meshes_of(eqn):
    """Those that an equation knows, but for what a placement says."""
    avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    avals += [x.val.aval for x in eqn.invars if hasattr(getattr(x, "val", 0), "aval")]
    yield from (aval.sharding.mesh for aval in avals)
    yield eqn.ctx.cur_abstract_mesh
    if eqn.primitive.name in NAMES:
        return
    for name, x in eqn.params.items():
        if isinstance(x, NamedSharding) or name == "ctx_mesh":
            yield getattr(x, "mesh", x)


@pytest.mark.parametrize("kind", ON)
def test_nothing_in_it_knows_the_mesh(kind, monkeypatch):
    closed = traced(placed(ON[kind]), ON[kind])
    of_mesh = [eqn for eqn in walked(closed.jaxpr) if any(map(bool, meshes_of(eqn)))]
    make_jaxpr, made = jax.make_jaxpr, []

    def counted(f):
        made.append(f)
        return make_jaxpr(f)

    monkeypatch.setattr(jax, "make_jaxpr", counted)
    with jax.sharding.use_abstract_mesh(ON[kind]):
        found = unplaced.without_mesh(closed)
    before, after = [*walked(closed.jaxpr)], [*walked(found.jaxpr)]
    assert len(of_mesh) == len(before)
    assert len(made) == len({id(eqn.ctx) for eqn in before})
    for eqn in after:
        assert all(mesh.empty for mesh in meshes_of(eqn)), eqn
    names = [[eqn.primitive.name for eqn in eqns] for eqns in (before, after)]
    for one, other in zip(*names, strict=True):
        assert other == one or (one in NAMES and other == "copy")
    # Those in no other equation stay, where results do not have the type that is said.
    kept = [eqn for eqn in after if eqn.primitive.name in NAMES]
    assert len(kept) == (kind == AxisType.Auto)
    assert all(eqn in found.jaxpr.eqns for eqn in kept)
    assert [x.aval.sharding.mesh.empty for x in found.jaxpr.outvars] == [True] * 2
    x = X.astype(float) + np.arange(4)
    wanted = [x / 2, x @ (x @ np.ones((4, 4))) / 8]
    for one, other in zip(Program(found)(X, 1), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_program_that_knows_no_mesh_stays_as_it_is(monkeypatch):
    """Else it is made without one: where one is set, and where it places an array."""
    without_mesh, made = unplaced.without_mesh, []

    def counted(closed):
        made.append(closed)
        return without_mesh(closed)

    monkeypatch.setattr(unplaced, "without_mesh", counted)

    def plain(x, n):
        return x * n

    no_mesh = AbstractMesh((), ())
    for kind, f in ((AxisType.Auto, placed(ON[AxisType.Auto])), (None, plain)):
        closed = traced(f, ON.get(kind, no_mesh))
        for context in (no_mesh, *ON.values()):
            made.clear()
            with jax.sharding.use_abstract_mesh(context):
                found, results = unplaced.traced(lambda _, x=closed: (x, "results"), [])
            assert results == "results"
            assert (made == []) == (f is plain and context.empty)
            assert all(eqn.ctx.cur_abstract_mesh.empty for eqn in found.eqns)


def test_a_trace_knows_no_mesh_and_unrolls_no_loop():
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, x: 2 * x, x)

    def names(closed):
        return [eqn.primitive.name for eqn in closed.eqns]

    with jax.sharding.use_abstract_mesh(ON[AxisType.Auto]), jax.disable_jit():
        with unplaced.tracing():
            assert jax.sharding.get_abstract_mesh().empty
            assert names(jax.make_jaxpr(loop)(X)) == ["scan"]
        trace = jax.make_jaxpr(loop, return_shape=True)
        closed, _ = unplaced.traced(lambda types: trace(*types), [X])
        assert names(closed) == ["scan"]
        assert names(jax.make_jaxpr(loop)(X)) == ["mul"] * 3


def test_types_and_placements_are_left_out():
    explicit = ON[AxisType.Explicit]
    typed = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=there(explicit))
    with jax.sharding.use_abstract_mesh(explicit):
        closed = jax.make_jaxpr(lambda x, n: x)(typed, 1.0)
    x, n = unplaced.bare_types(closed.jaxpr.invars)
    assert (x.shape, x.dtype, x.sharding, x.weak_type) == ((4, 4), "float32", None, 0)
    assert (n.shape, n.dtype, n.sharding, n.weak_type) == ((), "float32", None, 1)
    for name in NAMES:
        assert unplaced.left_out(name, [X], None) == [X]
    assert unplaced.left_out("add", [X, X], None) is None
