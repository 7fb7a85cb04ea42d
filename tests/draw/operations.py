"""Draws calls of operations, as lines of Python.

Each function gets a :class:`Draw` and the name of a value. It returns an expression, or
None if the value does not fit. Sizes are small, and axes come in any order.
"""

from __future__ import annotations

import math

LETTERS = "abcdefgh"


class Draw:
    """What a program has drawn so far.

    Attributes:
      integer: draws an integer, from the lowest one to the highest.
      types: the values that there are, by name.
    """

    def __init__(self, integer):
        self.integer = integer
        self.types = {}

    def chance(self):
        return self.integer(0, 1) == 1

    def one_of(self, values):
        values = list(values)
        return values[self.integer(0, len(values) - 1)]

    def some_of(self, values):
        return [x for x in values if self.chance()]

    def order(self, values):
        values = list(values)
        return [values.pop(self.integer(0, len(values) - 1)) for _ in [*values]]

    def shape(self, x):
        return self.types[x].shape

    def axis(self, x):
        """An axis of a value, from the front or the back; None if there is none."""
        rank = len(self.shape(x))
        return self.integer(-rank, rank - 1) if rank else None

    def like(self, x):
        """A value of the same shape."""
        return self.one_of(n for n, t in self.types.items() if t.shape == self.shape(x))


def positive(d, x, axis):
    return axis % len(d.shape(x))


# Operations that keep the shape.

ELEMENTWISE = """
    jnp.abs({x}) | jnp.cos({x}) | jnp.exp(-jnp.abs({x})) | jnp.tanh({x}) | {x} ** 2
    | jnp.sign({x}) | jnp.round(4 * {x}) / 4 | lax.stop_gradient({x}) | {x} + 1.5
    | {x}.astype(jnp.float32) | {x} + {y} | {x} - {y} | {x} * {y} | jnp.copy({x})
    | jnp.maximum({x}, {y}) | jnp.where({x} > {y}, {x}, {y}) | jnp.arctan2({x}, {y})
"""


def elementwise(d, x):
    f = d.one_of(ELEMENTWISE.split("|"))
    return f.strip().format(x=x, y=d.like(x))


def of_one_entry(d, x):
    """A value that was reduced along an axis acts on the whole one."""
    if (axis := d.axis(x)) is None:
        return None
    f = d.one_of(["sum", "max", "mean", "prod", "min"])
    return f"{x} * jnp.{f}({x}, axis={axis}, keepdims=True)"


def cumulative(d, x):
    if (axis := d.axis(x)) is None:
        return None
    f = d.one_of(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
    return f"lax.{f}({x}, {positive(d, x, axis)}, reverse={d.chance()})"


def flip(d, x):
    axes = d.some_of(range(len(d.shape(x))))
    return f"lax.rev({x}, {tuple(axes)})"


def sort(d, x):
    if (axis := d.axis(x)) is None:
        return None
    axis, y = positive(d, x, axis), d.like(x)
    return d.one_of(
        [
            f"lax.sort({x}, dimension={axis}, is_stable={d.chance()})",
            f"lax.sort(({x}, {y}), dimension={axis}, num_keys={d.integer(1, 2)})[1]",
            f"jnp.argsort({x}, axis={axis}) + 0.0",
        ]
    )


def barrier(d, x):
    return f"lax.optimization_barrier(({x}, {d.like(x)}))[{d.integer(0, 1)}]"


# Operations that change the shape.


def transpose(d, x):
    return f"lax.transpose({x}, {tuple(d.order(range(len(d.shape(x)))))})"


def divisions(d, size):
    """Sizes of some axes with this product."""
    sizes = []
    while size > 1 and len(sizes) < 3:
        factor = d.one_of([n for n in range(1, size + 1) if not size % n])
        sizes.append(factor)
        size //= factor
    return [*sizes, size]


def reshape(d, x):
    """Also in another order, as Fortran's."""
    shape = d.shape(x)
    sizes = tuple(divisions(d, math.prod(shape)))
    if d.chance():  # Two neighbours become one, or one becomes two.
        k = d.integer(0, len(shape) - 1) if shape else 0
        joined = [*shape[:k], math.prod(shape[k : k + 2]), *shape[k + 2 :]]
        split = [
            *shape[:k],
            *divisions(d, math.prod(shape[k : k + 1])),
            *shape[k + 1 :],
        ]
        sizes = tuple(d.one_of([joined, split]))
    order = tuple(d.order(range(len(shape)))) if d.chance() else None
    how = [f"lax.reshape({x}, {sizes}, dimensions={order})"]
    how.append(f'jnp.reshape({x}, {sizes}, order="{d.one_of("CF")}")')
    return d.one_of(how)


def broadcast(d, x):
    shape, rank = d.shape(x), len(d.shape(x))
    if rank > 3:
        return None
    at = sorted(d.order(range(rank + 1))[:rank])
    sizes = [d.integer(1, 3)] * (rank + 1)
    for size, k in zip(shape, at, strict=True):
        sizes[k] = size
    return f"lax.broadcast_in_dim({x}, {tuple(sizes)}, {tuple(at)})"


def squeeze(d, x):
    axes = [a for a, n in enumerate(d.shape(x)) if n == 1]
    return f"lax.squeeze({x}, {tuple(d.some_of(axes))})" if axes else None


def reduction(d, x):
    axes = tuple(sorted(d.some_of(range(len(d.shape(x))))))
    return d.one_of(
        [f"jnp.{f}({x}, axis={axes})" for f in ("sum", "max", "min", "prod")]
        + [f"jnp.{f}({x} > 0.2, axis={axes}) + 0.0" for f in ("all", "any")]
        + [
            f"lax.reduce_{f}(({x} * 8).astype(int), {axes}) + 0.0"
            for f in ("and", "or", "xor")
        ]
        + [f"lax.reduce({x}, 0.0, lambda a, b: a + b + a * b, {axes})"]
    )


def argmax(d, x):
    if (axis := d.axis(x)) is None or not d.shape(x)[axis]:
        return None
    f, index = d.one_of(["argmax", "argmin"]), d.one_of(["int32", "int64"])
    return f"lax.{f}({x}, {positive(d, x, axis)}, jnp.{index}) + 0.0"


def cut(d, x):
    shape = d.shape(x)
    pairs = [sorted([d.integer(0, n), d.integer(0, n)]) for n in shape]
    whole = [d.chance() for _ in shape]
    pairs = [[0, n] if w else p for w, p, n in zip(whole, pairs, shape, strict=True)]
    steps = tuple(1 if w or d.chance() else 2 for w in whole)
    starts, stops = zip(*pairs, strict=True) if pairs else ((), ())
    return f"lax.slice({x}, {starts}, {stops}, {steps if d.chance() else None})"


def dynamic_cut(d, x):
    shape = d.shape(x)
    sizes = tuple(n if d.chance() else d.integer(0, n) for n in shape)
    starts = tuple(d.integer(-1, 2) for _ in shape)
    if d.chance():
        return f"lax.dynamic_slice({x}, {starts}, {sizes})"
    part = f"2 * lax.dynamic_slice({x}, {tuple([0] * len(shape))}, {sizes})"
    return f"lax.dynamic_update_slice({x}, {part}, {starts})"


def pad(d, x):
    def config(n):
        if d.chance():
            return 0, 0, 0
        low = d.integer(-min(n, 1), 1)
        return low, d.integer(-min(n - max(-low, 0), 1), 1), d.integer(0, 1)

    shape = d.shape(x)
    configs = tuple(config(n) for n in shape)
    if d.chance() and shape:  # A shift along an axis.
        axis, by = d.integer(0, len(shape) - 1), d.one_of([1, -1])
        configs = [(0, 0, 0)] * len(shape)
        configs[axis] = by, -by, 0
    return f"lax.pad({x}, jnp.asarray(0.5, {x}.dtype), {tuple(configs)})"


def joined(d, x):
    if (axis := d.axis(x)) is None:
        return None
    y = d.like(x)
    return d.one_of(
        [
            f"lax.concatenate([{x}, {y}], {positive(d, x, axis)})",
            f"jnp.stack([{x}, {y}], axis={axis})",
        ]
    )


def divided(d, x):
    if (axis := d.axis(x)) is None:
        return None
    axis, n = positive(d, x, axis), d.shape(x)[axis]
    if not n:
        return None
    first = d.integer(0, n)
    return d.one_of(
        [
            f"lax.split({x}, ({first}, {n - first}), axis={axis})[{d.integer(0, 1)}]",
            f"jnp.unstack({x}, axis={axis})[{d.integer(0, n - 1)}]",
        ]
    )


def top_k(d, x):
    if (axis := d.axis(x)) is None:
        return None
    n, which = d.shape(x)[axis], d.integer(0, 1)
    k = d.integer(0, n)
    if d.chance():
        f, size = d.one_of(["approx_max_k", "approx_min_k"]), d.one_of([-1, n])
        how = f"recall_target={d.one_of([0.9, 1.0])}, "
        how += f"reduction_input_size_override={size}"
        return f"lax.{f}({x}, {k}, reduction_dimension={axis}, {how})[{which}] + 0.0"
    return f"lax.top_k({x}, {k}, axis={positive(d, x, axis)})[{which}] + 0.0"


def tiled(d, x):
    return f"jnp.tile({x}, {tuple(d.one_of([1, 1, 2]) for _ in d.shape(x))})"


# Windows.


def paddings(d, least):
    return [(d.integer(least, 2), d.integer(0, 2)) for _ in range(3)]


def of_axes(d, count, plain, *others):
    """Something for each axis; half of them are plain."""
    return tuple(plain if d.chance() else d.one_of(others) for _ in range(count))


def windowed(d, x):
    """Windows, and their first and second derivatives."""
    if not (rank := len(d.shape(x))):
        return None
    f, start, op = d.one_of(
        [
            ("sum", 0.0, "lax.add"),
            ("max", "-jnp.inf", "lax.max"),
            ("min", "jnp.inf", "lax.min"),
            ("reduced", 0.0, "lambda a, b: a + b + a * b"),
        ]
    )
    sizes = tuple(1 if d.chance() else d.integer(1, max(n, 1)) for n in d.shape(x))
    steps, padding = of_axes(d, rank, 1, 2), of_axes(d, rank, (0, 0), *paddings(d, 0))
    dilations = of_axes(d, rank, 1, 2), of_axes(d, rank, 1, 2)
    how = d.one_of(["plain", "plain", "jvp", "grad"])
    if how == "grad":  # XLA takes no windows of padding alone.
        dilations = (1,) * rank, (1,) * rank
        padding = tuple((d.integer(0, n - 1), 0) for n in sizes)
    text = f"lax.reduce_window(v, {start}, {op}, {sizes}, {steps}, {padding}"
    text = f"lambda v: {text}, *{dilations})"
    if how == "jvp" and f != "reduced":
        return f"jax.jvp({text}, ({x},), ({d.like(x)},))[1]"
    if how == "grad" and f != "reduced":
        return f"jax.grad(lambda u: jnp.sum(jnp.sin(({text})(u))))({x})"
    return f"jnp.clip(({text})({x}), -9.0, 9.0)"


def convolved(d, x):
    """Values with any axes as batch, features and places; filters from others."""
    rank = len(d.shape(x))
    if rank < 2 or 0 in d.shape(x):
        return None
    y, axes, shape = d.like(x), d.order(range(rank)), d.shape(x)
    batch, features, *_ = axes
    others = d.order(a for a in range(rank) if a != features)
    filters = (others[0], features, *others[1:])
    kind = d.one_of(["one", "one", "features", "batch"])
    groups = {"features": shape[features], "batch": shape[batch]}.get(kind, 1)
    if kind != "one":
        groups = d.one_of(n for n in range(1, groups + 1) if not groups % n)
    size = shape[features] // (groups if kind == "features" else 1)
    places = rank - 2
    made = d.integer(1, 2) * groups
    own = (made, size, *(d.integer(1, 2) for _ in range(places)))
    constant = f"jnp.cos(jnp.arange({math.prod(own)}.0)).reshape({own})"
    y = f"lax.slice_in_dim({y}, 0, {size}, axis={features})"
    y = d.one_of([f"jnp.repeat({y}, {groups}, axis={others[0]})", y])
    y, filters = d.one_of([(constant, tuple(range(rank))), (y, filters), (y, filters)])
    out = tuple(d.order(range(rank)))
    return (
        f"lax.conv_general_dilated({x}, {y}, {of_axes(d, places, 1, 2)}, "
        f"{of_axes(d, places, (0, 0), *paddings(d, -1))}, "
        f"{of_axes(d, places, 1, 2)}, {of_axes(d, places, 1, 2)}, "
        f"lax.ConvDimensionNumbers({tuple(axes)}, {filters}, {out}), "
        f"feature_group_count={groups if kind == 'features' else 1}, "
        f"batch_group_count={groups if kind == 'batch' else 1}, "
        f"precision={d.one_of([None, 'highest'])!r})"
    )


def convolved_alone(d, x):
    """Each along an axis by itself: the filters, the values, or both."""
    if (axis := d.axis(x)) is None or not 2 <= len(d.shape(x)) < 4:
        return None
    y, rank = d.like(x), len(d.shape(x))
    alone = d.one_of([("a", "b"), ("a", "w"), ("w", "b"), ("a", "a")])
    kind = d.one_of(["batch", "feature"])
    shape = tuple(n for a, n in enumerate(d.shape(x)) if a != axis % rank)
    w = f"jnp.sin(jnp.arange({math.prod(shape)}.0)).reshape({shape})"
    axes = {"batch": "[:, None]", "feature": "[None]"}[kind]
    groups = shape[0] if d.chance() else 1
    two = f"{alone[0]}{axes}, {alone[1]}[{':, None' if groups > 1 else 'None'}]"
    conv = f"lax.conv_general_dilated({two}, {(1,) * (rank - 2)}, 'SAME', "
    conv += f"{kind}_group_count={groups})"
    text = f"(lambda w: jax.vmap(lambda a, b: {conv}, in_axes={axis}, "
    return f"{text}out_axes={d.one_of([0, axis])})({x}, {y}))({w})"


def smoothed(d, x):
    """What keeps the shape: windows, a filter or a table for each entry."""
    if (axis := d.axis(x)) is None or not d.shape(x)[axis]:
        return None
    axis, rank = positive(d, x, axis), len(d.shape(x))
    sizes = tuple(d.one_of([2, 3]) if a == axis else 1 for a in range(rank))
    ones, f = (1,) * rank, d.one_of(["lax.add", "lax.max"])
    start = "0.0" if f == "lax.add" else "-jnp.inf"
    one = (
        f"lambda v: jnp.convolve(v, jnp.array([0.5, 1.0, {d.integer(0, 2)}.0]), 'same')"
    )
    return d.one_of(
        [
            f"lax.reduce_window({x}, {start}, {f}, {sizes}, {ones}, 'SAME')",
            f"jnp.apply_along_axis({one}, {axis}, {x})",
            searched(d, x),
        ]
    )


def searched(d, x):
    """In a table, or each along the last axis by itself."""
    if not d.shape(x):
        return None
    how = f"side={d.one_of(['left', 'right'])!r}, "
    how += f"method={d.one_of(['scan', 'sort', 'compare_all', 'scan_unrolled'])!r}"
    one = f"lambda a, v: jnp.searchsorted(jnp.sort(a), v, {how}) + 0.0"
    table = "jnp.linspace(-1.0, 1.0, 5)"
    return d.one_of(
        [
            f'jnp.vectorize({one}, signature="(n),(n)->(n)")({x}, {d.like(x)})',
            f"jnp.searchsorted({table}, {x}, {how}) + 0.0",
            f"jnp.interp({x}, {table}, jnp.arange(5.0))",
            f"jnp.ldexp({x}, {d.integer(0, 3)})",
        ]
    )


def multiplied(d, x):
    """Any axes are summed, and any are a batch."""
    y = d.one_of(n for n, t in d.types.items() if len(t.shape) == len(d.shape(x)))
    letters = {}
    xs, ys, new = "", "", iter(LETTERS)
    for n in d.shape(x):
        letters[c := next(new)] = n
        xs += c
    for n in d.shape(y):
        same = [c for c in xs if letters[c] == n and c not in ys]
        ys += d.one_of([*same, ""]) or next(new)
    kept = [c for c in dict.fromkeys(xs + ys) if d.chance()]
    out = "".join(d.order(kept)[:4])
    precision = d.one_of([None, "highest"])
    return f'jnp.einsum("{xs},{ys}->{out}", {x}, {y}, precision={precision!r})'


def taken(d, x):
    if (axis := d.axis(x)) is None or not d.shape(x)[axis]:
        return None
    n = d.shape(x)[axis]
    ids = [d.integer(-1, n) for _ in range(d.integer(1, 3))]
    mode, is_sorted = d.one_of(["clip", "fill", "wrap"]), d.chance()
    if is_sorted:
        ids = sorted(d.integer(0, n - 1) for _ in ids)
    unique = len({*ids}) == len(ids) and d.chance()
    kinds = f"indices_are_sorted={is_sorted}, unique_indices={unique}"
    fill = f", fill_value={d.one_of([0.5, None])}" if mode == "fill" else ""
    if d.chance():
        how = f'mode="{mode}", {kinds}{fill}'
        return f"jnp.take({x}, jnp.array({ids}), axis={axis}, {how})"
    by, mode = f"jnp.argsort({x}, axis={axis})", d.one_of(["clip", "fill"])
    return f'jnp.take_along_axis({x}, {by}, axis={axis}, mode="{mode}")'


def written(d, x):
    if (axis := d.axis(x)) is None or not d.shape(x)[axis]:
        return None
    axis, n = positive(d, x, axis), d.shape(x)[axis]
    one, few = f"jnp.array([{d.integer(0, n - 1)}])", f"{d.integer(0, n - 1)}:{n}"
    at = ", ".join([":"] * axis + [d.one_of([one, few])])
    f = d.one_of(["set", "add", "multiply", "min", "max", "subtract"])
    mode = d.one_of(["clip", "drop", "promise_in_bounds"])
    kinds = f"indices_are_sorted={d.chance()}, unique_indices={d.chance()}"
    kinds = f'mode="{mode}", {kinds}'
    if d.chance() and len(d.shape(x)) > 1:  # Each along the first axis by itself.
        one = f"lambda x: x.at[jnp.argmax(x.ravel()) % len(x)].{f}(0.25, {kinds})"
        return f"jax.vmap({one}, in_axes={axis}, out_axes={axis})({x})"
    return f"{x}.at[{at}].{f}(0.25, {kinds})"


def counted(d, x):
    """A number for each entry along an axis."""
    if (axis := d.axis(x)) is None:
        return None
    shape, axis = d.shape(x), positive(d, x, axis)
    iota = f"lax.broadcasted_iota({x}.dtype, {shape}, {axis})"
    ones = tuple(n if a == axis else 1 for a, n in enumerate(shape))
    vector = f"jnp.arange({shape[axis]}.0).reshape({ones})"
    return f"{x} * {d.one_of([iota, vector, f'jnp.sqrt({vector})'])}"


def constant(d, x):
    """An array that the program neither gets nor computes."""
    if (axis := d.axis(x)) is None:
        return None
    shape, axis = d.shape(x), positive(d, x, axis)
    ones = tuple(n if a == axis else 1 for a, n in enumerate(shape))
    return f"{x} * (1 + np.arange({shape[axis]}.0)).reshape({ones})"


def made(d, x):
    """Arrays that the program makes itself."""
    shape = d.shape(x)
    if d.chance():
        return f"{x} + jnp.full({shape}, 0.5)"
    return f"{x} + jnp.zeros({shape}).at[...].set(0.25) * jnp.ones({shape})"


def drawn(d, x):
    dtype = d.one_of(["uint8", "uint32"])
    shape = d.shape(x)
    if shape and d.chance():  # Each along the first axis has its own key.
        impl = d.one_of(["threefry2x32", "rbg"])
        one = f"lambda k: jax.random.bits(k, {shape[1:]}, jnp.{dtype})"
        keys = f"jax.random.split(jax.random.key(1, impl='{impl}'), {shape[0]})"
        return f"{x} + jax.vmap({one})({keys}) % 4"
    return f"{x} + jax.random.bits(jax.random.key(1), {shape}, jnp.{dtype}) % 4"


def factorized(d, x):
    """The last two axes are a matrix."""
    if len(d.shape(x)) < 2 or 0 in d.shape(x):
        return None
    m, n = d.shape(x)[-2:]
    square = f"jnp.matmul({x}, jnp.swapaxes({x}, -1, -2)) + 4 * jnp.eye({m})"
    f = [
        f"lax.linalg.cholesky({square}, symmetrize_input={d.chance()})",
        f"lax.linalg.eigh({square}, lower={d.chance()})[1]",
        f"jnp.linalg.qr({x}, mode={d.one_of(['reduced', 'complete'])!r})[1]",
        f"jnp.abs(lax.linalg.svd({x}, full_matrices={d.chance()})[1])",
        f"jnp.abs(lax.linalg.svd({x}, compute_uv=False))",
        f"lax.linalg.lu({square})[{d.integer(0, 1)}] + 0.0",
        f"lax.linalg.lu({square})[2] + 0.0",
        f"jnp.real(jnp.linalg.eigvals({square}))",
        f"lax.linalg.schur({square}, compute_schur_vectors={d.chance()})[0]",
        f"lax.linalg.triangular_solve({square}, {x}, left_side=True, "
        f"lower={d.chance()}, transpose_a={d.chance()}, unit_diagonal={d.chance()})",
        f"lax.linalg.qr({x}, pivoting=True, full_matrices={d.chance()})[2] + 0.0",
    ]
    if m >= n:
        f.append(f"lax.linalg.householder_product({x}, 0.1 * {x}[..., 0, :])")
    return d.one_of(f)


def banded(d, x):
    """Further operations on matrices."""
    if len(d.shape(x)) < 2 or 0 in d.shape(x):
        return None
    m, side = d.shape(x)[-2], f"{x}[..., 0]"
    square = f"jnp.matmul({x}, jnp.swapaxes({x}, -1, -2)) + 4 * jnp.eye({m})"
    return d.one_of(
        [
            f"lax.linalg.lu_pivots_to_permutation(lax.linalg.lu({square})[1], "
            f"{m + d.integer(0, 2)}) + 0.0",
            f"lax.linalg.hessenberg({square})[{d.integer(0, 1)}]",
            f"lax.linalg.tridiagonal({square}, lower={d.chance()})[{d.integer(1, 3)}]",
            f"lax.linalg.symmetric_product({x}, {square}, alpha={d.integer(1, 2)}.0, "
            f"beta={d.integer(0, 1)}.0)",
            f"lax.linalg.tridiagonal_solve({side}, {x}[..., -1] + 9, {side}, {x})",
        ]
    )


def solved(d, x):
    """Functions that JAX makes of others; the right side may be the same for all."""
    if len(d.shape(x)) < 2 or 0 in d.shape(x):
        return None
    m = d.shape(x)[-2]
    square = f"(jnp.matmul({x}, jnp.swapaxes({x}, -1, -2)) + 4 * jnp.eye({m}))"
    one = d.one_of(["b", f"jnp.ones(({m}, 2))", "2 * a", "b[:, 0]"])
    function = f"lambda a, b: jnp.linalg.solve(a, {one})"
    for _ in d.shape(x)[2:]:
        function = f"jax.vmap({function})"
    return d.one_of(
        [
            f"jnp.linalg.inv({square})",
            f"jnp.linalg.solve({square}, {x})",
            f"({function})({square}, {x})",
            f"jax.scipy.linalg.expm(0.1 * {square})",
            f"jnp.linalg.matrix_power({square}, -{d.integer(1, 2)})",
            f"jnp.linalg.pinv({x})",
            f"jnp.linalg.slogdet({square})[1]",
        ]
    )


def fourier(d, x):
    """Along the last axes."""
    if 0 in d.shape(x) or not d.shape(x):
        return None
    sizes = d.shape(x)[-d.integer(1, len(d.shape(x))) :][-3:]
    real = f"lax.fft({x}, 'rfft', {sizes})"
    return d.one_of(
        [
            f"jnp.abs({real})",
            f"lax.fft({real}, 'irfft', {sizes})",
            f"jnp.abs(lax.fft({x} + 0j, '{d.one_of(['fft', 'ifft'])}', {sizes}))",
        ]
    )


def bits(d, x):
    return d.one_of(
        [
            f"lax.bitcast_convert_type({x}, jnp.int64) % 7 + 0.0",
            f"lax.reduce_precision({x}, 8, {d.integer(3, 9)})",
            f"lax.clamp(-0.5, {x}, 0.5)",
            f"lax.bitcast_convert_type({x}.astype(jnp.float32), jnp.uint16) % 5 + 0.0",
        ]
    )


SHAPES = (reshape, transpose, broadcast, squeeze)
KEEP = (elementwise, of_one_entry, cumulative, flip, sort, barrier, counted, constant)
KEEP += (made, bits, written, smoothed)
PARTS = (cut, dynamic_cut, pad, joined, divided, flip, taken, written, top_k, transpose)
PARTS += (tiled,)
SUMS = (reduction, argmax, multiplied, cumulative, sort, of_one_entry, reshape)
REST = (elementwise, drawn, fourier, bits, made, counted, constant, transpose, searched)
MATRICES = (factorized, factorized, banded, banded, transpose, solved, multiplied)
WINDOWS = (windowed, convolved, convolved_alone, transpose, reshape, convolved)
ALL = (*SHAPES, *KEEP, *PARTS, *SUMS, *REST, *MATRICES, *WINDOWS)
ALL = tuple(dict.fromkeys(ALL))
