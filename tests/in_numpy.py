"""Runs a traced program in NumPy, on all devices of a mesh: nothing is compiled.

A value is a list of arrays, one for each device. Outside of a ``shard_map`` there is
one device, which has everything.
"""

import collections
import functools
import itertools
import math
import string

import jax
import numpy as np

from gradxform._jax import versions

ELEMENTWISE = {
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply},
    **{"div": np.divide, "max": np.maximum, "min": np.minimum, "neg": np.negative},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
    **{"eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "abs": np.abs},
    **{"or": np.bitwise_or, "not": np.logical_not, "sqrt": np.sqrt, "exp": np.exp},
    **{"square": np.square, "log": np.log, "rsqrt": lambda x: 1 / np.sqrt(x)},
    **{"is_finite": np.isfinite, "pow": np.power, "tanh": np.tanh, "rem": np.fmod},
    **{"cos": np.cos, "expm1": np.expm1, "log1p": np.log1p},
}
REDUCED = {
    **{"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min},
    **{"reduce_or": np.any, "reduce_prod": np.prod, "reduce_and": np.all},
}
SAME = {"copy", "copy_p", "device_put", "stop_gradient"}
SAME |= {"layout_constraint", "sharding_constraint", "reshard", "pvary", "pcast"}
PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def product(a, b, dimension_numbers, **_):
    (over_a, over_b), (batch_a, batch_b) = dimension_numbers
    letters = iter(string.ascii_letters)
    first = [next(letters) for _ in range(a.ndim)]
    second = [None] * b.ndim
    for i, j in zip((*over_a, *batch_a), (*over_b, *batch_b), strict=True):
        second[j] = first[i]
    second = [x or next(letters) for x in second]
    rest = [x for k, x in enumerate(first) if k not in (*over_a, *batch_a)]
    rest += [x for k, x in enumerate(second) if k not in (*over_b, *batch_b)]
    of = "".join(first), "".join(second), "".join(first[i] for i in batch_a)
    a, b = (x.astype(np.float32) if x.dtype == "bfloat16" else x for x in (a, b))
    return np.einsum(f"{of[0]},{of[1]}->{of[2]}{''.join(rest)}", a, b)


def broadcast(x, shape, broadcast_dimensions, **_):
    sizes = [1] * len(shape)
    for n, k in zip(x.shape, broadcast_dimensions, strict=True):
        sizes[k] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def within(x, start, sizes):
    """Where a part of these sizes is; JAX moves it back if it lies outside."""
    where = zip(start, sizes, x.shape, strict=True)
    starts = [(min(max(int(k), 0), n - size), size) for k, size, n in where]
    return tuple(slice(k, k + size) for k, size in starts)


def dynamic_slice(x, *start, slice_sizes):
    return x[within(x, start, slice_sizes)]


def dynamic_update_slice(x, part, *start):
    new = x.copy()
    new[within(x, start, part.shape)] = part
    return new


def sliced(x, start_indices, limit_indices, strides):
    strides = strides or [1] * x.ndim
    each = zip(start_indices, limit_indices, strides, strict=True)
    return x[tuple(slice(*of) for of in each)]


def iota(*_, shape, dimension, dtype, **__):
    sizes = [n if k == dimension else 1 for k, n in enumerate(shape)]
    entries = np.arange(shape[dimension], dtype=dtype)
    return np.broadcast_to(entries.reshape(sizes), shape)


def solved(a, b, left_side, lower, transpose_a, unit_diagonal, **_):
    a = np.tril(a) if lower else np.triu(a)
    if unit_diagonal:
        a = np.where(np.eye(a.shape[-1], dtype=bool), np.ones_like(a), a)
    a = a.swapaxes(-1, -2) if transpose_a else a
    if left_side:
        return np.linalg.solve(a, b)
    return np.linalg.solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)


def singular(x, compute_uv, **_):
    if not compute_uv:
        return (np.linalg.svd(x, compute_uv=False),)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    return s, u, v


# Those of several results.
SEVERAL = {
    "qr": lambda x, **_: np.linalg.qr(x),
    "eigh": lambda x, **_: np.linalg.eigh(x)[::-1],
    "svd": singular,
    "split": lambda x, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "unstack": lambda x, axis, **_: [*np.moveaxis(x, axis, 0)],
}
OPERATIONS = {
    "triangular_solve": solved,
    "dot_general": product,
    "broadcast_in_dim": broadcast,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "slice": sliced,
    "iota": iota,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "squeeze": lambda x, dimensions: x.squeeze(tuple(dimensions)),
    "concatenate": lambda *x, dimension: np.concatenate(x, dimension),
    "pad": lambda x, value, padding_config: np.pad(
        x, [(low, high) for low, high, _ in padding_config], constant_values=value
    ),
    "stack": lambda *x, axis, **_: np.stack(x, axis),
    "rev": lambda x, dimensions: np.flip(x, axis=dimensions),
    "integer_pow": lambda x, y: x**y,
    "round": lambda x, rounding_method: np.round(x),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}


def is_key(x):
    """Whether it has random keys, which NumPy does not know."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(
        x.dtype, jax.dtypes.prng_key
    )


def array(x, dtype=None):
    """An array of NumPy, if it is none of keys."""
    return x if is_key(x) else np.asarray(x, dtype)


class Program:
    """Runs a program, as on a platform.

    Attributes:
      sent: the bytes that a device sends in each exchange, with the number of devices
        that take part.
      ran: how often each operation ran on a device.
      values: those of the program's variables, on each device.
    """

    def __init__(self, closed, platform="cpu"):
        self.closed, self.platform = closed, platform
        self.sent, self.ran = [], collections.Counter()
        self.values, self._names, self._sizes = {}, (), ()

    def __call__(self, *args):
        """The results for arrays of any tree."""
        given = [[array(x)] for x in jax.tree.leaves(args)]
        with np.errstate(all="ignore"):  # As XLA, which makes infinity or NaN.
            results = self._run(self.closed.jaxpr, self.closed.consts, given)
        return [x for (x,) in results]

    def _run(self, jaxpr, consts, args):
        count = len(args[0]) if args else 1
        env = dict(zip(jaxpr.invars, args, strict=True))
        for x, value in zip(jaxpr.constvars, consts, strict=True):
            env[x] = [array(value)] * count

        def read(x):
            return [array(x.val)] * count if hasattr(x, "val") else env[x]

        for eqn in jaxpr.eqns:
            made = self._results(eqn, [read(x) for x in eqn.invars], count)
            for x, each in zip(eqn.outvars, made, strict=True):
                assert all(np.shape(y) == x.aval.shape for y in each), eqn
                env[x] = [array(y, x.aval.dtype) for y in each]
        self.values = env  # The program around others ends last.
        return [read(x) for x in jaxpr.outvars]

    def _closed(self, closed, args):
        return self._run(closed.jaxpr, closed.consts, args)

    def _results(self, eqn, inputs, count):
        name, params = eqn.primitive.name, eqn.params
        self.ran[name] += 1
        if of := getattr(self, f"_{name}", None):
            return of(inputs, eqn, **params)
        if name in SAME or name == "optimization_barrier":
            return inputs
        for key in PROGRAMS:
            if key in params:
                inside = params[key]
                return self._run(
                    inside.jaxpr if hasattr(inside, "jaxpr") else inside,
                    getattr(inside, "consts", ()),
                    inputs,
                )
        made = [self._made(eqn, [x[d] for x in inputs]) for d in range(count)]
        return [list(each) for each in zip(*made, strict=True)]

    def _made(self, eqn, inputs):
        name, params = eqn.primitive.name, eqn.params
        if name in SEVERAL and not any(map(is_key, inputs)):
            return SEVERAL[name](*inputs, **params)
        if name in ELEMENTWISE:
            return [ELEMENTWISE[name](*inputs)]
        if name in REDUCED:
            return [REDUCED[name](*inputs, axis=tuple(params["axes"]))]
        if name in OPERATIONS and not any(map(is_key, inputs)):
            return [OPERATIONS[name](*inputs, **params)]
        return versions.bind(eqn, inputs)  # Of random numbers.

    def _platform_index(self, inputs, eqn, *, platforms):
        fitting = [
            k for k, of in enumerate(platforms) if of is None or self.platform in of
        ]
        return [[np.asarray(fitting[0])]]

    def _apart(self, f, inputs, count):
        """By one device after another, as they do not do the same."""
        made = [f([[x[d]] for x in inputs]) for d in range(count)]
        return [[x for (x,) in each] for each in zip(*made, strict=True)]

    def _cond(self, inputs, eqn, *, branches, **_):
        chosen, *operands = inputs
        count = len(chosen)
        chosen = {min(max(int(x), 0), len(branches) - 1) for x in chosen}
        if len(chosen) > 1:
            return self._apart(
                lambda x: self._cond(x, eqn, branches=branches), inputs, count
            )
        return self._closed(branches[chosen.pop()], operands)

    def _while(
        self, inputs, eqn, *, cond_nconsts, cond_jaxpr, body_nconsts, body_jaxpr
    ):
        before = inputs[:cond_nconsts]
        consts = inputs[cond_nconsts : cond_nconsts + body_nconsts]
        carry = inputs[cond_nconsts + body_nconsts :]
        while True:
            (goes_on,) = self._closed(cond_jaxpr, [*before, *carry])
            assert len({bool(np.any(x)) for x in goes_on}) == 1
            if not np.any(goes_on[0]):
                return carry
            new = self._closed(body_jaxpr, [*consts, *carry])
            # Of a batch, each example leaves the loop by itself.
            carry = [
                [
                    np.where(of.reshape(of.shape + (1,) * (x.ndim - of.ndim)), x, y)
                    for of, x, y in zip(goes_on, *each, strict=True)
                ]
                for each in zip(new, carry, strict=True)
            ]

    def _scan(self, inputs, eqn, *, jaxpr, length, reverse, **_):
        num_consts, num_carry = versions.scan_lengths(eqn)
        consts, carry = inputs[:num_consts], inputs[num_consts:][:num_carry]
        over, stacked = inputs[num_consts + num_carry :], []
        turns = range(length)[::-1] if reverse else range(length)
        for n in turns:
            now = [[x[n] for x in each] for each in over]
            made = self._closed(jaxpr, [*consts, *carry, *now])
            carry, ys = made[:num_carry], made[num_carry:]
            stacked.append(ys)
        ys = [
            [
                (jax.numpy if is_key(x[0]) else np).stack(x)
                for x in zip(
                    *(each[k] for each in stacked[:: -1 if reverse else 1]), strict=True
                )
            ]
            for k in range(len(jaxpr.jaxpr.outvars) - num_carry)
        ]
        return [*carry, *ys]

    def _shard_map(self, inputs, eqn, *, mesh, jaxpr, in_specs, out_specs, **_):
        self._names, self._sizes = tuple(mesh.axis_names), tuple(mesh.shape.values())
        places = [*np.ndindex(*self._sizes)]
        given = []
        for (x,), spec in zip(inputs, in_specs, strict=True):
            given.append([x[self._part(x.shape, spec, at)] for at in places])
        made = self._run(jaxpr, (), given)
        results = []
        for each, spec in zip(made, out_specs, strict=True):
            shape = list(each[0].shape)
            for axis, of in enumerate(spec):
                shape[axis] *= math.prod(mesh.shape[name] for name in named(of))
            if is_key(each[0]):
                results.append([each[0]])
                continue
            whole = np.empty(shape, each[0].dtype)
            for x, at in zip(each, places, strict=True):
                whole[self._part(shape, spec, at)] = x
            # Devices with copies have the same.
            for x, at in zip(each, places, strict=True):
                np.testing.assert_array_equal(whole[self._part(shape, spec, at)], x)
            results.append([whole])
        return results

    def _part(self, shape, spec, at):
        """What of an array is at a place of the mesh."""
        where = []
        for n, of in itertools.zip_longest(shape, spec):
            index, several = self._index(named(of), at)
            size = n // several
            assert size * several == n
            where.append(slice(index * size, (index + 1) * size))
        return tuple(where)

    def _index(self, names, at):
        """The position along mesh axes, and how many. The first counts most."""
        index, several = 0, 1
        for name in names:
            k = self._names.index(name)
            index, several = index * self._sizes[k] + at[k], several * self._sizes[k]
        return index, several

    def _axis_index(self, inputs, eqn, *, axis_name):
        places = np.ndindex(*self._sizes)
        return [[np.asarray(self._index(named(axis_name), at)[0]) for at in places]]

    def _groups(self, names):
        """The devices that differ along these axes alone, in their order there."""
        places = [*np.ndindex(*self._sizes)]
        others = [k for k, name in enumerate(self._names) if name not in names]
        groups = {}
        for d, at in enumerate(places):
            groups.setdefault(tuple(at[k] for k in others), []).append(d)
        return [
            sorted(group, key=lambda d: self._index(names, places[d])[0])
            for group in groups.values()
        ]

    def _reduced(self, inputs, names, f):
        """Over the devices along these axes, on each of them; or over arrays' axes."""
        if all(isinstance(name, int) for name in names):  # Of a ``vmap``.
            return [[f.reduce(y, axis=tuple(names)) for y in x] for x in inputs]
        results = [[None] * len(x) for x in inputs]
        for group in self._groups(names):
            for x, made in zip(inputs, results, strict=True):
                total = functools.reduce(f, [x[d] for d in group])
                for d in group:
                    made[d] = total
        return results

    def _psum(self, inputs, eqn, *, axes, **_):
        return self._reduced(inputs, axes, np.add)

    _psum_invariant = _psum

    def _pmin(self, inputs, eqn, *, axes, **_):
        return self._reduced(inputs, axes, np.minimum)

    def _pmax(self, inputs, eqn, *, axes, **_):
        return self._reduced(inputs, axes, np.maximum)

    def _all_to_all(self, inputs, eqn, *, axis_name, split_axis, concat_axis, **_):
        (x,), names = inputs, named(axis_name)
        made = [None] * len(x)
        for group in self._groups(names):
            parts = [np.split(x[d], len(group), split_axis) for d in group]
            for n, d in enumerate(group):
                made[d] = np.concatenate([of[n] for of in parts], concat_axis)
        self.sent.append((x[0].nbytes, len(group)))
        return [made]


def jit(f):
    """``f`` in NumPy, traced once for each structure and types of its arguments.

    It takes a fifth of the time of a program that is compiled and runs a few times. XLA
    rounds numbers below 1e-38 to zero, and NumPy does not: such tests compile theirs.
    """
    programs = {}

    def call(*args, **words):
        leaves, treedef = jax.tree.flatten((args, words))
        key = treedef, *map(jax.typeof, leaves)
        if key not in programs:
            traced = jax.make_jaxpr(
                lambda args, words: f(*args, **words), return_shape=True
            )
            closed, results = traced(args, words)
            programs[key] = Program(closed), jax.tree.structure(results)
        program, structure = programs[key]
        return structure.unflatten(program(args, words))

    return call


def named(of):
    """The mesh axes of an entry of a spec."""
    if of is None:
        return ()
    return (of,) if isinstance(of, str) else tuple(of)
