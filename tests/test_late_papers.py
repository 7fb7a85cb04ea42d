"""Methods for late gradients, against runs of their authors' code.

``tests/golden/README.md`` says how the traces were made and what an event holds. Where
there is no trace, ``oracles.asynchronous`` runs the workers.
"""

import functools
import inspect
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests import oracles
from tests.conftest import half, promotion

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = {
    case["name"]: case
    for file in ("ringmaster.json", "fedasync.json", "flsim.json", "fadas.json")
    for case in json.loads((GOLDEN / file).read_text())["cases"]
}
FEDERATED = [name for name, case in CASES.items() if "problem" not in case]
# As the page on late gradients writes them.
WEIGHTS = {
    "1": lambda s: 1,
    "4 / max(4, s)": lambda s: 4 / jnp.maximum(4, s),
    "(s + 1)^-0.5": lambda s: 1 / jnp.sqrt(1 + s),
    "(2 / (s + 1))^0.5": lambda s: jnp.sqrt(2 / (1 + s)),
    "1 if s <= 1 else 0.25": lambda s: jnp.where(s <= 1, 1.0, 0.25),
    "1 if s <= 4 else 1 / (10 (s - 4) + 1)": lambda s: jnp.where(
        s <= 4, 1.0, 1 / (10 * (s - 4) + 1)
    ),
}
AGNOSTIC = "max(1, floor(sqrt(max(0, k - 1)))) - 1"


def root_of_the_step_before(k):
    return jnp.sqrt(jnp.maximum(k - 1, 1)) - 1


def is_ours(case):
    """Whether the library has a transformation for it."""
    return case["ours"] is not None and "transformation" in case["ours"]


OURS = [
    name
    for name, case in CASES.items()
    # Before, optax's Muon cannot transform a single array.
    if is_ours(case) and ("plain" not in name or optax.__version__ >= "0.2.8")
]


@pytest.fixture(autouse=True)
def float64():
    """Doubles on all threads: a server has a thread of its own."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def build(ours, settings=None):
    """The transformation that ``ours`` describes."""
    if isinstance(ours, list):
        return optax.chain(*map(build, ours))
    if isinstance(ours, str):
        return follows(ours, settings)
    ours = {name: value for name, value in ours.items() if name != "job"}
    name = ours.pop("transformation")
    if "inner" in ours:
        ours["inner"] = build(ours["inner"], settings)
    if name == "scale_by_muon":
        return optax.contrib.scale_by_muon(**ours)
    if "weight" in ours:
        weight = WEIGHTS[ours["weight"]]
        ours["weight"] = lambda s: weight(jnp.float64(s))  # Not float32.
    if ours.get("max_staleness") == AGNOSTIC:
        ours["max_staleness"] = root_of_the_step_before
    return getattr(optax if name in ("sgd", "adam") else gx, name)(**ours)


def follows(name, settings):
    """The authors' own optimizer, from its equations, to put behind a gate."""
    if name == "fadas":
        return amsgrad(settings["lr"], settings["beta1"], settings["beta2"])
    agnostic = "eta" in settings or "parameter_agnostic" in settings
    rate = settings.get("gamma", settings.get("eta"))

    def update(g, state, params=None, **extra):
        k, m = state
        a = (
            1 / jnp.sqrt(jnp.maximum(1.0, k))
            if agnostic
            else settings.get("alpha", 0.05)
        )
        m = a * g + (1 - a) * m
        if name == "muon":
            direction = (1 - a) * m + a * g
            u, sigma, v = jnp.linalg.svd(direction, full_matrices=False)
            sigma = sigma / (jnp.linalg.norm(sigma) + 1e-7)
            for _ in range(5):
                sigma = 3.4445 * sigma - 4.775 * sigma**3 + 2.0315 * sigma**5
            step = (u * sigma) @ v * np.sqrt(max(1.0, g.shape[0] / g.shape[1]))
        else:
            step = m / (jnp.linalg.norm(m) + 1e-10)
        rate_k = rate / (k + 1) ** 0.75 if agnostic else rate
        return -rate_k * step, (k + 1, m)

    def init(params):
        return jnp.float64(0), jnp.zeros_like(params)

    return optax.GradientTransformationExtraArgs(init, update)


def amsgrad(rate, b1, b2):
    """That of FADAS's authors, and of PyTorch, without its eps."""

    def update(g, state, params=None, **extra):
        t, m, v, largest = state
        t = t + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, g)
        largest = jax.tree.map(jnp.maximum, largest, v)
        factor = -rate * jnp.sqrt(1 - b2**t) / (1 - b1**t)
        step = jax.tree.map(lambda m, v: factor * m / jnp.sqrt(v), m, largest)
        return step, (t, m, v, largest)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.float64(0), zeros, zeros, zeros

    return optax.GradientTransformationExtraArgs(init, update)


def tree(leaves):
    return {name: jnp.asarray(leaf, jnp.float64) for name, leaf in leaves.items()}


@jax.jit
def quadratic(x, curvature, pull, noise):
    """The loss of the traces: its gradient is A x - b + noise."""

    def loss(x):
        return jnp.sum(x * (curvature @ x / 2 - pull + noise))

    return jax.value_and_grad(loss)(x)


def duration(case, worker, number):
    """How many seconds a gradient takes."""
    row = case["durations"][worker]
    return row[number % len(row)]


def crew(case):
    """The workers of a case, for an engine."""
    of = tree(case["problem"])

    def worker(index):
        def batch(number):
            noise = of["noise"][number % len(of["noise"])]
            return of["curvature"][index], of["pull"][index], noise

        return engines.Worker(
            quadratic, batch, functools.partial(duration, case, index)
        )

    return [worker(index) for index in range(len(case["durations"]))]


def run_equals(case, tx, expected, max_staleness=None, atol=1e-9):
    """The engine makes the same pushes, in the same order, with the same parameters."""
    start = tree(case["problem"])["start"]
    pushes = [event for event in expected if "given_up" not in event]
    job = engines.Job(start, tx, crew(case), len(pushes), max_staleness=max_staleness)
    with engines.simulated(job) as run, promotion():
        for push, event in zip(run.pushes, pushes, strict=True):
            for name in ("worker", "number", "local_step", "time"):
                assert getattr(push, name) == event[name]
            assert push.result.global_step == event["global_step"]
            assert push.result.applied == event.get("accepted", True)
            if "params" in event:
                w = run.server.state()["params"]
                np.testing.assert_allclose(w, event["params"], rtol=0, atol=atol)
    # After the last push nobody looks who else is late.
    last = expected.index(pushes[-1])
    before = [event for event in expected[:last] if "given_up" in event]
    assert run.counts().given_up == len(before)
    return run.counts()


def rows_of_the_page():
    """The code that stands on the page of papers, by the first words of the method."""
    page = pathlib.Path(__file__).parents[1] / "docs/coming_from/papers.md"
    cells = re.findall(r"^\| (\w.+?) \| `(.*?)` \| .*\|$", page.read_text(), re.M)
    return [(there.split(" (")[0], here) for there, here in cells]


ROWS = dict(rows_of_the_page())
# The traces that each row stands for.
PAPERS = {
    "asynchronous SGD": "sgd-cubes",
    "delay-adaptive SGD": "delay-adaptive-cubes",
    "Ringmaster ASGD": "ringmaster-3-cubes",
    "Ringmaster LMO, parameter-agnostic": "ringmaster-normalized-agnostic-noisy",
    "Rennala SGD": "rennala-3-linear",
    "Malenia SGD": "malenia-noisy",
    "incremental aggregated gradients, IA²SGD": "ia2sgd-noisy",
    "Ringleader ASGD": "ringleader-noisy",
    "FedAsync, polynomial weights": "fedasync-polynomial",
    "FedAsync, hinge": "fedasync-hinge",
    "FedBuff": "flsim-polynomial",
    "FADAS": "fadas",
}
# The rows of outer optimizers. They see no workers.
OUTER = {
    "momentum look-ahead, the outer optimizer": "look-ahead",
    "HeLoCo, its outer optimizer": "alignment",
}


@pytest.mark.parametrize("method", OUTER)
def test_a_row_of_an_outer_optimizer_equals_the_authors_runs(method):
    cases = json.loads((GOLDEN / "heloco.json").read_text())["cases"]
    (case,) = [case for case in cases if case["name"] == OUTER[method]]
    of = {"rate": case["settings"]["lr"], "b1": case["settings"]["momentum"]}
    tx = eval(ROWS[method], {"gx": gx, **of})
    params = tree(case["params"])
    state, step = tx.init(params), jax.jit(functools.partial(gx.apply_gradients, tx))
    for recorded in case["steps"]:
        params, state = step(tree(recorded["grads"]), state, params)
        for leaf, value in recorded["params"].items():
            np.testing.assert_allclose(params[leaf], value, rtol=0, atol=1e-9)


# The rows whose authors have published no code, and where their equations are tested.
EQUATIONS = {"Rescaled ASGD": "tests/contrib/test_scale_by_worker.py"}


@pytest.mark.slow
@pytest.mark.parametrize("method", PAPERS)
def test_a_row_of_the_page_equals_the_authors_runs(method):
    case = CASES[PAPERS[method]]
    assert ROWS.keys() == PAPERS.keys() | OUTER.keys() | EQUATIONS.keys()
    settings, of = case["settings"], {"gx": gx, "optax": optax, "jnp": jnp}
    of |= {"rate": 0.125, "R": 3, "B": 3, "n": len(case.get("durations", ()))}
    of |= {"K": 3, "M": 3, "b1": 0.9, "b2": 0.99, "eps": 1e-12}
    if method.startswith("Fed"):
        # The row of FedBuff has 1 / K, as the paper; FLSim adds up.
        of["rate"] = 0.25 * (of["K"] if method == "FedBuff" else 1)
    if "bias_correction" in ROWS[method]:
        known = inspect.signature(optax.amsgrad).parameters
        if "bias_correction_mu" not in known:
            pytest.skip("this optax corrects the second moment before its maximum")
    if "agnostic" in case["name"]:
        of["tx"] = follows(case["ours"]["inner"], settings)
    tx = eval(ROWS[method], of)
    atol = 1e-7 if "weight=" in ROWS[method] else 1e-9  # The weight is a float32.
    plays(case, tx, atol)


def plays(case, tx, atol):
    """The pushes of the trace, with stops at their times, give its parameters."""
    if case["name"] in FEDERATED:
        return federated_equals(case, tx, atol)
    max_staleness = case["ours"]["job"]["max_staleness"]
    if max_staleness == AGNOSTIC:
        max_staleness = root_of_the_step_before
    counts = run_equals(case, tx, case["events"], max_staleness, atol)
    assert counts.dropped == 0
    assert counts.accepted == counts.pushed


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*OURS} - {*PAPERS.values()}))
def test_the_authors_other_runs_are_played(name):
    # Muon adds 1e-7 to a norm, optax 1e-8 to one with the bias corrected.
    atol = 1e-6 if "muon-plain" in name else 1e-9
    case = CASES[name]
    plays(case, build(case["ours"], case["settings"]), atol)


def federated_equals(case, tx, atol):
    """Each push gives the parameters of the trace."""
    params = tree(case["params"])
    state, step = tx.init(params), jax.jit(functools.partial(gx.apply_gradients, tx))
    for event in case["events"]:
        grads = tree(event["grads"])
        with promotion():
            params, state = step(grads, state, params, local_step=event["local_step"])
        assert state.global_step == event["global_step"]
        if hasattr(state, "staleness"):
            assert state.staleness == event["staleness"]
        for leaf, value in event.get("params", {}).items():
            np.testing.assert_allclose(params[leaf], value, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "number", "gate"),
    half(
        ["noisy", "cubes", "one-dies"],
        [1, 3],
        ["drop_stale", "conditional_accumulator"],
    ),
)
def test_the_engine_without_stops(gate, number, pattern):
    """Ringmaster and Rennala as in their papers: late pushes come and are dropped."""
    case = next(case for name, case in CASES.items() if name.endswith(pattern))
    of = {name: np.array(value) for name, value in case["problem"].items()}
    collected = []

    def gradient(worker, number, params):
        noise = of["noise"][number % len(of["noise"])]
        return of["curvature"][worker] @ params - of["pull"][worker] + noise

    def rule(g, worker):  # The mean of every ``of_each`` pushes.
        collected.append(g)
        if len(collected) % of_each == 0:
            return 0.125 * sum(collected[-of_each:]) / of_each
        return None

    inner = optax.sgd(0.125)
    if gate == "drop_stale":
        tx, drops, of_each = gx.drop_stale(inner, number), number, 1
    else:
        tx, drops, of_each = gx.conditional_accumulator(inner, number), 0, number
    pushes = oracles.asynchronous(
        rule,
        of["start"],
        gradient,
        functools.partial(duration, case),
        len(case["durations"]),
        drops,
    )
    expected = list(itertools.islice(pushes, 40))
    assert {event["accepted"] for event in expected} == {True, False}
    run_equals(case, tx, expected)
