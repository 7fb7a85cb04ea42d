"""Small optimizers of matrices, as people write them: of a leaf, of stacks by vmap.

Factors begin with full rank: those of zeros have eigenbases that are arbitrary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class State(NamedTuple):
    """A count, a key, and for each leaf a tuple of arrays."""

    count: Any
    key: Any
    leaves: Any


def spd(n):
    """A matrix of full rank, with eigenvalues that differ."""
    x = jnp.arange(n, dtype=jnp.float32)
    return jnp.diag(1.0 + x / n) + 0.1 / (1.0 + jnp.abs(x[:, None] - x[None, :]))


def optimizer(init_one, update_one, *, with_key=False):
    """A transformation of functions for one matrix: vmap is over axes in front.

    ``update_one(g, leaf, p, count, key)`` returns an update and a new leaf.
    """

    def stacked(f, ndim, in_axes):
        for _ in range(ndim - 2):
            f = jax.vmap(f, in_axes)
        return f

    def init(params):
        def one(p):
            return (
                stacked(init_one, p.ndim, 0)(p.astype("float32")) if p.ndim > 1 else ()
            )

        key = jax.random.key(0) if with_key else None
        leaves = jax.tree.map(one, params)
        return State(jnp.zeros((), jnp.int32), key, leaves)

    def update(updates, state, params=None):
        flat, treedef = jax.tree.flatten(updates)
        old, weights = treedef.flatten_up_to(state.leaves), jax.tree.leaves(params)
        key, *keys = [None] * (len(flat) + 1)
        if with_key:
            key, *keys = jax.random.split(state.key, len(flat) + 1)
        made, new = [], []
        for g, before, p, k in zip(flat, old, weights, keys, strict=True):
            if g.ndim < 2:
                u, leaf = g, ()
            else:
                count = jnp.size(g) // (g.shape[-1] * g.shape[-2])
                each = None
                if with_key:
                    each = jax.random.split(k, count).reshape(g.shape[:-2])
                axes = 0, 0, 0, None, 0 if with_key else None
                f = stacked(update_one, g.ndim, axes)
                u, leaf = f(g.astype("float32"), before, p, state.count, each)
            made.append(-0.1 * u.astype(g.dtype))
            new.append(leaf)
        state = State(state.count + 1, key, treedef.unflatten(new))
        return treedef.unflatten(made), state

    return optax.GradientTransformation(init, update)


def soap(every=2, b1=0.9, b2=0.95):
    """Vyas et al.: Adam in the eigenbasis of Shampoo's factors; ``eigh``, then QR."""

    def init(p):
        m, n = p.shape
        zeros, eyes = jnp.zeros_like(p), (jnp.eye(m), jnp.eye(n))
        return zeros, zeros, (spd(m), spd(n)), eyes

    def refreshed(count, factors, bases):
        def first(factors, bases):
            del bases
            return tuple(jnp.linalg.eigh(x)[1] for x in factors)

        def later(factors, bases):
            pairs = zip(factors, bases, strict=True)
            return tuple(jnp.linalg.qr(x @ q)[0] for x, q in pairs)

        return jax.lax.cond(count == 0, first, later, factors, bases)

    def update(g, leaf, p, count, key):
        del p, key
        mu, nu, (left, right), (ql, qr) = leaf
        mu = b1 * mu + (1 - b1) * g
        projected = ql.T @ g @ qr
        nu = b2 * nu + (1 - b2) * projected**2
        u = ql @ ((ql.T @ mu @ qr) / (jnp.sqrt(nu) + 1e-3)) @ qr.T
        factors = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        bases = jax.lax.cond(
            count % every == 0,
            functools.partial(refreshed, count),
            lambda factors, bases: bases,
            *(factors, (ql, qr)),
        )
        return u, (mu, nu, factors, bases)

    return optimizer(init, update)


def at_once(every=2):
    """Shampoo of a tree, whose roots are all computed in one conditional."""

    def init(params):
        factors = jax.tree.map(lambda p: (spd(p.shape[-2]), spd(p.shape[-1])), params)
        roots = jax.tree.map(lambda x: jnp.eye(len(x)), factors)
        return State(jnp.zeros((), jnp.int32), None, (factors, roots))

    def update(updates, state, params=None):
        del params
        flat, treedef = jax.tree.flatten(updates)
        factors, roots = map(treedef.flatten_up_to, state.leaves)
        factors = [
            (0.9 * left + g @ g.T, 0.9 * right + g.T @ g)
            for g, (left, right) in zip(flat, factors, strict=True)
        ]

        def refreshed(factors, roots):
            del roots
            largest = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(factors)))
            return jax.tree.map(lambda x: root_by_eigh(x / largest), factors)

        roots = jax.lax.cond(
            state.count % every == 0,
            refreshed,
            lambda factors, roots: roots,
            *(factors, roots),
        )
        made = [a @ g @ b for g, (a, b) in zip(flat, roots, strict=True)]
        new = treedef.unflatten(factors), treedef.unflatten(roots)
        return treedef.unflatten(made), State(state.count + 1, None, new)

    return optax.GradientTransformation(init, update)


def fitted_at_once(every=2):
    """Two factors of each matrix, fitted as packages do: in one conditional for all.

    Its branch divides a key, draws a probe for each leaf, also of a whole stack, and
    makes a number of each factor and of an array of such. A conditional inside of it
    balances the factors of each matrix.
    """

    def each(f, *arrays):
        return (jax.vmap(f) if arrays[0].ndim > 2 else f)(*arrays)

    def init(params):
        def eyes(p):
            return tuple(
                jnp.broadcast_to(jnp.eye(n), (*p.shape[:-2], n, n))
                for n in p.shape[-2:]
            )

        sizes = jax.tree.map(lambda p: jnp.zeros(p.shape[:-2]), params)
        factors = jax.tree.map(eyes, params)
        return State(jnp.zeros((), jnp.int32), jax.random.key(0), (factors, sizes))

    def fit(g, q, r, size):
        a = q @ g @ r.T
        left, right = a @ a.T, a.T @ a
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(left)), size]))
        rate = 0.1 / largest
        return q - rate * left @ q, r - rate * right @ r, largest

    def balance(q, r):
        sizes = jnp.stack([jnp.max(jnp.abs(q)), jnp.max(jnp.abs(r))])
        scales = jnp.sqrt(jnp.prod(sizes)) / sizes
        return q * scales[0], r * scales[1]

    def update(updates, state, params=None):
        del params
        flat, treedef = jax.tree.flatten(updates)
        factors, sizes = map(treedef.flatten_up_to, state.leaves)
        key, now = jax.random.split(state.key)

        def fitted(key, factors, sizes):
            new, new_sizes = [], []
            keys = jax.random.split(key, len(flat))
            for g, both, size, k in zip(flat, factors, sizes, keys, strict=True):
                damping = 0.1 * jnp.mean(jnp.abs(g))
                noisy = g + damping * jax.random.normal(k, g.shape)
                *made, size_now = each(fit, noisy, *both, size)
                new.append(tuple(made))
                new_sizes.append(size_now)
            new = jax.lax.cond(
                jax.random.uniform(key) < 0.5,
                lambda new: [each(balance, *both) for both in new],
                lambda new: new,
                new,
            )
            return new, new_sizes

        factors, sizes = jax.lax.cond(
            state.count % every == 0,
            fitted,
            lambda _, factors, sizes: (factors, sizes),
            *(now, factors, sizes),
        )
        made = [
            each(lambda g, q, r: -0.1 * q.T @ (q @ g @ r.T) @ r, g, *both)
            for g, both in zip(flat, factors, strict=True)
        ]
        new = treedef.unflatten(factors), treedef.unflatten(sizes)
        return treedef.unflatten(made), State(state.count + 1, key, new)

    return optax.GradientTransformation(init, update)


def root_by_eigh(x):
    w, v = jnp.linalg.eigh(x)
    return (v * w ** (-1 / 4)) @ v.T


def root_by_newton(x):
    """X^(-1/4), by two coupled iterations for X^(-1/2)."""

    def inverse_root(a):
        """(a^(1/2), a^(-1/2))"""
        norm = jnp.linalg.norm(a)

        def step(_, yz):
            y, z = yz
            t = 0.5 * (3 * jnp.eye(len(a)) - z @ y)
            return y @ t, t @ z

        y, z = jax.lax.fori_loop(0, 12, step, (a / norm, jnp.eye(len(a))))
        return y * jnp.sqrt(norm), z / jnp.sqrt(norm)

    root, _ = inverse_root(x)
    return inverse_root(root)[1]


def shampoo(every=2, root=root_by_eigh, one_sided=False):
    """Gupta et al.; one-sided: only the factor of the shorter axis."""

    def sides(shape):
        m, n = shape
        return (m <= n, n < m) if one_sided else (True, True)

    def init(p):
        pairs = zip(sides(p.shape), p.shape, strict=True)
        factors = tuple(spd(n) if there else None for there, n in pairs)
        roots = jax.tree.map(lambda x: jnp.eye(len(x)), factors)
        return jnp.zeros_like(p), factors, roots

    def update(g, leaf, p, count, key):
        del p, key
        mu, (left, right), roots = leaf
        mu = 0.9 * mu + g
        if left is not None:
            left = 0.9 * left + g @ g.T
        if right is not None:
            right = 0.9 * right + g.T @ g
        roots = jax.lax.cond(
            count % every == 0,
            lambda factors, roots: jax.tree.map(root, factors),
            lambda factors, roots: roots,
            *((left, right), roots),
        )
        u = mu
        if left is not None:
            u = roots[0] @ u
        if right is not None:
            u = u @ roots[1]
        return u, (mu, (left, right), roots)

    return optimizer(init, update)


def kron(probability=0.5):
    """PSGD with triangular factors and random probes."""

    def init(p):
        m, n = p.shape
        return jnp.zeros_like(p), (jnp.eye(m), jnp.eye(n))

    def update(g, leaf, p, count, key):
        del p, count
        mu, (ql, qr) = leaf
        mu = 0.9 * mu + 0.1 * g
        probe, decide = jax.random.split(key)

        def fitted(ql, qr):
            v = jax.random.normal(probe, g.shape)
            a = ql @ mu @ qr.T
            b = jax.scipy.linalg.solve_triangular(qr.T, v.T, lower=True).T
            b = jax.scipy.linalg.solve_triangular(ql.T, b, lower=True)
            new = []
            for q, one, other in ((ql, a @ a.T, b @ b.T), (qr, a.T @ a, b.T @ b)):
                size = jnp.max(jnp.abs(one + other))
                new.append(q - 0.1 / size * jnp.triu(one - other) @ q)
            return tuple(new)

        due = jax.random.uniform(decide) < probability
        ql, qr = jax.lax.cond(due, fitted, lambda ql, qr: (ql, qr), ql, qr)
        u = ql.T @ (ql @ mu @ qr.T) @ qr
        return u, (mu, (ql, qr))

    return optimizer(init, update, with_key=True)


def newton_schulz(x):
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def normuon():
    """Muon, and a second moment of each row."""

    def init(p):
        return jnp.zeros_like(p), jnp.zeros((len(p), 1))

    def update(g, leaf, p, count, key):
        del p, count, key
        mu, nu = leaf
        mu = 0.95 * mu + g
        o = newton_schulz(0.95 * mu + g)
        nu = 0.9 * nu + 0.1 * jnp.mean(o**2, axis=1, keepdims=True)
        u = o / (jnp.sqrt(nu) + 1e-3)
        return u * jnp.sqrt(1.0 * u.size) / jnp.linalg.norm(u), (mu, nu)

    return optimizer(init, update)


def dion(rank=4):
    """Ahn et al.: a power iteration, with error feedback and column norms."""

    def init(p):
        n = p.shape[1]
        x = jnp.cos(jnp.arange(n * rank, dtype=jnp.float32)).reshape(n, rank)
        return jnp.zeros_like(p), jnp.linalg.qr(x)[0]

    def update(g, leaf, p, count, key):
        del p, count, key
        m, q = leaf
        b = m + g
        left, _ = jnp.linalg.qr(b @ q)
        right = b.T @ left
        m = b - 0.05 * left @ right.T
        q = right / (jnp.linalg.norm(right, axis=0, keepdims=True) + 1e-7)
        return left @ q.T, (m, q)

    return optimizer(init, update)


def spectral():
    """Spectral descent: U V^T times the nuclear norm."""

    def init(p):
        return (jnp.zeros_like(p),)

    def update(g, leaf, p, count, key):
        del p, count, key
        mu = 0.9 * leaf[0] + g
        u, s, v = jnp.linalg.svd(mu, full_matrices=False)
        return (u @ v) * jnp.sum(s), (mu,)

    return optimizer(init, update)


ALL = {
    "soap": soap,
    "shampoo": shampoo,
    "shampoo by Newton": functools.partial(shampoo, root=root_by_newton),
    "one-sided": functools.partial(shampoo, one_sided=True),
    "kron": kron,
    "normuon": normuon,
    "dion": dion,
    "spectral": spectral,
}
