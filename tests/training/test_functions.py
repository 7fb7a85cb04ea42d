"""Functions that an update may call for each layer or row, as the page says.

The wanted numbers are those of the whole update in the ordinary step.
"""

import pathlib
import re

import numpy as np
import pytest

from tests.draw import programs
from tests.draw.updates import Update

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "by_layers.md"
TABLE = re.compile(r"^\| an update calls .*\n\|.*\n((?:\|.*\n)+)", re.M)
NAME = re.compile(r"`((?:jax|jnp|flax)\.[\w.]+)`")


def rows_of_page():
    """(what a row is about, where it runs, the functions)"""
    (table,) = TABLE.findall(PAGE.read_text())
    cells = [line.strip("|").split("|") for line in table.splitlines()]
    return [(a.strip(), where.strip(), NAME.findall(x)) for a, where, x in cells]


ROWS = rows_of_page()
BOTH = "by layers, and in `lazy`"
POSITIVE = "(m @ m.T + 3 * jnp.eye(6))"
LINE = "jnp.linspace(-1.0, 1.0, 9)"
IMAGE, FILTER = "m[None, None]", "m[None, None, :3, :3]"
OWN_KEY = "jax.random.fold_in(jax.random.key(0), n)"
# How it is called for a layer `m`, a matrix, whose number is `n`. Others take `m`.
CALLS = {
    "flax.linen.avg_pool": "flax.linen.avg_pool(m[..., None], (3, 3), (2, 1))",
    "flax.linen.max_pool": "flax.linen.max_pool(m[..., None], (3, 3), (2, 1))",
    "jax.experimental.io_callback": "jax.experimental.io_callback(abs, m, m)",
    "jax.image.resize": "jax.image.resize(m, (4, 9), 'cubic')",
    "jax.lax.approx_max_k": "jax.lax.approx_max_k(m, 2)",
    "jax.lax.associative_scan": "jax.lax.associative_scan(jnp.add, m)",
    "jax.lax.cond": "jax.lax.cond(m[0, 0] > 0, jnp.sin, jnp.cos, m)",
    "jax.lax.conv": f"jax.lax.conv({IMAGE}, {FILTER}, (1, 2), 'SAME')",
    "jax.lax.conv_general_dilated": f"jax.lax.conv_general_dilated({IMAGE}, {FILTER}, "
    "(2, 1), ((1, 2), (0, 1)), (1, 2), (2, 1))",
    "jax.lax.conv_general_dilated_patches": "jax.lax.conv_general_dilated_patches("
    f"{IMAGE}, (3, 2), (1, 1), 'VALID')",
    "jax.lax.conv_transpose": "jax.lax.conv_transpose(m[None, ..., None], "
    "m[:3, :3, None, None], (2, 2), 'SAME')",
    "jax.lax.custom_root": "jax.lax.custom_root(lambda y: y**3 - jnp.abs(m) - 1, "
    "jnp.ones_like(m), lambda f, x: jax.lax.fori_loop(0, 20, "
    "lambda _, y: y - f(y) / (3 * y**2), x), lambda g, y: y / g(jnp.ones_like(y)))",
    "jax.lax.fori_loop": "jax.lax.fori_loop(0, 3, lambda i, y: y @ m + i, m)",
    "jax.lax.linalg.tridiagonal": f"jax.lax.linalg.tridiagonal({POSITIVE})[1]",
    "jax.lax.linalg.tridiagonal_solve": "jax.lax.linalg.tridiagonal_solve("
    "m[0], m[1] + 5, m[2], m)",
    "jax.lax.map": "jax.lax.map(jnp.sort, m)",
    "jax.lax.reduce_window": "jax.lax.reduce_window(m, 0.0, jax.lax.add, (2, 3), "
    "(1, 2), 'SAME')",
    "jax.lax.scan": "jax.lax.scan(lambda c, row: (c + row, c), m[0], m)",
    "jax.lax.switch": "jax.lax.switch(1 + (m[0, 0] > 0), [jnp.sin, jnp.cos, abs], m)",
    "jax.lax.top_k": "jax.lax.top_k(m, 2)",
    "jax.lax.while_loop": "jax.lax.while_loop(lambda y: jnp.sum(y**2) < 50, "
    "lambda y: 2 * y + 1, m)",
    "jax.ops.segment_sum": "jax.ops.segment_sum(m, jnp.arange(6) // 2, 3)",
    "jax.pure_callback": "jax.pure_callback(abs, m, m, vmap_method='expand_dims')",
    "jax.random.beta": f"jax.random.beta({OWN_KEY}, jnp.abs(m) + 1, 2.0)",
    "jax.random.choice": "jax.random.choice(jax.random.key(0), m[0], (3,))",
    "jax.random.gamma": f"jax.random.gamma({OWN_KEY}, jnp.abs(m) + 1)",
    "jax.random.permutation": "jax.random.permutation(jax.random.key(0), m)",
    "jax.random.poisson": f"jax.random.poisson({OWN_KEY}, jnp.abs(m) + 1)",
    "jax.scipy.fft.dct": "jax.scipy.fft.idct(2 * jax.scipy.fft.dct(m) ** 2)",
    "jax.scipy.linalg.cho_solve": "jax.scipy.linalg.cho_solve("
    f"jax.scipy.linalg.cho_factor({POSITIVE}), m)",
    "jax.scipy.linalg.eigh_tridiagonal": "jax.scipy.linalg.eigh_tridiagonal("
    "m[0] + 5, m[1, 1:], eigvals_only=True)",
    "jax.scipy.linalg.expm": "jax.scipy.linalg.expm(0.3 * m)",
    "jax.scipy.linalg.expm_frechet": "jax.scipy.linalg.expm_frechet(0.3 * m, m)",
    "jax.scipy.linalg.lu_solve": "jax.scipy.linalg.lu_solve("
    f"jax.scipy.linalg.lu_factor({POSITIVE}), m)",
    "jax.scipy.linalg.polar": f"jax.scipy.linalg.polar({POSITIVE})",
    "jax.scipy.linalg.schur": f"jax.scipy.linalg.schur({POSITIVE})[0]",
    "jax.scipy.linalg.solve": f"jax.scipy.linalg.solve({POSITIVE}, m, assume_a='pos')",
    "jax.scipy.linalg.solve_triangular": f"jax.scipy.linalg.solve_triangular("
    f"{POSITIVE}, m)",
    "jax.scipy.linalg.sqrtm": f"jax.scipy.linalg.sqrtm({POSITIVE})",
    "jax.scipy.linalg.toeplitz": "jax.scipy.linalg.toeplitz(m[0])",
    "jax.scipy.ndimage.map_coordinates": "jax.scipy.ndimage.map_coordinates("
    "m, [m, m + 1], order=1)",
    "jax.scipy.signal.convolve2d": "jax.scipy.signal.convolve2d(m, m[:3, :3])",
    "jax.scipy.signal.fftconvolve": "jax.scipy.signal.fftconvolve(m, m[:3, :3])",
    "jax.scipy.sparse.linalg.bicgstab": "jax.scipy.sparse.linalg.bicgstab("
    f"{POSITIVE}, m[0], tol=1e-12)[0]",
    "jax.scipy.sparse.linalg.cg": "jax.scipy.sparse.linalg.cg("
    f"{POSITIVE}, m[0], tol=1e-12)[0]",
    "jax.scipy.sparse.linalg.gmres": "jax.scipy.sparse.linalg.gmres("
    f"{POSITIVE}, m[0], tol=1e-12)[0]",
    "jnp.bincount": "jnp.bincount((4 * jnp.abs(m)).astype(int).ravel(), length=9)",
    "jnp.convolve": "jnp.convolve(m[0], m[1, :3], mode='same')",
    "jnp.correlate": "jnp.correlate(m[0], m[1, :3], mode='same')",
    "jnp.digitize": f"jnp.digitize(m, {LINE})",
    "jnp.einsum": "jnp.einsum('ij,kj->ik', m, m)",
    "jnp.histogram": "jnp.histogram(m, bins=5)[0]",
    "jnp.interp": f"jnp.interp(m, {LINE}, jnp.arange(9.0)) + "
    "jnp.interp(m, jnp.sort(m[0]), m[1])",
    "jnp.kron": "jnp.kron(m[:2], m[:3])",
    "jnp.linalg.cholesky": f"jnp.linalg.cholesky({POSITIVE})",
    "jnp.linalg.eigh": f"jnp.linalg.eigh({POSITIVE})",
    "jnp.linalg.eigvalsh": f"jnp.linalg.eigvalsh({POSITIVE})",
    "jnp.linalg.inv": f"jnp.linalg.inv({POSITIVE})",
    "jnp.linalg.lstsq": f"jnp.linalg.lstsq({POSITIVE}, m)[0]",
    "jnp.linalg.matrix_power": f"jnp.linalg.matrix_power({POSITIVE}, -2)",
    "jnp.linalg.solve": f"jnp.linalg.solve({POSITIVE}, m)",
    "jnp.nonzero": "jnp.nonzero(m[0] > 0, size=6)[0]",
    "jnp.partition": "jnp.partition(m, 2)[..., 2]",
    "jnp.percentile": "jnp.percentile(m, 30)",
    "jnp.polyfit": "jnp.polyfit(jnp.arange(6.0), m[0], 2)",
    "jnp.polyval": "jnp.polyval(jnp.array([1.0, 2.0, 3.0]), m)",
    "jnp.put_along_axis": "jnp.put_along_axis(m, jnp.argmax(m, 1, keepdims=True), 0.0, "
    "1, inplace=False)",
    "jnp.quantile": "jnp.quantile(m, 0.3, axis=0)",
    "jnp.roll": "jnp.roll(m, 2, 0)",
    "jnp.searchsorted": f"jnp.searchsorted({LINE}, m) + "
    "jnp.searchsorted(jnp.sort(m[0]), m)",
    "jnp.take_along_axis": "jnp.take_along_axis(m, jnp.argsort(m), 1)",
    "jnp.tile": "jnp.tile(m, (2, 1))",
    "jnp.unique": "jnp.unique(jnp.round(m), size=6)",
}
HEAD = """
def f(x, y, w):
  def size(tree):
    return sum(jnp.sum(jnp.abs(v)) / v.size for v in jax.tree.leaves(tree))
  def one(m, n):
    total = 0.0
"""
FOOT = """
    return m * total, m + 1
  return jax.vmap(one)(x, jnp.arange(len(x)))
"""


def call_of(name, where):
    if name in CALLS or "random" not in name:
        return CALLS.get(name, f"{name}(m)")
    key = OWN_KEY if where == "by layers" else "jax.random.key(0)"
    return f"m + {name}({key}, {'m.shape' if where != 'not' else 'x.shape'})[0]"


def update(names, where, by_rows=False):
    """An update that calls them for each layer, and adds up what they give."""
    lines = "".join(f"    total += size({call_of(name, where)})\n" for name in names)
    x, y = 0.7 * np.random.default_rng(0).standard_normal((2, 4, 6, 6))
    args = {"x": x, "y": y, "w": np.ones((1, 1))}
    text = "import flax.linen" * ("flax" in lines) + HEAD + lines + FOOT
    program = programs.Program(text, args, {"x": 0, "y": 0}, 4)
    return Update(program, by_rows)


NAMES = [name for *_, names in ROWS for name in names]


def test_the_page_names_each_function_once():
    assert len({*NAMES}) == len(NAMES) > 100
    assert CALLS.keys() <= {*NAMES}
    assert {where for _, where, _ in ROWS} == {BOTH, "by layers", "not"}


SOME = ["jnp.linalg.inv", "jax.lax.conv", "jax.lax.reduce_window", "jnp.interp"]
# Few at a time, so that a wrong number is not lost among others.
PARTS = [
    (names[k : k + 8], where)
    for _, where, names in ROWS
    if where != "not"
    for k in range(0, len(names), 8)
]


def runs(names, where, *, by_rows):
    found = update(names, where, by_rows)
    with programs.wide():
        (found.check_rows if by_rows else found.check_layers)()


@pytest.mark.parametrize("by_rows", [False, True])
def test_some_functions_run(by_rows):
    runs(SOME, BOTH, by_rows=by_rows)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "where"), PARTS, ids=lambda x: x[0])
def test_which_functions_run_by_layers(names, where):
    runs(names, where, by_rows=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "where"), [x for x in PARTS if x[1] == BOTH], ids=lambda x: x[0]
)
def test_which_functions_run_by_rows(names, where):
    runs(names, where, by_rows=True)


@pytest.mark.slow
@pytest.mark.quick_case("jax.random.gamma-True")
@pytest.mark.parametrize(
    ("name", "by_rows"),
    [
        (name, by_rows)
        for _, where, names in ROWS
        for name in names
        for by_rows in ([False] if where == "not" else [])
        + ([True] if where != BOTH else [])
    ],
)
def test_which_functions_are_refused(name, by_rows):
    (where,) = (where for _, where, names in ROWS if name in names)
    message = update([name], where, by_rows).check()
    if name.endswith("io_callback") and not by_rows:
        assert "one call for a layer" in message
    else:
        assert f"may mix {'rows' if by_rows else 'layers'}, by" in message
