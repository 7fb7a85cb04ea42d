"""Sums over mesh axes, of traced programs that run in NumPy on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._devices import mesh
from tests.in_numpy import Program

AXES = {"data": 2, "model": 2, "stage": 2}
DEVICES = jax.make_mesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * 3)
# A spec, and how many of its axes stack layers.
LEAVES = {
    "w": (P("data", None, "model"), 1),
    "v": (P(None, ("model", "stage")), 1),
    "u": (P("model", "data"), 0),
    "t": (P("data", "model"), 1),
    "whole": (P(), 2),
    "s": (P(("data", "stage"), "model"), 2),
}
X = {
    k: np.random.default_rng(n).standard_normal((4, 8, 2)).astype(np.float32)
    for n, k in enumerate(LEAVES)
}
SPECS = {k: spec for k, (spec, _) in LEAVES.items()}
DEPTHS = [depth for _, (_, depth) in sorted(LEAVES.items())]


def run(f, *args, specs, results, **how):
    """In a ``shard_map``."""
    mapped = jax.shard_map(f, mesh=DEVICES, in_specs=specs, out_specs=results, **how)
    closed, types = jax.make_jaxpr(mapped, return_shape=True)(*args)
    program = Program(closed)
    found = jax.tree.unflatten(jax.tree.structure(types), program(*args))
    return found, program.ran


def of_layers(tree):
    """Each layer's sum over the entries that are on this device."""
    return {k: jnp.sum(x, tuple(range(LEAVES[k][1], x.ndim))) for k, x in tree.items()}


def layers_of(f):
    return {k: f(x, tuple(range(LEAVES[k][1], x.ndim))) for k, x in X.items()}


STACKED = {k: P(*spec[:depth]) for k, (spec, depth) in LEAVES.items()}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.every
def test_sums_of_leaves_that_are_cut_as_specs_say(check_vma):
    def f(tree):
        return mesh.sums(of_layers(tree), SPECS, DEPTHS)

    results = STACKED, [P()] * len(X)
    how = {"specs": (SPECS,), "results": results, "check_vma": check_vma}
    (layers, totals), ran = run(f, X, **how)
    wanted = layers_of(np.sum)
    for k in X:
        np.testing.assert_allclose(layers[k], wanted[k], rtol=1e-5, err_msg=k)
    np.testing.assert_allclose(
        totals, [np.sum(wanted[k]) for k in sorted(X)], rtol=1e-5
    )
    # One for each set of axes, or one for each leaf of it.
    assert sum(n for name, n in ran.items() if name.startswith("psum")) in (5, 7)


def test_sums_of_leaves_that_vary_over_axes_by_name():
    """A leaf is summed over those axes alone over which it differs by device."""
    tree = {k: X[k] for k in ("u", "v")}

    def f(tree, names):
        sums = {k: jnp.sum(x) for k, x in tree.items()}
        return mesh.sums(sums, names, [0, 0])[1], mesh.layer_means(sums, names, [0, 0])

    for names in ("data", ["data", "model", "stage"]):
        specs = {k: SPECS[k] for k in tree}
        results = [P()] * 2, P()
        if names == "data":
            specs = {"u": P("data"), "v": P()}
        (totals, means), _ = run(
            lambda tree, names=names: f(tree, names),
            tree,
            specs=(specs,),
            results=results,
        )
        wanted = [np.sum(tree[k]) for k in tree]
        np.testing.assert_allclose(totals, wanted, rtol=1e-5)
        parts = [2, 1] if names == "data" else [4, 4]
        np.testing.assert_allclose(
            [means["u"], means["v"]], np.divide(wanted, parts), rtol=1e-5
        )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.every
def test_a_number_over_all_devices(check_vma):
    """Its mean, whether a bool is true on all of them, and the sum."""
    x = np.arange(8.0, dtype=np.float32)

    specs = {"w": P("data", ("stage", "model")), "v": P("data")}

    def f(x):
        number, both = x[0], {"w": x, "v": x}
        return (
            mesh.mean(number, ("data", "model", "stage"), x),
            mesh.mean(number, specs, both),
            mesh.mean(number, lambda tree: specs if tree is both else None, both),
            mesh.every(number < 7, ["data", "model", "stage"]),
            mesh.every(number < 8, {"stage", "model", "data"}),
            mesh.summed_over({"x": number}, ("data", "model", "stage", "unknown")),
        )

    got, _ = run(
        f, x, specs=(P(("data", "model", "stage")),), results=P(), check_vma=check_vma
    )
    assert [float(jax.tree.leaves(y)[0]) for y in got] == [3.5, 3.5, 3.5, 0, 1, 28]


def test_what_types_say_of_devices():
    """A part of an array differs by device, and a copy does not."""
    found = {}

    def f(x, w):
        both = {"x": x, "w": w}
        assert mesh.mean(w, "data", w) is w
        assert mesh.every(w, ["data"]) is w
        assert mesh.summed_over(w, ("unknown",)) is w
        for names in (("data",), ("model",), ("data", "model"), ()):
            found[names] = mesh.is_equal(x, names), mesh.is_equal(w, names)
        own = mesh.as_own(w, ("data", "unknown"))
        found["own"] = (*(mesh.is_equal(own, [n]) for n in ("data", "model")),)
        assert mesh.as_own(x, ("data",)) is x
        mesh.check_whole("params", both, ("model", "stage"))
        with pytest.raises(ValueError, match="must be equal") as error:
            mesh.check_whole("params", both, ("model", "data"))
        found["tree"] = str(error.value)
        with pytest.raises(ValueError, match="must be equal") as error:
            mesh.check_whole("loss", x, ("data",))
        found["leaf"] = str(error.value)
        mesh.check_axes(("data", "model"), both)
        with pytest.raises(
            ValueError, match=r"^axis_name=.'data', 'd'.: 'd' is neither"
        ):
            mesh.check_axes(("data", "d"), both)
        return own

    run(f, np.ones(4), np.ones(4), specs=(P("data"), P()), results=P("data"))
    assert [found[k] for k in (("data",), ("model",), ("data", "model"), ())] == [
        *((False, True), (True, True), (False, True), (True, True))
    ]
    assert found["own"] == (False, True)
    equal = "must be equal on all devices of these axes, got one that varies over data"
    assert found["tree"] == f"axis_name=('model', 'data'): params {equal} at ['x']."
    assert found["leaf"] == f"axis_name=('data',): loss {equal}."


def test_nothing_is_equal_where_types_do_not_say_it():
    def f(x):
        assert not mesh.is_equal(x, ["data"])
        assert mesh.as_own(x, ("data",)) is x
        with pytest.raises(ValueError, match="axis 'data' does not track which arrays"):
            mesh.sums({"w": jnp.sum(x)}, "data", [0])
        return x

    run(f, np.ones(4), specs=(P(),), results=P(), check_vma=False)


def test_axes_of_a_mesh_are_explicit_or_around():
    explicit = jax.make_mesh((2,), ("e",), (AxisType.Explicit,))
    x = jax.device_put(jnp.ones(4), NamedSharding(explicit, P("e")))
    mesh.check_axes(("e",), {"x": x, "y": jnp.ones(2)})
    for tree in {"y": jnp.ones(2)}, {}:
        with pytest.raises(ValueError, match="'e' is neither an axis of a shard_map"):
            mesh.check_axes(("e",), tree)


def test_axes_by_name():
    assert mesh.names_of(None) == ()
    assert mesh.names_of("ab") == ("ab",)
    assert (
        mesh.names_of(["data", "model"])
        == mesh.names_of(("data", "model"))
        == ("data", "model")
    )
    assert mesh.axes_of([None, "data", ("stage", "model")]) == (
        "data",
        "stage",
        "model",
    )
    for given in (P("data"), {"w": P()}, ["data", 1], 3):
        with pytest.raises(TypeError, match=r"^axis_name must be a mesh axis, or sev"):
            mesh.names_of(given)


@pytest.mark.parametrize(
    ("axis_name", "depth", "error", "message"),
    [
        (
            "data",
            1,
            ValueError,
            r"axis_name=\('data',\): \['w'\] stacks layers, and over data ",
        ),
        ({"w": 1}, 0, TypeError, r"prefix tree of PartitionSpec, got 1 for \['w'\]\.$"),
        (
            {"w": P("data", "model")},
            1,
            ValueError,
            r"says .*'model'\) at \['w'\], which does not vary over 'model'",
        ),
    ],
)
@pytest.mark.every
def test_axes_that_say_nothing(axis_name, depth, error, message):
    def f(x):
        with pytest.raises(error, match=message):
            mesh.sums({"w": x}, axis_name, [depth])
        return x

    run(f, np.ones((4, 4)), specs=(P("data"),), results=P("data"))


def test_specs_are_a_prefix_of_the_tree():
    tree = {"w": [np.ones(4), np.ones(8)], "v": np.ones(2)}
    specs = {"w": P("data"), "v": P()}

    def f(tree):
        sums = jax.tree.map(jnp.sum, tree)
        return mesh.sums(sums, specs, [0, 0, 0])[1], mesh.mean(sums["v"], specs, tree)

    (sums, mean), _ = run(f, tree, specs=(specs,), results=([P()] * 3, P()))
    assert ([float(x) for x in sums], mean) == ([2, 4, 8], 2)  # "v" is the first.


def test_the_order_of_the_axes_is_that_of_their_names():
    """Each process has to run the same program."""

    def f(x):
        return mesh.every(x[0] > 0, ["stage", "data", "model"])

    mapped = jax.shard_map(
        f, mesh=DEVICES, in_specs=P(("stage", "model", "data")), out_specs=P()
    )
    program = str(jax.make_jaxpr(mapped)(np.ones(8)))
    assert "pmin[axes=('data', 'model', 'stage')" in program
