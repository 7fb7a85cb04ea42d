"""Updates of matrices on a mesh of no devices: each device's program runs in NumPy.

The expected numbers are those of the update itself, as NumPy computes it whole.
"""

import collections
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.conftest import half
from tests.in_numpy import Program, is_key, named
from tests.training.matrix_optimizers import (
    ALL,
    at_once,
    fitted_at_once,
    optimizer,
    spd,
)
from tests.training.test_matrix_programs import LOOPS, NUMBERS, each, normed

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.every]

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
REAL = 4  # Bytes of a float32.
PLACES = "sharding_constraint", "reshard"


def drawn(shapes, seed):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


class Trial:
    """An update on a mesh, and its expected results.

    Attributes:
      program: the update of all devices.
      expected: that of one device.

    On explicit axes its state lies where matrices are, or as parameters do.
    """

    def __init__(self, inner, shapes, cuts, sizes, axis_type, is_there=True):
        names = ("x", "y", "z")[: len(sizes)]
        on = AbstractMesh(sizes, names, (axis_type,) * len(sizes))
        where = {k: NamedSharding(on, cut) for k, cut in cuts.items()}
        plain = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}
        like, said = plain, where
        if axis_type == EXPLICIT:
            like, said = {k: x.update(sharding=where[k]) for k, x in plain.items()}, ()
        tx, self._shapes = gx.whole_matrices(inner, said or None), shapes
        state = jax.eval_shape(inner.init, plain)
        self.expected = Program(jax.make_jaxpr(inner.update)(plain, state, plain))
        with jax.sharding.use_abstract_mesh(on):
            if axis_type == EXPLICIT:
                state = gx.abstract_state(tx if is_there else inner, like)
            self.program = Program(jax.make_jaxpr(tx.update)(like, state, like))
        if axis_type == EXPLICIT:
            results = self.program.closed.out_avals
            for x, y in zip(results, jax.tree.leaves((like, state)), strict=True):
                specs = (*y.sharding.spec, *[None] * x.ndim)[: x.ndim]
                assert x.sharding.spec == P(*specs)
        self._init = Program(jax.make_jaxpr(inner.init)(plain))

    def run(self, steps=1):
        """What devices send at each step, if its numbers are those of one device."""
        params, sent = drawn(self._shapes, steps), []
        state = self._init(params)
        for n in range(steps):
            args = drawn(self._shapes, n), state, params
            self.program.sent.clear()
            found, wanted = self.program(*args), self.expected(*args)
            for x, y in zip(found, wanted, strict=True):
                if is_key(y):
                    assert (x == y).all()
                    continue
                largest = np.abs(y).max(initial=1e-3)
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * largest)
            state = wanted[len(params) :]
            sent.append([*self.program.sent])
        return sent


MODELS = {
    "leaves": (dict.fromkeys("abc", (16, 8)) | {"d": (8, 8)}, P("x", "y"), AUTO),
    "stacks": ({"a": (4, 8, 4), "b": (4, 8, 4), "c": (16, 8)}, P(None, "x"), EXPLICIT),
}
# (bytes that a device sends, number of devices that take part)
#
# - Of leaves each of 4 devices has one matrix, and d is alone: it is padded to 4.
# - Of 8 matrices in stacks each device has 2. Devices along y have copies of their
#   parts, so each sends half of them there, and gives each copy its part back. For c
#   alone devices along x are enough.
ONCE = {
    "leaves": [(512, 4), (512, 4), (256, 4), (256, 4)],
    "stacks": [(256, 2), (512, 4), (512, 2), (512, 2)],
}
# All devices get the sum of squares of each matrix, before what needs their total. That
# of a stack is no number of a matrix, so there they get the stack.
NUMBER = {
    "leaves": [(512, 4), (512 + 16, 4), (256, 4), (256 + 16, 4)],
    "stacks": [(256, 2), (512, 4), (512, 2), (512 + 8, 2)],
}
# The stacks are still there.
LATER = {"leaves": ONCE["leaves"], "stacks": ONCE["stacks"][1:]}
# In a branch it is computed alone, and then again: c is the first matrix that needs it.
ALONE = {
    "leaves": [(512, 4), (16, 4), (256, 4), (16, 4)],
    "stacks": [(512, 2), (8, 2), (512, 2), (8, 2)],
}


@pytest.mark.parametrize(("name", "model"), half(LOOPS, MODELS))
def test_a_program_of_all_leaves_is_divided(name, model):
    assert sent(LOOPS[name], model) == ONCE[model]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_all_parameters_between_two_rounds(name, model):
    first = ALONE if name == "in a branch" else NUMBER
    then = ONCE if name == "in a branch" else LATER
    assert sent(NUMBERS[name], model) == first[model] + then[model]


def sent(f, model):
    shapes, cut, axis_type = MODELS[model]
    inner = optax.stateless(lambda u, _: f(each(normed, u)))
    trial = Trial(inner, shapes, dict.fromkeys(shapes, cut), (2, 2), axis_type)
    return trial.run()[0]


def sketched(x):
    """Its random numbers are as many as a device does not read as a whole."""
    thin = jax.random.normal(jax.random.key(1), (x.shape[1], 8))
    return x @ (thin @ thin.T) @ x.T @ x


def test_groups_wait_for_each_other_and_make_their_random_numbers():
    """Arrays of one group at a time are there; a group makes once what all read."""
    shapes, cut, axis_type = MODELS["leaves"]
    inner = optax.stateless(lambda u, _: each(sketched, u))
    trial = Trial(inner, shapes, dict.fromkeys(shapes, cut), (2, 2), axis_type)
    trial.run()
    first, group, second, other = (
        eqn
        for eqn in trial.program.closed.eqns
        if eqn.primitive.name in ("jit", "pjit", "optimization_barrier")
    )
    assert len(first.invars) == len(group.outvars) == 3
    assert second.invars[1:] == group.outvars
    # An array for all matrices, such as a key, is one operand.
    assert len(group.invars) - 3 == len(other.invars) - 1 > 0
    assert trial.program.ran["random_bits"] == 2


def layout(rng):
    """Shapes of leaves, how they are cut, and the sizes of a mesh."""
    sizes = rng.choice([(4,), (2, 2), (3, 2), (2, 2, 2)])
    names = "xyz"[: len(sizes)]
    kinds = rng.choices([(12, 24), (5, 12, 24), (4, 24, 12), (2, 6, 12, 12)], k=2)
    cuts = []
    for shape in kinds:
        cut = [()] * len(shape)
        for name, size in zip(names, sizes, strict=True):
            axis = rng.randrange(len(shape))
            there = math.prod(sizes[names.index(of)] for of in cut[axis])
            if rng.random() < 0.8 and shape[axis] % (there * size) == 0:
                cut[axis] = (*cut[axis], name)
        cuts.append(P(*cut))
    leaves = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
    shapes = {str(n): kinds[k] for n, k in enumerate(leaves)}
    return shapes, {str(n): cuts[k] for n, k in enumerate(leaves)}, sizes


def least(shapes, cuts, sizes):
    """What devices have to send: equal matrices that are cut alike go together."""
    of_mesh = dict(zip("xyz", sizes, strict=False))
    groups = collections.Counter()
    for name, shape in shapes.items():
        groups[shape[-2:], cuts[name]] += math.prod(shape[:-2])
    found = collections.Counter()
    for (shape, cut), count in groups.items():
        size = math.prod(shape) * REAL
        of_stack, of_matrix = (
            [of_mesh[name] for each in part for name in named(each)]
            for part in (cut[:-2], cut[-2:])
        )
        used = {name for each in cut for name in named(each)}
        free = [n for name, n in of_mesh.items() if name not in used]
        number, cutting = count // math.prod(of_stack), math.prod(of_matrix)
        # As few matrices for each device as possible, and then as few devices.
        each, devices = min(
            (-(-number // (cutting * math.prod(some))), cutting * math.prod(some))
            for k in range(len(free) + 1)
            for some in itertools.combinations(free, k)
        )
        if cutting > 1:
            found[each * size, cutting] += 1
        if devices > 1:
            found[each * size * devices // cutting, devices] += 1
    return found


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_each_matrix_goes_to_one_device_and_back(axis_type):
    rng = random.Random(axis_type == AUTO)
    inner = optax.stateless(lambda u, _: each(product, u))
    for _ in range(10):
        drawn = layout(rng)
        (sent,) = Trial(inner, *drawn, axis_type).run()
        assert collections.Counter(sent) == least(*drawn), drawn


def product(x):
    return jax.vmap(product)(x) if x.ndim > 2 else x @ x.T @ x


OPTIMIZERS = {**ALL, "fitted at once": fitted_at_once, "at once": at_once}
STACK = {"w": (8, 8, 16)}, {"w": P(None, "x", "y")}, (2, 2)


def decides(x):
    def one(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: x, x)

    return jax.lax.map(one, x) if x.ndim > 2 else one(x)


@pytest.mark.parametrize("shapes", [dict.fromkeys("abcdefgh", (8, 16)), STACK[0]])
def test_each_matrix_runs_the_branch_that_it_needs(shapes):
    cuts = {k: P(*[None] * (len(s) - 2), "x", "y") for k, s in shapes.items()}
    inner = optax.stateless(lambda u, _: each(decides, u))
    trial = Trial(inner, shapes, cuts, (2, 2), AUTO)
    trial.run()
    here, of_one = trial.program.ran, trial.expected.ran
    assert here["dot_general"] == of_one["dot_general"] > 0


# A device sends its part of a matrix of each leaf to the device that gets this one, and
# its part of a factor. A factor is cut along one mesh axis. Along the other one devices
# have copies of a part. Each sends a half of its copy, and all of them get the new one.
THERE = {"g": 512, "l": 256, "r": 1024, "q": 256, "v": 32}
BACK = {"g": 512, "l": 512, "r": 2048, "q": 512, "v": 64, "n": 16}
LEAVES = dict.fromkeys("abc", (8, 16)), dict.fromkeys("abc", P("x", "y")), (2, 2)
# What travels there and back at each of three steps.
OF_LEAVES = {
    # Gradient, momenta, bases; update, momentum, what is added to factors. Where bases
    # are due, the new factors, and all but the first time the bases again.
    "soap": [("ggglr lr", "gglr lr"), ("ggglr", "gglr"), ("ggglr lrlr", "gglr lr")],
    # Gradient, then momentum and factors or roots; what is added to factors, update.
    "at once": [("gglr", "glr lr"), ("gglr", "glr"), ("gglr", "glr lr")],
    # Gradient, factors; update. Where they are fitted, factors and a number.
    "fitted at once": [("glr", "g lrn"), ("glr", "g"), ("glr", "g lrn")],
    # Gradient, a thin matrix; update, momentum, the new one.
    "dion": [("gq", "ggq")] * 3,
    # Gradient, a number of each row; update, the new ones, a norm.
    "normuon": [("gv", "gvn")] * 3,
}


@pytest.mark.figures
@pytest.mark.parametrize("name", OF_LEAVES)
def test_what_travels_of_leaves(name):
    axis_type = (AUTO, EXPLICIT)[len(name) % 2]
    trial = Trial(OPTIMIZERS[name](), *LEAVES, axis_type)
    for sent, kinds in zip(trial.run(3), OF_LEAVES[name], strict=True):
        pairs = zip((THERE, BACK), kinds, strict=True)
        sizes = [of[kind] for of, each in pairs for kind in each.replace(" ", "")]
        assert sum(size for size, _ in sent) == sum(sizes), sent


OF_STACK = [name for name in OPTIMIZERS if name not in ("shampoo by Newton", "at once")]


@pytest.mark.figures
@pytest.mark.parametrize(("name", "axis_type"), half(OF_STACK, (AUTO, EXPLICIT)))
def test_the_state_of_a_stack_does_not_travel(name, axis_type):
    """Each of 4 devices sends a fourth of its gradients there, and of updates back."""
    trial = Trial(OPTIMIZERS[name](), *STACK, axis_type)
    assert trial.run(3) == [[(8 * 8 * 16 * REAL // 4, 4)] * 2] * 3


@pytest.mark.figures
def test_the_state_of_experts_does_not_travel():
    """Of 2 layers of 4 experts each of 4 devices has two matrices."""
    shapes, cuts = {"w": (2, 4, 8, 16)}, {"w": P(None, None, "x", "y")}
    trial = Trial(preconditioned(), shapes, cuts, (2, 2), AUTO)
    assert trial.run(2) == [[(8 * 8 * 16 * REAL // 4, 4)] * 2] * 2


def preconditioned():
    """Its state is a momentum and a factor."""

    def update(g, leaf, p, count, key):
        momentum, factor = leaf
        momentum, factor = 0.9 * momentum + g, factor + g @ g.T
        return factor @ momentum, (momentum, factor)

    return optimizer(lambda p: (jnp.zeros_like(p), spd(len(p))), update)


ON_AUTO, ON_EXPLICIT, ON_EACH = (
    AbstractMesh((2, 2), ("x", "y"), kinds)
    for kinds in ((AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO))
)
NO_MESH = AbstractMesh((), ())
# Where parameters lie, which mesh is set, whether the user says where they lie; what
# places the state.
INITS = {
    "automatic": (ON_AUTO, ON_AUTO, True, "sharding_constraint"),
    "automatic, not set": (ON_AUTO, NO_MESH, True, "sharding_constraint"),
    "automatic, not said": (ON_AUTO, ON_AUTO, False, None),
    "elsewhere": (NO_MESH, NO_MESH, True, None),
    "explicit": (ON_EXPLICIT, ON_EXPLICIT, False, "reshard"),
    "explicit, not set": (ON_EXPLICIT, NO_MESH, False, None),
    "an axis of each kind": (ON_EACH, ON_EACH, True, None),
}


@pytest.mark.parametrize("name", INITS)
def test_init_places_what_lies_where_its_matrices_are(name):
    """It has the same numbers, in the same order."""
    mesh, context, is_said, place = INITS[name]
    x = jax.ShapeDtypeStruct((8, 6, 4), np.float32)
    there = NamedSharding(ON_AUTO if mesh.empty else mesh, P(None, "x", "y"))
    where = {"w": there, "b": NamedSharding(there.mesh, P())}
    params = {"w": x, "b": jax.ShapeDtypeStruct((5,), np.float32)}
    params = {
        k: p if mesh.empty else p.update(sharding=where[k]) for k, p in params.items()
    }
    inner = preconditioned()
    tx = gx.whole_matrices(inner, where if is_said else None)
    with jax.sharding.use_abstract_mesh(context):
        program = Program(jax.make_jaxpr(tx.init)(params))
    found = [eqn for eqn in program.closed.eqns if eqn.primitive.name in PLACES]
    expected = [place] * 2 if place else []
    assert [eqn.primitive.name for eqn in found] == expected
    for eqn, shape in zip(found, [(8, 6, 4), (8, 6, 6)], strict=bool(place)):
        aval = eqn.outvars[0].aval
        there = eqn.params.get("sharding") or aval.sharding
        assert (aval.shape, there.spec) == (shape, P(("x", "y"), None, None))
    numbers = {k: np.ones(p.shape, np.float32) for k, p in params.items()}
    wanted = Program(jax.make_jaxpr(inner.init)(numbers))(numbers)
    for x, y in zip(program(numbers), wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_types_of_results_that_are_no_leaves():
    """They are cut as what they are made of. A number of no mesh stays outside."""

    def update(updates, state, params=None):
        a, b = updates["a"], updates["b"]
        made = {"a": a @ a.T @ a, "c": 2 * b}
        return made, (state + 1, b @ b.T, 3 * a)

    inner = optax.GradientTransformation(lambda _: np.int32(0), update)
    cuts = {"a": P("x", "y"), "b": P("y")}
    like = {
        k: jax.ShapeDtypeStruct(
            (8, 8), np.float32, sharding=NamedSharding(ON_EXPLICIT, cut)
        )
        for k, cut in cuts.items()
    }
    with jax.sharding.use_abstract_mesh(ON_EXPLICIT):
        count = jax.ShapeDtypeStruct((), np.int32)
        closed = jax.make_jaxpr(gx.whole_matrices(inner).update)(like, count)
    program, args = Program(closed), (drawn({"a": (8, 8), "b": (8, 8)}, 0), np.int32(3))
    made = [x.sharding.spec for x in closed.out_avals]
    assert [made[0], made[1], made[4]] == [cuts["a"], P("y", None), cuts["a"]]
    assert all(x.sharding.mesh.empty == (not x.shape) for x in closed.out_avals)
    a, b = (args[0][k].astype(float) for k in "ab")
    wanted = [a @ a.T @ a, 2 * b, 4, b @ b.T, 3 * a]
    for x, y in zip(program(*args), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.figures
def test_rows_in_another_order_are_cut_as_they_were():
    """They are not whole on each device."""

    def turned(x):
        return jnp.concatenate([x[1:], x[:1]])

    def reordered(g, before, p):
        return turned(turned(before * p) @ g.T @ g)

    def update(updates, state, params=None):
        return each(reordered, updates, state, params), updates

    shapes = dict.fromkeys("abcd", (8, 16))
    inner = optax.GradientTransformation(lambda params: params, update)
    trial = Trial(inner, shapes, dict.fromkeys(shapes, P("x")), (4,), AUTO)
    part = 8 * 16 * REAL
    assert trial.run() == [[(2 * part, 4), (part, 4)]]


@pytest.mark.figures
def test_a_state_that_lies_as_its_parameters_travels():
    """Types say where it lies. There go gradients, momenta and factors.

    Of a factor each device sends half of its copy, and gives both copies back.
    """
    trial = Trial(preconditioned(), *STACK, EXPLICIT, is_there=False)
    of_matrix, of_factor = (8 * 8 * n * REAL // 4 for n in (16, 8))
    sent = (2 * of_matrix + of_factor, 4), (of_matrix + 2 * of_factor, 4)
    assert trial.run(2) == [[*sent]] * 2


@pytest.mark.figures
def test_copies_that_devices_do_not_divide_are_padded():
    """Three devices have the same 50 entries of a factor. Each of them sends 17."""
    shapes, cuts = (
        dict.fromkeys("abcdef", (10, 9)),
        dict.fromkeys("abcdef", P("x", "y")),
    )
    trial = Trial(preconditioned(), shapes, cuts, (2, 3), EXPLICIT, is_there=False)
    there, back = 2 * 90 + 6 * 17, 90 + 6 * 50
    assert trial.run() == [[(there * REAL, 6), (back * REAL, 6)]]


def test_matrices_may_follow_each_other_along_any_axis():
    inner = optax.stateless(lambda u, _: each_last(product, u))
    trial = Trial(inner, {"w": (6, 12, 4)}, {"w": P("x")}, (2,), AUTO)
    assert trial.run() == [[(6 * 12 * 4 * REAL // 2, 2)] * 2]


def each_last(f, tree):
    return jax.tree.map(jax.vmap(f, in_axes=-1, out_axes=-1), tree)


def traced_inside(f, cut, sizes, names):
    """An update inside of a ``shard_map`` over some mesh axes."""
    on = AbstractMesh(sizes, ("x", "y")[: len(sizes)], (AUTO,) * len(sizes))
    tx = gx.whole_matrices(optax.stateless(lambda u, _: {"g": f(u["g"])}))
    inside = jax.shard_map(
        lambda g: tx.update({"g": g}, tx.init({"g": g}))[0]["g"],
        **{"mesh": on, "in_specs": cut, "out_specs": cut, "axis_names": {*names}},
    )
    return jax.make_jaxpr(jax.jit(inside))(np.ones((8, 16), np.float32))


# What a device has of a matrix, and the mesh axes that are manual.
PARTS = {
    "a part": (product, P("x"), (4,), "x"),
    "maybe a part": (product, P(), (2, 2), "x"),
}
WHOLE = {
    "all": (product, P(), (4,), "x"),
    "all of both axes": (product, P(), (2, 2), "xy"),
    "beside an axis of one device": (product, P(), (2, 1), "x"),
    "on one device": (product, P("x"), (1,), "x"),
    "a part, without a product": (jnp.abs, P("x"), (4,), "x"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_matrix_is_refused_in_a_shard_map(name):
    with pytest.raises(
        ValueError, match=r"inside of jax.shard_map,.* its part over x:"
    ):
        traced_inside(*PARTS[name])


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_matrix_is_taken_in_a_shard_map(name):
    f, *_ = WHOLE[name]
    expected = f(np.ones((8, 16), np.float32))
    (found,) = Program(traced_inside(*WHOLE[name]))(np.ones((8, 16), np.float32))
    np.testing.assert_allclose(found, expected)
