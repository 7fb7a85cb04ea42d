"""Types of arrays on mesh axes: what is not summed yet, and what differs by device."""

import contextlib
from types import SimpleNamespace

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._gates import conditional
from gradxform._jax import compilers, versions
from tests import in_numpy

MESH = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2)
NONE = frozenset()
unreduced = pytest.mark.skipif(
    not hasattr(P(), "to_ct_spec"), reason="JAX has unreduced arrays since 0.10"
)


def spec_of(f, spec):
    """The spec of ``f(x)`` for an ``x`` with a spec, and whether it is ``x``."""
    x = jax.ShapeDtypeStruct((4, 4), "f4", sharding=NamedSharding(MESH, spec))
    found = []

    def run(x):
        result = f(x)
        spec = jax.typeof(result).sharding.spec
        found[:] = spec.partitions, spec.unreduced or NONE, spec.reduced or NONE
        found.append(result is x)
        return result

    jax.eval_shape(run, x)
    return found


@unreduced
def test_an_array_that_is_not_summed_yet_over_some_axes():
    later = P("x", None, unreduced={"y"})
    for spec, axes, wanted in (
        (P("x", None), ["x", "y"], ({"y"}, False)),  # One that cuts it is left out.
        (P(None, None), ["y"], ({"y"}, False)),
        (P("x", None), ["x"], (NONE, True)),
        (P("x", None), ["other"], (NONE, True)),
        (P("x", None), [], (NONE, True)),
        (P(("x", "y"), None), ["y"], (NONE, True)),
        (later, ["y"], ({"y"}, True)),
    ):
        partitions, found, _, same = spec_of(
            lambda x, axes=axes: versions.to_unreduced(x, axes), spec
        )
        assert (partitions, found, same) == (spec.partitions, *wanted)
    assert spec_of(versions.to_reduced, later) == [("x", None), NONE, NONE, False]
    assert spec_of(versions.to_reduced, P("x", None))[-1]


@unreduced
def test_a_factor_of_an_array_that_is_not_summed_yet():
    for spec, axes in ((P("x", None, unreduced={"y"}), {"y"}), (P("x", None), NONE)):
        factor = lambda x: versions.as_factor(jnp.float32(2), x)  # noqa: E731
        assert spec_of(factor, spec)[2] == axes


@unreduced
@pytest.mark.every
@pytest.mark.parametrize("spec", [P("x"), P("x", unreduced={"y"})])
def test_zeros_of_an_array_that_is_not_summed_yet(spec):
    x = jax.ShapeDtypeStruct((4,), "f4", sharding=NamedSharding(MESH, spec))
    program = in_numpy.Program(jax.make_jaxpr(compilers.zeros_unless)(True, x))
    for pred, wanted in ((True, [1, 2, 3, 4]), (False, [0] * 4)):
        (found,) = program(np.bool(pred), np.float32([1, 2, 3, 4]))
        assert found.tolist() == wanted


def test_a_result_of_a_conditional_gets_the_type_of_what_was_there():
    kinds = [("f4", P("x")), ("f4", P("y")), ("bfloat16", P("x")), ("f4", P(None))]
    arrays = [
        jax.ShapeDtypeStruct((4,), dtype, sharding=NamedSharding(MESH, spec))
        for dtype, spec in kinds
    ]

    def run(old, *new):
        assert conditional._as_type(old, jax.typeof(old)) is old
        for x in new:
            alike = conditional._as_type(x, jax.typeof(old))
            assert jax.typeof(alike) == jax.typeof(old)
        return old

    jax.eval_shape(run, *arrays)


def test_an_array_that_differs_by_device():
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2)

    def run(whole, part):
        assert versions.to_varying(whole, []) is whole
        assert versions.varying_as(part, jax.typeof(part)) is part
        assert versions.varying_as(part, jax.typeof(whole)) is part
        assert versions.varying_axes(jax.typeof(whole)) == NONE
        alike = versions.varying_as(whole, jax.typeof(part))
        assert versions.varying_axes(jax.typeof(alike)) == {"x"}
        same = conditional._as_type(whole, jax.typeof(part))
        assert jax.typeof(same) == jax.typeof(alike)
        both = versions.to_varying(alike, ["y"])
        assert versions.varying_axes(jax.typeof(both)) == {"x", "y"}
        return both[None, None]

    specs = {"in_specs": (P(), P("x")), "out_specs": P("x", "y")}
    mapped = jax.shard_map(run, mesh=mesh, **specs)
    jax.eval_shape(mapped, jnp.ones(()), jnp.ones(2))


def test_what_other_versions_of_jax_call_in_another_way(monkeypatch):
    """Only one of two ways is that of this JAX."""
    scan = SimpleNamespace(params={"num_consts": 1, "num_carry": 2})
    assert versions.scan_lengths(scan) == (1, 2)
    parts = [1, 2], [3], [4, 5, 6]
    scan = SimpleNamespace(params={"ft_in": SimpleNamespace(unpack=lambda: parts)})
    assert versions.scan_lengths(scan) == (2, 1)
    assert versions.varying_axes(SimpleNamespace(vma={"x"})) == {"x"}
    newer = SimpleNamespace(manual_axis_type=SimpleNamespace(varying={"y"}))
    assert versions.varying_axes(newer) == {"y"}
    name, places = "get_opaque_trace_state", (vars(jax.core), vars(jax.extend.core))
    (state,) = {place[name] for place in places if name in place}
    for here, there in (places, places[::-1]):
        monkeypatch.setitem(here, name, state)
        monkeypatch.delitem(there, name, raising=False)
        assert versions.is_outside()
    called = lambda *args: args  # noqa: E731
    monkeypatch.delattr(jax.lax, "pcast", raising=False)
    monkeypatch.setattr(jax.lax, "pvary", called, raising=False)
    assert versions.to_varying(7, ["x"]) == (7, ("x",))
    for version, has_them in (((0, 10, 1), 0), ((0, 10, 2), 1), ((0, 11, 0), 1)):
        monkeypatch.setattr(jax, "__version_info__", version)
        words = r"^on_host needs JAX 0\.10\.2 or later"
        refused = pytest.raises(NotImplementedError, match=words)
        with contextlib.nullcontext() if has_them else refused:
            versions.check_memory_kinds("on_host")


def test_the_mesh_axes_of_an_operation():
    for params in ({"axes": ["x", "y"]}, {"axis_name": ("x", ("y",))}):
        assert versions.mesh_axes(SimpleNamespace(params=params)) == ("x", "y")
    assert versions.mesh_axes(SimpleNamespace(params={"axis_name": "x"})) == ("x",)
