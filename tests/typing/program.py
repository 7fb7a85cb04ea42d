"""A user's program for type checkers: they find the mistakes at its end, and no others.

``python -m tests.typing`` compares.
"""

import jax
import jax.numpy as jnp

import gradxform as gx

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def with_aux(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x, y), len(x)


def main() -> None:
    x, y = jnp.ones((4, 8, 3)), jnp.ones((4, 8))
    params: Params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    tx = gx.drop_stale(gx.adagrad(0.1), max_staleness=4)
    state = tx.init(params)

    loss, grads = gx.value_and_grad(loss_fn)(params, x[0], y[0])
    params, state = gx.apply_gradients(tx, grads, state, params, local_step=0)
    (loss, size), grads = gx.value_and_grad(with_aux, has_aux=True)(params, x[0], y[0])
    params = gx.apply_updates(params, {"w": -grads["w"], "b": None})
    print(loss.item(), size + 1, params["w"].sum(), gx.global_step(state))

    step = gx.minimize(loss_fn, tx)
    params, state, loss = step(params, state, x[0], y[0], local_step=1)
    print(len(step.lower(params, state, x[0], y[0], local_step=2).as_text()))
    step = gx.minimize(with_aux, tx, has_aux=True, donate=False)
    params, state, loss, size = step(params, state, x[0], y[0], local_step=2)

    local = gx.adagrad(0.1)
    steps, inner = gx.local_steps(loss_fn, local), local.init(params)
    with gx.ParameterServer(params, tx) as server:
        pulled, seen = server.pull()
        change, inner, losses = steps(pulled, inner, x, y)
        print(losses.mean(), pulled["w"] + change["w"])
        result = server.push(change, seen)
        print(result.staleness + result.global_step)

    tables = {"rows": jnp.zeros((5, 3))}
    _, sparse = gx.value_and_grad(lambda t: t["rows"][0].sum(), tables=["rows"])(tables)
    print(sparse["rows"].indices)
    server = gx.ParameterServer(tables, gx.adagrad(0.1))
    part, _ = server.pull({"rows": jnp.array([1, 2])})
    print(gx.lookup(part["rows"], 1), server.pull()[0]["rows"].shape)

    loss, params = step(params, state, x[0], y[0])[:2]  # a mistake
    print(pulled.w)  # a mistake
