"""Caches that a loop carries, on the host, against ``jax.jit`` on the device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from tests.in_numpy import Program as Traced
from tests.training.losses import OLD

LAYERS, BATCH, TOKENS, WIDTH = 4, 3, 8, 16
MEMORIES = ["device"] if OLD else ["device", "host"]


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


W = 0.2 * draw(LAYERS, WIDTH, WIDTH)
X = draw(BATCH, WIDTH)
CACHE = {
    "k": draw(LAYERS, BATCH, TOKENS, WIDTH),
    "v": jnp.zeros((LAYERS, BATCH, TOKENS, WIDTH)),
}


def attended(x, w, cache, i):
    """One layer for a token; its keys and values are in the cache then."""
    k, v = cache["k"], cache["v"]
    k, v = k.at[..., i, :].set(x), v.at[..., i, :].set(jnp.tanh(x))
    scores = jnp.einsum("...td,...d->...t", k, x) / TOKENS / WIDTH
    x = x / 2 + jnp.tanh(x @ w) + jnp.einsum("...t,...td->...d", scores, v)
    return x, {"k": k, "v": v}


def token(w, x, cache, i):
    return jax.lax.scan(lambda x, each: attended(x, *each, i), x, (w, cache))


# Functions of the layers, the cache and x.
PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def turns(step, x, cache):
    """A loop over tokens; its results are those of the steps, and the cache."""

    def body(carry, i):
        x, cache = step(*carry, i)
        return (x, cache), x.sum()

    (x, cache), sums = jax.lax.scan(body, (x, cache), jnp.arange(TOKENS))
    return (x, sums), cache


def until(goes_on, w, cache, x):
    """A loop over tokens that ends by itself; the results have their number."""

    def step(carry):
        x, cache, i = carry
        return *token(w, x, cache, i), i + 1

    x, cache, i = jax.lax.while_loop(goes_on, step, (x, cache, 0))
    return (x, i), cache


@program
def each_token(w, cache, x):
    return turns(lambda x, cache, i: token(w, x, cache, i), x, cache)


@program
def until_a_token(w, cache, x):
    def goes_on(carry):
        _, cache, i = carry
        return (i < TOKENS) & (jnp.abs(cache["v"]).sum() < 30)

    return until(goes_on, w, cache, x)


@program
def beams(w, cache, x):
    """They are reordered after each token, and in front of one."""

    def step(x, cache, i):
        cache = jax.tree.map(lambda c: c[:, ::-1], cache)
        x, cache = token(w, x, cache, i)
        order = jnp.argsort(x[:, 0])
        return x[order], jax.tree.map(lambda c: jnp.take(c, order, 1), cache)

    return turns(step, x, cache)


@program
def written_behind_the_scan(w, cache, x):
    """The scan gives one entry a layer, and the cache gets all of them at once."""

    def step(x, cache, i):
        def layer(x, each):
            w, k, v = each
            y, new = attended(x, w, {"k": k, "v": v}, i)
            return y, (new["k"][:, i], new["v"][:, i])

        x, (k, v) = jax.lax.scan(layer, x, (w, cache["k"], cache["v"]))
        k, v = (y[:, :, None] for y in (k, v))
        at = jax.lax.dynamic_update_slice_in_dim
        return x, {"k": at(cache["k"], k, i, 2), "v": at(cache["v"], v, i, 2)}

    return turns(step, x, cache)


@program
def read_after_it_is_written(w, cache, x):
    """The old cache is another value than the new one; halves trade places."""

    def step(x, cache, i):
        y, new = token(w, x, cache, i)
        again, _ = token(w, jnp.cos(x), cache, i)
        before = jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, cache))
        return y + again + jnp.tanh(before), {"k": new["v"], "v": new["k"]}

    return turns(step, x, cache)


@program
def results_in_another_order(w, cache, x):
    """What goes over two equal stacks gives back the second one first."""

    def step(x, cache, i):
        def layer(x, each):
            w, k, v = each
            x, new = attended(x, w, {"k": k, "v": v}, i)
            return x, (new["v"], new["k"])

        x, (v, k) = jax.lax.scan(layer, x, (w, cache["k"], cache["v"]), reverse=True)
        return x, {"k": k, "v": v}

    return turns(step, x, cache)


@program
def in_a_branch(w, cache, x):
    def step(x, cache, i):
        return jax.lax.cond(
            i % 2 == 0, lambda: token(w, x, cache, i), lambda: (x, cache)
        )

    return turns(step, x, cache)


@program
def loops_in_loops(w, cache, x):
    """Several tokens a turn, inside of ``jit``; the cache is also scaled and cast."""

    @jax.jit
    def step(x, cache, i):
        x, cache = jax.lax.fori_loop(0, 2, lambda _, c: token(w, *c, i), (x, cache))
        half = jax.tree.map(lambda c: (0.5 * c).astype(jnp.bfloat16), cache)
        return x, jax.tree.map(lambda c: c.astype(jnp.float32), half)

    return turns(step, x, cache)


@program
def unchanged(w, cache, x):
    def step(x, cache, i):
        return token(w, x, cache, i)[0], cache

    return turns(step, x, cache)


def until_its_own_end(w, cache, x):
    """For one example; under ``vmap`` each leaves the loop by itself."""

    def goes_on(carry):
        x, _, i = carry
        return (i < TOKENS) & (x[0] < 0.3)

    return until(goes_on, w, cache, x)


@program
def a_batch(w, cache, x):
    first = jax.tree.map(lambda c: c.swapaxes(0, 1), cache)
    results, cache = jax.vmap(until_its_own_end, (None, 0, 0))(w, first, x)
    return results, jax.tree.map(lambda c: c.swapaxes(0, 1), cache)


# These add up or cast a whole cache.
READ_WHOLE = {"loops_in_loops", "read_after_it_is_written", "until_a_token"}


def evaluated(f, memory, w=W, cache=CACHE, x=X, layers=("w", "cache")):
    """What ``gx.evaluate`` gives, and ``jax.jit``."""

    def of_both(both, x):
        return f(both["w"], both["cache"], x)

    both = {"w": w, "cache": cache}
    wanted = jax.jit(of_both)(both, x)
    if memory == "host":
        both = gx.on_host(both, min_size=1)
    return gx.evaluate(of_both, layers=layers)(both, x), wanted


def check(got, wanted, rtol=2e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol),
        jax.device_get(got),
        jax.device_get(wanted),
    )


@pytest.mark.every
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cache_of_a_traced_program(name):
    """In NumPy. It stays where it lies, and a layer at a time goes there and back."""
    f, both = PROGRAMS[name], {"w": W, "cache": CACHE}

    def of_both(both, x):
        return f(both["w"], both["cache"], x)

    there = both if OLD else gx.on_host(both, min_size=1)
    program = jax.make_jaxpr(gx.evaluate(of_both, layers=["w", "cache"]))(there, X)
    wanted = Traced(jax.make_jaxpr(of_both)(both, X))(both, X)
    check(Traced(program)(both, X), wanted)
    if OLD or name == "a_batch":  # It is turned at the end.
        return
    spaces = [x.memory_space for x in program.out_avals]
    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    assert spaces == [device] * (len(spaces) - 2) + [host] * 2
    moved = re.findall(r":f32(?:<host>)?\[([\d,]+)\] = device_put", str(program))
    whole = ",".join(map(str, CACHE["k"].shape))
    assert moved
    assert (whole in moved) == (name in READ_WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cache(name, memory):
    got, wanted = evaluated(PROGRAMS[name], memory)
    check(got, wanted)
    there = {x.sharding.memory_kind for x in jax.tree.leaves(got[1])}
    is_on_host = memory == "host" and name != "a_batch"  # It is turned at the end.
    assert there == {"pinned_host" if is_on_host else "device"}


@pytest.mark.skipif(OLD, reason="Results stay on the device.")
def test_a_batch_that_leaves_a_loop_one_by_one():
    first = jax.tree.map(lambda c: c.swapaxes(0, 1), CACHE)
    f = jax.vmap(until_its_own_end, (None, 0, 0))
    (results, cache), wanted = evaluated(f, "host", cache=first)
    assert len({*wanted[0][1].tolist()}) > 1  # They leave it at different turns.
    check((results, cache), wanted)
    assert {x.sharding.memory_kind for x in cache.values()} == {"pinned_host"}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_layers_and_half_precision(layers, dtype):
    w = W[:layers].astype(dtype)
    cache = jax.tree.map(lambda c: c[:layers].astype(dtype), CACHE)
    got, wanted = evaluated(each_token, MEMORIES[-1], w, cache, X.astype(dtype))
    assert jax.tree.map(jax.typeof, got[0]) == jax.tree.map(jax.typeof, wanted[0])
    check(jax.tree.map(lambda x: np.asarray(x, np.float32), got), wanted, 2e-2)


@pytest.mark.skipif(OLD, reason="Results stay on the device.")
def test_an_argument_on_the_host_comes_whole():
    f = gx.evaluate(lambda p, x: jnp.sum(p["w"]) + 2 * x["a"], layers=())
    x = gx.on_host({"a": jnp.ones((4, 8))}, min_size=1)
    np.testing.assert_array_equal(f({"w": jnp.ones(3)}, x), np.full((4, 8), 5.0))


@pytest.mark.figures
@pytest.mark.parametrize("name", ["each_token", "until_a_token", "beams"])
def test_at_most_a_few_layers_are_on_the_device(name):
    layers, tokens, width = 16, 64, 128
    shape = jax.ShapeDtypeStruct((layers, BATCH, tokens, width), "float32")
    both = {
        "w": jax.ShapeDtypeStruct((layers, width, width), "float32"),
        "cache": {"k": shape, "v": shape},
    }
    f = PROGRAMS[name]
    x = jax.ShapeDtypeStruct((BATCH, width), "float32")

    def kept(evaluate):
        step = jax.jit(evaluate, donate_argnums=0)
        memory = step.lower(both, x).compile().memory_analysis()
        return memory.temp_size_in_bytes / (2 * 4 * shape.size)

    def plain(both, x):
        return f(both["w"], both["cache"], x), both["w"]

    assert kept(gx.evaluate(plain, layers=["w", "cache"])) < 0.15
    assert kept(plain) > 0.9
