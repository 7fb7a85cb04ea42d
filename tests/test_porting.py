"""Tables of the pages on porting that are compared with more than one step.

``test_migration.py`` has all tables whose rows give one value. The code of these rows
is read from the pages, too. The expected values are those that TensorFlow 1.15.5 left
in ``golden``, or come from the formula of the original in float64 NumPy.
"""

import functools
import json
import pathlib
import re
import shutil
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing import event_accumulator

import gradxform as gx
from tests import test_golden

HERE = pathlib.Path(__file__).parent
PAGES = HERE.parent / "docs/coming_from"


def cases(name):
    return json.loads((HERE / f"golden/{name}.json").read_text())["cases"]


def table(page, first_cell):
    """The first two cells of each row of the table that begins with this cell."""
    text = (PAGES / page).read_text()
    head = rf"^\| {first_cell} \|.*\n\|---.*\n"
    (found,) = re.findall(rf"{head}((?:\|.*\n)*)", text, re.M)
    cells = re.findall(r"^\| (.+?) \| (.*?) ?\| .*?\|$", found, re.M)
    return [(there, here.strip("`")) for there, here in cells]


# The schedules of TensorFlow 1

SCHEDULES = {call.strip("`"): here for call, here in table("tensorflow.md", "schedule")}
RATES = cases("tf1_schedules")


def restarted(step, steps):
    n = int(np.log2(step // steps + 1))
    part = (step - steps * (2**n - 1)) / (steps * 2**n)
    return 0.1 * 0.5**n * (1 + np.cos(np.pi * part)) / 2


def linear_cosine(part):
    return 0.1 * ((1 - part) * (1 + np.cos(np.pi * part)) / 2 + 0.001)


# By the name and the option of each call, its formula. k is the step, n the steps.
FORMULAS = {
    "exponential_decay": lambda k, n: 0.1 * 0.5 ** (k / n),
    "exponential_decay staircase": lambda k, n: 0.1 * 0.5 ** (k // n),
    "piecewise_constant": lambda k, n: (0.1, 0.05, 0.01)[(k > n) + (k > 2 * n)],
    "polynomial_decay": lambda k, n: 0.01 + 0.09 * (1 - min(k, n) / n) ** 2,
    "polynomial_decay root": lambda k, n: 0.1 * (1 - min(k, n) / n) ** 0.5,
    "polynomial_decay cycle": lambda k, n: (
        0.01 + 0.09 * (1 - k / (n * max(1, -(-k // n)))) ** 2
    ),
    "natural_exp_decay": lambda k, n: 0.1 * np.exp(-0.5 * k / n),
    "natural_exp_decay staircase": lambda k, n: 0.1 * np.exp(-0.5 * (k // n)),
    "inverse_time_decay": lambda k, n: 0.1 / (1 + 0.5 * k / n),
    "inverse_time_decay staircase": lambda k, n: 0.1 / (1 + 0.5 * (k // n)),
    "cosine_decay": lambda k, n: (
        0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * min(k, n) / n)) / 2)
    ),
    "cosine_decay_restarts": restarted,
    "linear_cosine_decay": lambda k, n: linear_cosine(min(k, n) / n),
}
# Where TensorFlow multiplies by a rounded 1 / steps, and so is on the wrong side of a
# boundary: a staircase takes its step late, and a cycle begins early.
ROUNDED = {("staircase", 41): {41, 82, 164, 287}, ("cycle", 1000): {3000, 6000, 7000}}


def option(case):
    found = re.search(r"(\w+)=True|power=0.5", case["call"])
    return found[1] or "root" if found else ""


def formula(case):
    name = case["symbol"].removeprefix("tf.train.")
    rate = FORMULAS[f"{name} {option(case)}".strip()]
    return [rate(count, case["decay_steps"]) for count in case["counts"]]


def test_every_schedule_of_tensorflow_has_a_row():
    assert {case["call"] for case in RATES} == {k for k, v in SCHEDULES.items() if v}
    named = {re.match(r"tf.train.(\w+)", call)[1] for call in SCHEDULES}
    assert named == {
        *("exponential_decay", "piecewise_constant", "polynomial_decay"),
        *("natural_exp_decay", "inverse_time_decay", "cosine_decay"),
        *("cosine_decay_restarts", "linear_cosine_decay", "noisy_linear_cosine_decay"),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", RATES, ids=lambda case: case["name"])
def test_a_row_has_the_rates_of_tensorflow(case):
    names = {"jnp": jnp, "optax": optax, "steps": case["decay_steps"]}
    counts = np.int32(case["counts"])
    for x64 in (True, False):
        with jax.enable_x64(x64):
            schedule = eval(SCHEDULES[case["call"]], names)
            for called in (schedule, jax.jit(schedule)):
                rates = np.float64([called(count) for count in jnp.asarray(counts)])
                np.testing.assert_allclose(rates, formula(case), rtol=2e-5, atol=2e-8)
    # The root of 1 - 1, rounded, is up to 2.5e-4 there.
    atol = 3e-5 if option(case) == "root" else 2e-8
    same = np.isclose(rates, case["rates"], rtol=2e-5, atol=atol)
    others = {count for count, s in zip(case["counts"], same, strict=True) if not s}
    assert others == ROUNDED.get((option(case), case["decay_steps"]), set())


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_an_optimizer_counts_as_the_global_step_of_tensorflow():
    """The first update has the rate of step 0."""
    (case,) = [c for c in RATES if "piecewise" in c["name"] and c["decay_steps"] == 6]
    schedule = eval(SCHEDULES[case["call"]], {"optax": optax, "steps": 6})
    tx = gx.drop_stale(gx.scale_by_learning_rate(schedule), max_staleness=0)
    state, taken = tx.init(jnp.zeros(())), []
    for step in range(14):
        if step:  # A late gradient is dropped, and does not count.
            dropped, state = tx.update(jnp.ones(()), state, local_step=step - 1)
            assert dropped == 0
        update, state = tx.update(jnp.ones(()), state, local_step=step)
        taken.append(-float(update))
    expected = dict(zip(case["counts"], case["rates"], strict=True))
    for step in expected.keys() & {*range(14)}:
        assert abs(taken[step] - expected[step]) < 1e-8


# A checkpoint of TensorFlow 1

CHECKPOINTS = {case["name"]: case for case in cases("tf1_checkpoint")}
FROM_CHECKPOINT = dict(table("tensorflow.md", "in the checkpoint"))
# By the words of each row, the case and the transformation that goes on.
GO_ON = {
    "w/Adagrad": ("AdagradOptimizer", gx.adagrad(0.1, eps=0.0)),
    "w/Ftrl": ("FtrlOptimizer", gx.ftrl(0.1, l1_regularization_strength=0.01)),
    "w/Momentum": ("MomentumOptimizer", optax.sgd(0.1, momentum=0.9)),
    "w/Adam": ("AdamOptimizer", optax.adam(0.1)),
    "global_step": (
        "AdagradOptimizer-drop-stale",
        gx.drop_stale(gx.adagrad(0.1, eps=0.0), 1),
    ),
}


def reader(case, params):
    """The names of the rows, with the function of the page, for this checkpoint."""
    stored = case["checkpoint"]

    def load_variable(folder, name):
        assert folder == "folder"
        return np.array(stored[name], case.get("dtypes", {}).get(name, "float32"))

    page = (PAGES / "tensorflow.md").read_text()
    (block,) = re.findall(r"^```python\n(def load\(.*?)^```$", page, re.M | re.S)
    names = {"tf": types.SimpleNamespace(train=types.SimpleNamespace())}
    names["tf"].train.load_variable = load_variable
    names |= {"folder": "folder", "params": params, "jax": jax, "jnp": jnp}
    names |= {"gx": gx, "optax": optax}
    for name, variable in (("step", "global_step"), ("stale", "stale_counter")):
        if variable in stored:
            names[name] = load_variable("folder", variable)
    exec(block, names)
    return names


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("row", [row for row in FROM_CHECKPOINT if row != "`w`"])
def test_a_training_goes_on_from_a_checkpoint_of_tensorflow(row):
    name, tx = GO_ON[re.match("`(.*?)`", row)[1]]
    case = CHECKPOINTS[name]
    names = reader(case, test_golden.tree(case["then"][0]["params"]))
    params = jax.tree.map(jnp.asarray, eval(FROM_CHECKPOINT["`w`"], names))
    state = eval(FROM_CHECKPOINT[row], names)
    chex.assert_trees_all_equal_dtypes(state, tx.init(params))
    late = 0
    for recorded in case["then"]:
        extra = {k: recorded[k] for k in ("local_step",) if k in recorded}
        if extra:
            late += gx.global_step(state) - recorded["local_step"] > 1
        grads = test_golden.tree(recorded["grads"])
        params, state = gx.apply_gradients(tx, grads, state, params, **extra)
        expected = test_golden.tree(recorded["params"])
        test_golden.agree(params, expected, floor=1, rtol=1e-4)
        if extra:
            assert gx.global_step(state) == recorded["global_step"]
            assert state.stale_count == case["checkpoint"]["stale_counter"] + late
    moved = np.subtract(params["w"], case["checkpoint"]["w"])
    assert np.abs(moved).max() > 0.01


def test_a_scope_is_a_branch_and_parts_come_whole():
    case = CHECKPOINTS["scope-and-parts"]
    variables = {"table", "layer/kernel"}
    slots = {f"{name}/Adagrad" for name in variables}
    assert case["shapes"].keys() == variables | slots
    params = {"table": np.zeros((5, 2)), "layer": {"kernel": np.zeros(3)}}
    sums = reader(case, params)["load"]("/Adagrad")
    np.testing.assert_allclose(sums["layer"]["kernel"], np.full(3, 1.1), rtol=1e-6)
    touched = np.array([[1.1], [0.1], [0.1], [1.1], [0.1]])
    np.testing.assert_allclose(sums["table"], np.tile(touched, 2), rtol=1e-6)


# Layers of TensorFlow 1

LAYERS = {case["name"]: case for case in cases("tf1_layers")}


def row_here(words):
    """The code of the row of TensorFlow's page whose first cell has these words."""
    page, words = (PAGES / "tensorflow.md").read_text(), re.escape(words)
    (here,) = re.findall(rf"^\| [^|]*{words}[^|]* \| `(.*?)` \|", page, re.M)
    return here


@pytest.mark.parametrize("around", [False, True], ids=["beside", "in the gate"])
def test_averages_move_as_update_ops_do(around):
    """A push that is dropped moves them in TensorFlow. In the gate it does not."""
    case = LAYERS["batch-norm-drop-stale"]
    settings, params = case["settings"], test_golden.tree(case["params"])
    labels = {k: "averages" if "moving" in k else "train" for k in params}
    code = row_here("UPDATE_OPS)").replace('{"w": "train", "b": "averages"}', "labels")
    names = {"gx": gx, "optax": optax, "labels": labels}
    adagrad = gx.adagrad(settings["learning_rate"], eps=0.0)
    if around:
        code = code.replace("gx.drop_stale(tx, 1)", "tx")
        tx = gx.drop_stale(eval(code, names | {"tx": adagrad}), 1)
    else:
        tx = eval(code, names | {"tx": adagrad})
    server, dropped = gx.ParameterServer(params, tx), 0
    for event in case["events"]:
        batch, now = np.float32(event["batch"]), server.pull()[0]
        batch_averages = {"mean": batch.mean(axis=0), "variance": batch.var(axis=0)}
        grads = {k: np.float32(g) for k, g in event["grads"].items()}
        for name, average in batch_averages.items():
            old = np.asarray(now[f"moving_{name}"])
            part = np.float32(1 - settings["momentum"])
            grads[f"moving_{name}"] = part * (old - average)
        result = server.push(grads, event["local_step"])
        assert result.global_step == event["global_step"]
        after, dropped = server.pull()[0], dropped + (not result.applied)
        for name, value in event["params"].items():
            if around and dropped and "moving" in name:
                assert np.abs(after[name] - np.float32(value)).max() > 1e-3
            else:
                np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-6)
    assert dropped == 2


@pytest.mark.parametrize("name", [k for k in LAYERS if "regularizer" in k])
def test_a_regularizer_has_the_factor_of_tensorflow(name):
    case = LAYERS[name]
    params = test_golden.tree(case["params"])
    made = eval(
        row_here(f"{name}(0.01)"),
        {"optax": optax, "jax": jax, "tx": optax.identity()},
    )
    if isinstance(made, optax.GradientTransformation):
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = made.update(zeros, made.init(params), params)
    else:
        loss, grads = jax.value_and_grad(made)(params)
        np.testing.assert_allclose(loss, case["loss"], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], case["grads"]["w"], rtol=1e-6)


def test_summaries_without_an_engine_are_read_by_tensorboard():
    page = (PAGES / "tensorflow.md").read_text()
    fence = r"^```python\n([^`]*SummaryWriter\(.*?)^```$"
    (block,) = re.findall(fence, page, re.M | re.S)

    def loss_fn(params, x):
        return jnp.sum((params["w"] - x) ** 2)

    names = {"gx": gx, "optax": optax, "loss_fn": loss_fn}
    names |= {"params": {"w": jnp.zeros(3)}, "batches": [(jnp.ones(3),)] * 25}
    exec(block, names)
    events = event_accumulator.EventAccumulator(names["logs"]).Reload()
    shutil.rmtree(names["logs"])
    for tag, first in (("loss", 3.0), ("gradient_norm", 12**0.5)):
        points = events.Scalars(tag)
        assert [point.step for point in points] == [0, 10, 20]
        assert abs(points[0].value - first) < 1e-6
        assert points[2].value < points[1].value < points[0].value


# OpenSeq2Seq's configs

KEYS = {
    re.match("`(.*?)`", there)[1] if there.startswith("`") else there: here
    for there, here in table("novograd.md", "key")
}
SETTINGS = {
    **{"rate": 0.02, "min_lr": 1e-3, "power": 2.0, "steps": 100, "decay_steps": 20},
    **{"decay_rate": 0.5, "boundaries": [20, 60], "d_model": 512, "coefficient": 1.5},
    "max_lr": 0.0003,
}


def poly(k, of):
    if k < of["warmup"]:
        return of["rate"] * k / of["warmup"]
    left = 1 - np.clip((k - of["begin"]) / (of["steps"] - of["begin"]), 0, 1)
    return of["min_lr"] + (of["rate"] - of["min_lr"]) * left ** of["power"]


def cosine(k, of):
    if k < of["warmup"]:
        return of["rate"] * k / of["warmup"]
    part = np.clip((k - of["begin"]) / (of["steps"] - of["begin"]), 0, 1)
    half = (1 + np.cos(np.pi * part)) / 2
    return of["rate"] * (of["min_lr"] + (1 - of["min_lr"]) * half)


def exponential(k, of):
    decayed = of["decay_rate"] ** (max(0, k - of["begin"]) / of["decay_steps"])
    return max(of["min_lr"], of["rate"] * decayed)


def transformer(k, of):
    factor = of["coefficient"] * of["d_model"] ** -0.5
    least = min((k + 1) * of["warmup"] ** -1.5, (k + 1) ** -0.5)
    return min(of["max_lr"], of["rate"] * factor * least)


def inverse(k, of):
    scale = ((of["rate"] / of["min_lr"]) ** (1 / of["power"]) - 1) / of["decay_steps"]
    return of["rate"] / (1 + scale * k) ** of["power"]


# By the key of each row. k is the step.
POLICIES = {
    '"lr_policy": poly_decay': poly,
    '"lr_policy": cosine_decay': cosine,
    '"lr_policy": exp_decay': exponential,
    '"lr_policy": piecewise_constant': lambda k, of: (
        of["rate"] * (1, 0.1, 0.01)[sum(k > b for b in of["boundaries"])]
    ),
    '"lr_policy": transformer_policy': transformer,
    '"lr_policy": inv_poly_decay': inverse,
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("unit", [1, 100, 1000, 10_000])  # Up to a million steps.
@pytest.mark.parametrize(("warmup", "begin"), [(10, 10), (10, 30)])
@pytest.mark.parametrize("key", POLICIES)
def test_a_policy_of_openseq2seq_has_its_rates(key, warmup, begin, unit):
    of = SETTINGS | {"warmup": unit * warmup, "begin": unit * begin}
    of |= {key: unit * SETTINGS[key] for key in ("steps", "decay_steps")}
    of["boundaries"] = [unit * boundary for boundary in SETTINGS["boundaries"]]
    of["max_lr"] /= unit**0.5
    for x64 in (True, False):
        with jax.enable_x64(x64):
            schedule = jax.jit(eval(KEYS[key], {"optax": optax, "jnp": jnp, **of}))
            counts = [unit * n + k for n in range(110) for k in {0, min(1, unit - 1)}]
            rates = jax.vmap(schedule)(jnp.int32(counts))
            expected = [POLICIES[key](count, of) for count in counts]
            np.testing.assert_allclose(rates, expected, rtol=2e-5, atol=1e-8)
            assert len({round(rate, 9) for rate in expected}) > 2


PARAMS = {"w": np.array([1.0, -2.0, 3.0]), "b": np.array(0.5)}
GRADS = {"w": np.array([0.4, -0.8, 1.2]), "b": np.array(0.6)}
SMALL = GRADS | {"b": np.array(0.02)}  # LARC leaves this b as it is.


def clipped(grads):
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    return {k: g / max(1, norm) for k, g in grads.items()}


def larced(grads):
    """The gradients behind LARC, at a rate of 0.02."""
    limits = {
        k: 0.001 * np.linalg.norm(PARAMS[k]) / (0.02 * (np.linalg.norm(g) + 1e-7))
        for k, g in grads.items()
    }
    return {k: np.clip(limits[k], 1e-7, 1) * g for k, g in grads.items()}


def regularized(grads):
    return grads | {"w": grads["w"] + 0.001 * PARAMS["w"]}


def page_larc():
    """The function on the page."""
    text = (PAGES / "novograd.md").read_text()
    (code,) = re.findall(r"^def larc\(.*?(?=^steps = )", text, re.M | re.S)
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    exec(code, names)
    return names["larc"]


@pytest.mark.usefixtures("standard_promotion")
def test_larc_is_finite_where_a_warmup_begins():
    """There is no rate, and a bias of zeros has no norm: OpenSeq2Seq's 0/0."""
    names = {"optax": optax, "rate": 0.02, "min_lr": 1e-5, "power": 2.0, "steps": 100}
    names |= {"warmup": 2, "begin": 2}
    rate = eval(KEYS['"lr_policy": poly_decay'], names)
    larc = page_larc()(rate, eta=0.001)
    params = {"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}
    grads, state = {"w": jnp.array([0.0, 2.0]), "b": jnp.ones(2)}, larc.init(params)
    for of_w in (1.0, 0.001 * 5 / (0.01 * 2), 0.001 * 5 / (0.02 * 2)):
        scaled, state = jax.jit(larc.update)(grads, state, params)
        np.testing.assert_allclose(scaled["w"], [0, 2 * of_w], rtol=1e-5)
        np.testing.assert_allclose(scaled["b"], [1e-7, 1e-7], rtol=1e-5)


def mean_of(values):
    """The code in a program of eight devices, each with its own gradient."""

    def mean(code):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        spec = jax.sharding.PartitionSpec("data")
        local = functools.partial(eval, code, {"jax": jax})
        mapped = jax.shard_map(
            lambda grads: local({"grads": grads}),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
        got = jax.jit(mapped)(jnp.asarray(values))
        np.testing.assert_allclose(got[0], values.mean(axis=0), rtol=1e-12)

    return mean


def steps_on(*gradients, pushed=(GRADS,)):
    """SGD with a rate of 1 in NovoGrad's place: the code's updates are these."""

    def check(code):
        tx = eval(
            code,
            {
                **{"gx": gx, "optax": optax, "jax": jax, "larc": page_larc()},
                "schedule": optax.constant_schedule(0.02),
                "novograd": optax.sgd(1.0),
            },
        )
        state, expected = tx.init(PARAMS), list(gradients)
        for grads in pushed:
            updates, state = tx.update(grads, state, PARAMS)
            wanted = expected.pop(0)
            chex.assert_trees_all_close(
                updates, jax.tree.map(np.negative, wanted), rtol=1e-6
            )

    return check


def freezes_w(code):
    """The pattern is for the beginning of a name: it does not find "b/w"."""

    def loss_fn(params):
        return jnp.sum(params["w"] ** 2) + params["b"]["w"] ** 2

    params = {"w": jnp.asarray(PARAMS["w"]), "b": {"w": jnp.asarray(0.5)}}
    clip = optax.chain(gx.clip_by_global_norm(0.25), optax.sgd(1.0))
    names = {"gx": gx, "jax": jax, "re": re, "params": params, "loss_fn": loss_fn}
    step = eval(code, names | {"novograd": clip})
    before = jax.tree.map(np.asarray, params)
    after, state, _ = step(params, clip.init(params))
    np.testing.assert_array_equal(after["w"], before["w"])
    assert after["b"]["w"] == 0.25  # The gradient of 1 is the norm of all, clipped.
    np.testing.assert_allclose(optax.tree.get(state, "global_norm"), 1.0)


FOUR = [jax.tree.map(lambda g, n=n: n * g, GRADS) for n in (0.5, 1.0, 2.0, 3.0)]
NOTHING = jax.tree.map(np.zeros_like, GRADS)
CHECKS = {
    '"max_grad_norm": 1.0': steps_on(clipped(GRADS)),
    "both, if you want them": steps_on(larced(clipped(SMALL)), pushed=[SMALL]),
    '"freeze_variables_regex": "w"': freezes_w,
    '"regularizer": tf.contrib.layers.l2_regularizer': steps_on(
        clipped(regularized(GRADS))
    ),
    '"use_horovod": True': mean_of(np.arange(24.0).reshape(8, 3) ** 2),
    '"iter_size": 4': steps_on(
        *[NOTHING] * 3,
        clipped({k: 6.5 / 4 * g for k, g in GRADS.items()}),
        pushed=FOUR,
    ),
}


def test_every_key_has_a_row():
    assert KEYS.keys() == POLICIES.keys() | CHECKS.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("key", CHECKS)
def test_a_key_of_openseq2seq_does_what_its_row_does(key):
    with jax.enable_x64(True):
        CHECKS[key](KEYS[key])
