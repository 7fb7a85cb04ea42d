"""Shared by the makers of row-sparse traces: the gradients and the cases.

As in ``_format.py``, the inputs are the same, bit for bit, in every file.
"""

import _format
import numpy as np

SHAPES = {"w": (6, 3), "t": (4, 2, 2), "v": (6,), "b": (3,)}
"""The leaves: tables of rank 2, 3 and 1, and "b", whose gradient is dense."""

ROWS = {
    "sorted": ((0, 2, 5), (1, 3), (0, 1, 4), (2,), (0, 3, 5)),
    "repeated": ((2, 2, 5), (1, 3, 1, 1), (4, 0, 4), (5, 5), (3, 1, 3, 1)),
    "cancelling": ((1, 1, 4), (1, 3, 1), (2, 2), (1, 4, 1, 1), (0, 2, 0, 2)),
    "apart": ((0,), (1, 2), (4,), (2, 0), (4,)),
    "no-rows": ((0, 3), (), (1,), (), (0, 3)),
    "low": ((3, 0), (1, 1), (2, 3, 2), (), (0, 2, 0)),
    "out-of-range": ((1, 2), (0, 6, 3), (4, -1, 5), (0, 3)),
}
ROWS["unsorted"] = tuple(rows[::-1] for rows in ROWS["sorted"])
ROWS["zero-rows"] = ROWS["scales"] = ROWS["sorted"]
ROWS["repeated-scales"] = ROWS["repeated"]
"""By variant, the rows that the table's gradient gives at each step.

sorted           no row twice.
unsorted         the same gradients, the rows given in the reverse order.
repeated         rows given up to three times in a step.
cancelling       a row's second values are minus its first, so that they add up to
                 zeros; a third time, at step 4, is left.
zero-rows        sorted, but the first row of each step is zero; some of these zeros
                 are -0.0.
apart            rows 3 and 5 are never given.
no-rows          none at all at steps 2 and 4.
low              rows below 4, for the table of rank 3 too.
scales           sorted times 2**-10, 1, 2**10, 2**-10, ... step by step.
repeated-scales  the same of repeated.
out-of-range     rows 6 of 6 and -1, each among others; no "b".
"""


def params(leaves):
    """The initial parameters: multiples of 1/128 in (-1, 1), leaf by leaf."""
    rng = np.random.RandomState(0)
    drawn = {name: rng.random_sample(shape) for name, shape in SHAPES.items()}
    return {
        name: np.float32(np.round(256 * drawn[name] - 128) / 128) for name in leaves
    }


def gradients(variant, table="w", as_dense=False):
    """A dict a step: a row-sparse gradient for the table and a dense one for "b".

    The entries are odd multiples of 1/128 (before any scaling): none is zero, and
    the float32 sum of repeated rows is exact in any order. With ``as_dense`` the table
    gets the dense gradient that the rows stand for.
    """
    rng = np.random.RandomState(4)
    sequence = []
    for step, indices in enumerate(ROWS[variant]):
        scale = (2.0**-10, 1.0, 2.0**10)[step % 3] if "scales" in variant else 1.0
        values = scale * odd(rng, (4, *SHAPES[table][1:]))[: len(indices)]
        b = scale * odd(rng, SHAPES["b"])
        if variant == "unsorted":
            values = values[::-1]
        if variant == "cancelling":
            cancel(indices, values)
        if variant == "zero-rows":
            values[0] *= 0.0
        grads = {table: rows(indices, values, SHAPES[table]), "b": b}
        if variant == "out-of-range":
            del grads["b"]
        sequence.append({k: dense(g) for k, g in grads.items()} if as_dense else grads)
    return sequence


def odd(rng, shape):
    return np.float32((2 * np.floor(128 * rng.random_sample(shape)) - 127) / 128)


def cancel(indices, values):
    """Sets the second values of a row to minus its first."""
    first = {}
    for k, index in enumerate(indices):
        if index in first:
            values[k] = -values[first.pop(index)]
        else:
            first[index] = k


def rows(indices, values, dense_shape):
    """A row-sparse gradient, the way the traces write it."""
    return {
        "indices": np.int64(indices),
        "values": np.float32(values),
        "dense_shape": dense_shape,
    }


def dense(grad):
    if not isinstance(grad, dict):
        return grad
    total = np.zeros(grad["dense_shape"], np.float32)
    np.add.at(total, grad["indices"], grad["values"])
    return total


_RATE = {"learning_rate": 0.1, "initial_accumulator_value": 0.1, "epsilon": 1e-7}
_BARE = dict(_RATE, initial_accumulator_value=0.0)

ADAGRAD = [
    ("sorted", "sorted", dict(_RATE)),
    ("unsorted", "unsorted", dict(_RATE)),
    ("repeated", "repeated", dict(_RATE)),
    ("cancelling", "cancelling", dict(_RATE)),
    ("cancelling-bare", "cancelling", dict(_BARE)),
    ("zero-rows", "zero-rows", dict(_RATE)),
    ("zero-rows-bare", "zero-rows", dict(_BARE)),
    ("apart", "apart", dict(_RATE)),
    ("apart-bare", "apart", dict(_BARE)),
    ("no-rows", "no-rows", dict(_RATE)),
    ("scales", "scales", dict(_RATE)),
    ("large-epsilon", "repeated-scales", dict(_BARE, learning_rate=0.5, epsilon=1e-3)),
    ("zero-epsilon", "apart", dict(_BARE, epsilon=0.0)),
    ("zero-epsilon-zero-rows", "zero-rows", dict(_BARE, epsilon=0.0)),
    ("exponential-decay", "repeated", dict(_RATE, learning_rate=_format.EXPONENTIAL)),
    ("clipvalue", "scales", dict(_RATE, clipvalue=0.5)),
    ("clipvalue-repeated", "repeated-scales", dict(_RATE, clipvalue=0.5)),
    ("clipnorm", "scales", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-repeated", "repeated-scales", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-cancelling", "cancelling", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-zero-rows", "zero-rows", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-no-rows", "no-rows", dict(_RATE, clipnorm=1.0)),
]
"""What every Keras-like Adagrad is run with: (name, variant, its arguments)."""

_FTRL = {
    "learning_rate": 0.5,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.3,
    "l2_regularization_strength": 0.2,
    "l2_shrinkage_regularization_strength": 0.0,
}
_SHRINKAGE = dict(_FTRL, l2_shrinkage_regularization_strength=0.1)

FTRL = [
    ("sorted", "sorted", dict(_FTRL)),
    ("unsorted", "unsorted", dict(_FTRL)),
    ("repeated", "repeated", dict(_FTRL)),
    ("cancelling", "cancelling", dict(_FTRL)),
    ("zero-rows", "zero-rows", dict(_FTRL)),
    ("apart", "apart", dict(_FTRL)),
    ("no-rows", "no-rows", dict(_FTRL)),
    ("scales", "scales", dict(_FTRL)),
    ("shrinkage", "repeated", dict(_SHRINKAGE)),
    ("shrinkage-zero-rows", "zero-rows", dict(_SHRINKAGE)),
    ("power", "repeated", dict(_FTRL, learning_rate_power=-0.7)),
    ("rank-1", "repeated", dict(_FTRL), "v"),
    ("rank-3", "low", dict(_FTRL), "t"),
    ("repeated-as-dense", "repeated", dict(_FTRL), "w", True),
]
"""What every FTRL is run with: (name, variant, its arguments, table, as_dense)."""

PROXIMAL_ADAGRAD = {
    "learning_rate": 0.3,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.2,
    "l2_regularization_strength": 0.2,
}

KERAS_FTRL = [
    *FTRL,
    ("clipnorm", "scales", dict(_FTRL, clipnorm=1.0)),
    ("clipvalue", "scales", dict(_FTRL, clipvalue=0.5)),
    ("exponential-decay", "repeated", dict(_FTRL, learning_rate=_format.EXPONENTIAL)),
]
"""What every FTRL of Keras is run with."""

GLOBAL_CLIPNORM = [
    ("global-clipnorm", "scales", dict(_RATE, global_clipnorm=1.0)),
    ("global-clipnorm-repeated", "repeated-scales", dict(_RATE, global_clipnorm=1.0)),
    ("global-clipnorm-zero-rows", "zero-rows", dict(_RATE, global_clipnorm=1.0)),
]

EXTRA = [
    ("rank-1", "repeated", dict(_RATE), "v"),
    ("rank-3", "low", dict(_RATE), "t"),
    ("repeated-as-dense", "repeated", dict(_RATE), "w", True),
    ("out-of-range", "out-of-range", dict(_RATE)),
]
"""More of them: other tables, the dense gradients, and what is refused."""

_ADAM = (0.1, 0.9, 0.99, 1e-12)

LAZY_ADAM = [
    ("sorted", "sorted", _ADAM),
    ("unsorted", "unsorted", _ADAM),
    ("repeated", "repeated", _ADAM),
    ("cancelling", "cancelling", _ADAM),
    ("zero-rows", "zero-rows", _ADAM),
    ("apart", "apart", _ADAM),
    ("no-rows", "no-rows", _ADAM),
    ("scales", "repeated-scales", (0.5, 0.5, 0.9, 1e-12)),
    ("default-epsilon", "repeated", (0.001, 0.9, 0.999, 1e-7)),
    ("rank-1", "repeated", _ADAM, "v"),
    ("rank-3", "low", _ADAM, "t"),
    ("repeated-as-dense", "repeated", _ADAM, "w", True),
]
"""What every Adam by the row is run with: (name, variant, rate and so on)."""


def ours_lazy_adam(rate, b1, b2, eps):
    """``ours`` of an Adam by the row, or ``why_not``."""
    if eps > 1e-8:
        return {
            "ours": None,
            "why_not": "epsilon is added to the root before its bias correction there; "
            "optax adds it after",
        }
    inner = {"transformation": "optax.adam", "b1": b1, "b2": b2, "eps": eps}
    inner["learning_rate"] = rate
    return {"ours": {"transformation": "lazy", "inner": inner}}


ROW_BY_ROW = {
    "clipvalue": "a repeated row is clipped time by time there; ours sums it first",
    "clipnorm": "a repeated row counts time by time in the norm there; ours sums it "
    "first",
}
ROW_BY_ROW["global_clipnorm"] = ROW_BY_ROW["clipnorm"]


def why_not(settings, variant):
    """Why ours has no such trace: an error, or a clip of rows given more than once."""
    if variant == "out-of-range":
        return "errors, in TensorFlow's words"
    repeats = any(len(set(rows)) < len(rows) for rows in ROWS[variant])
    for clip, reason in ROW_BY_ROW.items():
        if clip in settings and repeats:
            return reason
    return None


def error_of(error):
    """Its type and first line, without the names of the node and the device."""
    message = str(error).split("\n", 1)[0].split("}} ")[-1]
    return {"type": type(error).__name__, "message": message}
