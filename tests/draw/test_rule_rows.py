"""What each rule says of calls on both sides of its borders.

``x0=1`` says: the slices of ``x`` along axis 0 are those of the result along axis 1.
``x0=`` says that the call mixes them. Negative axes are sums of all slices. ``x0/2=1``
says it of two slices, each with some entries of the axis.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gradxform._slices import rules
from gradxform._slices.rules import Along

X, I = jnp.ones((2, 3, 4)), jnp.zeros((3, 1), int)  # noqa: E741
ARGS = {
    "x": X,
    "i": I,
    "y": jnp.ones((2, 3)),
    "c": jnp.ones((2, 3, 4), complex),
    "v": jnp.ones(3),
    "one": jnp.ones((2, 1, 4)),
    "square": jnp.ones((2, 3, 3, 3)),
    "part": jnp.ones((2, 3, 1)),
    # Batch, features, places; features of the result, features, places.
    "image": jnp.ones((4, 6, 5)),
    "filters": jnp.ones((8, 6, 2)),
    "grouped": jnp.ones((8, 3, 2)),
    "turned": jnp.ones((4, 8, 2)),
    "right": jnp.ones((2, 3, 5)),
    "keys": jax.random.split(jax.random.key(0), (2, 5)),
    "others": jax.random.split(jax.random.key(0, impl="rbg"), (5, 2)),
}


def convolved(filters, dims=("NCW", "OIW", "NCW"), **groups):
    how = "".join(f", {name}_group_count={n}" for name, n in groups.items())
    args = f"image, {filters}, (1,), 'SAME', None, None, {dims}"
    return f"lax.conv_general_dilated({args}{how})"


def windows(f="lax.add", start="0.0", sizes=(1, 1, 1), steps=(1, 1, 1), *more):
    padding = more[0] if more else ((0, 0),) * 3
    return (
        f"lax.reduce_window(x, {start}, {f}, {sizes}, {steps}, {padding}, *{more[1:]})"
    )


def gathered(offset, collapsed, sizes, batch=()):
    dims = f"{offset}, {collapsed}, (1,), {batch}, {(0,) if batch else ()}"
    return f"lax.gather(y, i, lax.GatherDimensionNumbers({dims}), {sizes})"


def scattered(window, inserted, updates, at="i", batch=()):
    dims = f"{window}, {inserted}, (1,), {batch}, {(0,) if batch else ()}"
    numbers = f"lax.ScatterDimensionNumbers({dims})"
    return f"lax.scatter_add(y, {at}, {updates}, {numbers})"


TABLE = """
x + 1 | x0=0 x1=1 x2=2
x * one | one0=0 one1= one2=2
lax.pad(x, 0.0, ((0, 0, 0),) * 3) | x0=0 x1=1 x2=2
lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0), (0, 0, 0))) | x0= x1=1 x2=2
lax.pad(x, 0.0, ((0, 0, 0), (0, 2, 0), (0, 0, 0))) | x0=0 x1= x2=2
lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0), (0, 0, 1))) | x0=0 x1=1 x2=
lax.pad(x, 0.0, ((1, -1, 0), (-1, 1, 0), (-1, -1, 0))) | x0= x1= x2=
lax.broadcast_in_dim(one, (5, 2, 3, 4), (1, 2, 3)) | one0=1 one1= one2=3
lax.broadcast_in_dim(y, (3, 2, 3), (1, 2)) | y0=1 y1=2
lax.transpose(x, (2, 0, 1)) | x0=1 x1=2 x2=0
lax.reshape(x, (6, 4)) | x0=0 x1= x2=1
lax.reshape(x, (2, 12)) | x0=0 x1=1 x2=
lax.reshape(x, (1, 2, 3, 1, 4)) | x0=1 x1=2 x2=4
lax.reshape(x, (4, 6), dimensions=(2, 1, 0)) | x0= x1=1 x2=0
lax.reshape(x, (4, 6), dimensions=(2, 0, 1)) | x0=1 x1= x2=0
lax.reshape(x, (8, 3), dimensions=(0, 2, 1)) | x0=0 x1=1 x2=
lax.bitcast_convert_type(x.astype("int8"), "float32") | x0=0 x1=1 x2=
lax.cumsum(x, 1) | x0=0 x1= x2=2
lax.rev(x, (0, 2)) | x0= x1=1 x2=
lax.sort(x, dimension=2) | x0=0 x1=1 x2=
lax.argmax(x, 1, int) | x0=0 x1= x2=1
lax.squeeze(one, (1,)) | one0=0 one2=1
lax.concatenate([x, one], 1) | x0=0 x1= x2=2 one0=0 one1= one2=2
lax.split(x, (1, 2), 1)[1] | x0=0 x1= x2=2
lax.top_k(x, 2)[0] | x0=0 x1=1 x2=
lax.approx_max_k(x, 2)[0] | x0=0 x1=1 x2=
lax.approx_min_k(x, 2, reduction_dimension=0)[0] | x0= x1=1 x2=2
lax.reduce_max(x, (0,)) | x0=-1 x1=0 x2=1
lax.reduce_max(x, (0, 2)) | x0=-1 x1=0 x2=-1
lax.linalg.triangular_solve(square, square) | square0=0 square1=1 square2= square3=
lax.linalg.hessenberg(square)[1] | square0=0 square1=1 square2= square3=
lax.linalg.tridiagonal(square)[1] | square0=0 square1=1 square2= square3=
lax.linalg.symmetric_product(square, square) | square0=0 square1=1 square2= square3=
lax.linalg.lu_pivots_to_permutation(i, 4) | i0=0 i1=
lax.linalg.tridiagonal_solve(y, y, y, right) | y0=0 y1= right0=0 right1= right2=
lax.fft(c, "FFT", (4,)) | c0=0 c1=1 c2=
lax.fft(c, "FFT", (3, 4)) | c0=0 c1= c2=
lax.slice(x, (0, 1, 0), (2, 3, 4)) | x0=0 x1= x2=2
lax.slice(x, (0, 0, 0), (2, 2, 4)) | x0=0 x1= x2=2
lax.slice(x, (0, 0, 0), (2, 3, 4), (1, 1, 3)) | x0=0 x1=1 x2=
lax.dynamic_slice(x, (0, v[0].astype(int), 0), (2, 1, 4)) | x0=0 x1= x2=2
lax.dynamic_update_slice(x, one, (0, 1, 0)) | x0=0 x1= x2=2 one0=0 one1= one2=2
lax.dot_general(x, y, (((1,), (1,)), ((), ()))) | x0=0 x1=-1 x2=1 y0=2 y1=-1
lax.dot_general(x, y, (((), ()), ((1,), (1,)))) | x0=1 x1=0 x2=2 y0=3 y1=0
lax.dot_general(one, x, (((2,), (2,)), ((0,), (0,)))) | one1=1 one2=-1 x0=0 x1=2 x2=-1
lax.dot_general(x, y + 1, (((0, 1), (0, 1)), ((), ()))) | x0=-1 x1=-2 x2=0
lax.scan(lambda c, a: (c, a), (), x)[1] | x0=0 x1= x2=
lax.scan(lambda c, a: (c + 1, a), 0, x)[1] | x0= x1= x2=
lax.scan(lambda c, a: (c, a + v.sum()), (), x)[1] | x0=0 x1= v0=
lax.scan(lambda c, a: (c, jax.debug.callback(print, a)), (), x)[0] | x0= x1=
"""
ROWS = [line.split(" | ") for line in TABLE.strip().splitlines()]
if hasattr(lax, "stack_p"):  # From JAX 0.12 on.
    ROWS += [("lax.stack([x, x], axis=1)", "x0=0 x1=2 x2=3")]
    ROWS += [("lax.unstack(x, axis=1)[0]", "x0=0 x1= x2=1")]
if hasattr(lax, "tile_p"):
    ROWS += [("lax.tile(x, (1, 2, 1))", "x0=0 x1= x2=2")]
for f, start in (
    *(("lax.add", "0.0"), ("lax.max", "-jnp.inf"), ("lax.min", "jnp.inf")),
    ("lambda a, b: a + 2 * b", "0.0"),
):
    ROWS += [
        (windows(f, start), "x0=0 x1=1 x2=2"),
        (windows(f, start, (1, 2, 1)), "x0=0 x1= x2=2"),
        (windows(f, start, (1, 1, 1), (2, 1, 3)), "x0= x1=1 x2="),
        (
            windows(f, start, (1, 1, 1), (1, 1, 1), ((0, 0), (0, 1), (1, 0))),
            "x0=0 x1= x2=",
        ),
        (
            windows(
                f, start, (1, 1, 2), (1, 1, 1), ((0, 0),) * 3, (1, 2, 1), (2, 1, 1)
            ),
            "x0=0 x1= x2=",
        ),
    ]
POOL = "lambda v: " + windows("lax.max", "-jnp.inf", (1, 1, 2), (2, 1, 1))
POOL = POOL.replace("(x,", "(v,")
ROWS += [
    (f"jax.jvp({POOL}, (x,), (x,))[1]", "x0= x1=1 x2="),
    (f"jax.grad(lambda u: ({POOL})(u)[0, 0, 0])(x)", "x0= x1=1 x2="),
    (convolved("filters"), "image0=0 image1= image2= filters0=1 filters1= filters2="),
    (
        convolved("turned", ("CNW", "IOW", "NWC")),
        "image0= image1=0 image2= turned0= turned1=2 turned2=",
    ),
    # One slice of features is all of them.
    (convolved("filters"), "image0/1=0 image1/1=1 filters0/1=1 filters1/1="),
    # Each slice has some of the groups.
    (
        convolved("grouped", feature=2),
        "image0=0 image1/2=1 image1/3= image1= grouped0/2=1 grouped0/4= grouped1=",
    ),
    (
        convolved("filters", batch=2),
        "image0/2=1 image0/4= image1/2= filters0/2=1 filters0/4= filters1=",
    ),
    # Keys of Threefry draw alone.
    ("jax.vmap(jax.vmap(jax.random.bits))(keys)", "keys0=0 keys1=1"),
    ("jax.vmap(jax.vmap(jax.random.bits))(others)", "others0= others1="),
    # Each index reads a column, of all rows.
    (gathered((0,), (1,), (2, 1)), "y0=0 y1= i0=1"),
    (gathered((0,), (1,), (1, 1)), "y0= y1= i0=1"),
    (gathered((1, 2), (), (2, 1)), "y0=1 y1= i0=0"),
    # Each row has its own index.
    (
        "lax.gather(y, i[:2], lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,)), "
        "(1, 1))",
        "y0=0 y1=",
    ),
    (scattered((0,), (1,), "y"), "y0=0 y1= i0="),
    (scattered((0,), (1,), "part[:, :, 0]"), "y0=0 y1= i0="),
    (scattered((0,), (1,), "y[:1]"), "y0= y1= i0="),
    (scattered((), (1,), "y[:, 0]", "i[:2]", (0,)), "y0=0 y1="),
]


@pytest.mark.every
@pytest.mark.parametrize(("text", "expected"), ROWS, ids=[text for text, _ in ROWS])
def test_where_slices_lie_after_a_call(text, expected):
    f = eval(f"lambda {', '.join(ARGS)}: {text}", {"jax": jax, "jnp": jnp, "lax": lax})
    jaxpr = jax.make_jaxpr(f)(**ARGS).jaxpr
    while not (known := [e for e in jaxpr.eqns if e.primitive.name in rules.RULES]):
        (call,) = jaxpr.eqns
        jaxpr = call.params["jaxpr"].jaxpr
    shapes = [x.aval.shape for x in known[-1].invars]
    for token in expected.split():
        start, _, axis = token.partition("=")
        start, _, number = start.partition("/")
        shape, before = ARGS[start[:-1]].shape, int(start[-1])
        operand, number = shapes.index(shape), int(number or shape[before])
        along = Along(before, shape[before] // number)
        got = rules.after(known[-1].primitive.name, known[-1], operand, along, number)
        assert (got and got.axis) == (int(axis) if axis else None), token
