"""Where the leaves of a step lie: types say it, arrays that are there, or the user."""

import jax
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P

from gradxform._matrices import placements

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WHOLE, X, Y, BOTH = P(), P("x"), P(None, "y"), P(("x", "y"))
# The mesh axes of a matrix, by its spec.
NAMES = {WHOLE: ((), ()), X: (("x",), ()), Y: ((), ("y",)), BOTH: (("x", "y"), ())}
TRACED = jax.ShapeDtypeStruct((4, 4), np.float32)
HOST = np.ones((4, 4), np.float32)


NO_MESH = AbstractMesh((), ())


def on(spec, kinds=(AUTO, AUTO), sizes=(2, 2)):
    return NamedSharding(AbstractMesh(sizes, ("x", "y"), kinds), spec)


def typed(spec, kinds=(EXPLICIT, EXPLICIT), sizes=(2, 2)):
    return TRACED.update(sharding=on(spec, kinds, sizes))


# These are called when a test runs.
def mesh_of(sizes):
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(sizes, ("x", "y"), (AUTO, AUTO), devices=devices)


def there(spec, sizes=(2, 2)):
    return lambda: jax.device_put(HOST, NamedSharding(mesh_of(sizes), spec))


def alone():
    return jax.device_put(HOST)


def given(spec):
    return lambda: NamedSharding(mesh_of((2, 2)), spec)


def one_device():
    return SingleDeviceSharding(jax.devices()[0])


def made(tree):
    return jax.tree.map(lambda x: x() if callable(x) else x, tree)


def found(args, shardings=None, context=NO_MESH):
    """Of leaves that are types alone the step is traced. A state is as parameters."""
    args = (*args, *(None, (), {})[len(args) - 1 :])
    leaves, treedef = jax.tree.flatten(made(args))
    types = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    result = []

    def step(*traced):
        given = iter(traced)
        arrays = [
            next(given) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves
        ]
        args = jax.tree.unflatten(treedef, arrays)
        placed = placements.found(lambda params: params, args, made(shardings))
        result.append((placed, dict(placed.likely())))

    with jax.sharding.use_abstract_mesh(context):
        jax.eval_shape(step, *types)
    return result[0]


# Updates, parameters, state, extra arguments; the shardings that the user gives. Then
# the sizes of the mesh; what cuts leaves; what likely does; the leaves whose types say
# it; those for which it is known; whether all leaves lie on one device.
CASES = {
    "traced": (([TRACED],), None, (None, {}, {}, [], [], False)),
    "of NumPy": (([HOST, HOST],), None, (None, {}, {}, [], [], True)),
    "on one device": (([alone],), None, (None, {}, {}, [], [], True)),
    "constants": (([3.0, 2, there(X)],), None, ((2, 2), {2: X}, {}, [], [2], False)),
    "no numbers": (
        ([np.zeros((4, 4), jax.dtypes.float0), there(X)],),
        None,
        ((2, 2), {1: X}, {}, [], [1], False),
    ),
    "arrays": (
        ([there(X), HOST, alone, there(Y)], [there(BOTH)], there(WHOLE)),
        None,
        ((2, 2), {0: X, 3: Y, 4: BOTH, 5: WHOLE}, {}, [], [0, 1, 2, 3, 4, 5], False),
    ),
    "a mesh of one": (
        ([there(X, (1, 1)), there(Y, (1, 1))],),
        None,
        ((1, 1), {0: WHOLE, 1: WHOLE}, {}, [], [0, 1], True),
    ),
    "a mesh of two": (
        ([there(X, (2, 1))],),
        None,
        ((2, 1), {0: X}, {}, [], [0], False),
    ),
    "an axis of one device": (
        ([there(BOTH, (2, 1)), there(Y, (2, 1))],),
        None,
        ((2, 1), {0: X, 1: WHOLE}, {}, [], [0, 1], False),
    ),
    # An array on another mesh has to travel.
    "two meshes": (
        ([there(X), there(X, (4, 1)), there(Y)],),
        None,
        ((2, 2), {0: X, 2: Y}, {}, [], [0, 1, 2], False),
    ),
    "types": (
        ([typed(X)], [typed(Y)], typed(BOTH), {"value": HOST}),
        None,
        ((2, 2), {0: X, 1: Y, 2: BOTH}, {}, [0, 1, 2], [0, 1, 2, 3], False),
    ),
    "a type of one device": (
        ([typed(X, sizes=(1, 1))],),
        None,
        ((1, 1), {0: WHOLE}, {}, [0], [0], False),
    ),
    # An automatic axis of several devices may cut it, too.
    "half a type": (
        ([typed(X, (EXPLICIT, AUTO))],),
        None,
        (None, {}, {}, [0], [0], False),
    ),
    "half a type, beside an axis of one device": (
        ([typed(X, (EXPLICIT, AUTO), (2, 1))],),
        None,
        ((2, 1), {0: X}, {}, [0], [0], False),
    ),
    "half a type, and given": (
        ([typed(X, (EXPLICIT, AUTO))],),
        [given(BOTH)],
        ((2, 2), {0: BOTH}, {}, [0], [0], False),
    ),
    # No user has to say where other arguments lie.
    "an extra argument": (
        ([there(X)], None, (), {"value": TRACED}),
        None,
        ((2, 2), {0: X}, {}, [], [0], False),
    ),
    "a traced state": (
        ([there(X)], None, TRACED),
        None,
        ((2, 2), {0: X}, {}, [], [0], False),
    ),
    "traced gradients of some": (
        ([None, TRACED], [TRACED, TRACED]),
        [given(X), given(Y)],
        ((2, 2), {0: Y, 1: X, 2: Y}, {}, [], [], False),
    ),
    "traced parameters": (
        ([there(X)], [TRACED]),
        None,
        (None, {}, {}, [], [0], False),
    ),
    "given": (
        ([TRACED, TRACED], [TRACED, TRACED], [TRACED, there(WHOLE)]),
        [given(X), given(Y)],
        ((2, 2), {0: X, 1: Y, 2: X, 3: Y, 5: WHOLE}, {4: X}, [], [5], False),
    ),
    "given, not known": (
        ([TRACED], None, [TRACED], {"value": TRACED}),
        [given(Y)],
        ((2, 2), {0: Y}, {1: Y}, [], [], False),
    ),
    "given, on one device": (
        ([TRACED], [TRACED], [TRACED]),
        [one_device],
        (None, {}, {}, [], [], True),
    ),
    "given, one of them on one device": (
        ([TRACED, TRACED], None, [TRACED, TRACED]),
        [one_device, given(Y)],
        ((2, 2), {1: Y}, {}, [], [], False),
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("context", [NO_MESH, on(WHOLE).mesh], ids=["none", "mesh"])
@pytest.mark.parametrize("name", CASES)
def test_where_leaves_lie(name, context):
    """A mesh that is set, of automatic axes, does not say it."""
    args, shardings, expected = CASES[name]
    placed, likely = found(args, shardings, context)
    sizes, cuts, as_params, types, known, is_one_device = expected
    assert (placed.mesh and (*placed.mesh.shape.values(),)) == sizes
    assert placed.names == {n: NAMES[spec] for n, spec in cuts.items()}
    assert likely == {n: NAMES[spec] for n, spec in as_params.items()}
    assert [*placed.types] == types
    assert placed.is_one_device == is_one_device
    if sizes:  # Else nobody asks for it.
        assert placed.known == {*known}


def test_a_traced_step_of_one_device(monkeypatch):
    for count in (1, 2):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        placed, _ = found([[TRACED]])
        assert placed.is_one_device == (count == 1)
        placed, _ = found([[TRACED]], context=on(X, sizes=(1, count)).mesh)
        assert placed.is_one_device == (count == 1)


@pytest.mark.every
@pytest.mark.parametrize("params", [None, [TRACED]])
def test_an_error_names_what_shardings_are_of(params):
    name = "updates" if params is None else "params"
    with pytest.raises(TypeError, match=f"shardings has .* {name} has nothing"):
        found(([TRACED], params), [given(X), given(Y)])
