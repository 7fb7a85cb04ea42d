"""Checks every "ours" against the traces with the formulas alone, in float64 NumPy.

No part of gradxform is imported: this says that the mapping from the originals'
arguments to gradxform's is right, whatever the library does. Run it after making:

    python tests/golden/verify.py

For each symbol it prints the largest relative difference. It fails where one exceeds
2e-5 (1e-3 where the trace is in float16). A difference is relative to the entry itself
or, where parts of opposite sign nearly cancel, to 1/100 of the leaf's largest entry
(for parameters: of 1, if that is more).

Runs of workers are in float64. Their equations are in ``_simulator.py``, also where
``ours`` is null, and their parameters may differ by 1e-9.
"""

import collections
import glob
import json
import os

import _simulator
import numpy as np

LIMITS = {"float64": 1e-9, "float32": 2e-5, "float16": 1e-3}


def adagrad(ours, params):
    del params
    clip = clipper(ours)
    acc = collections.defaultdict(lambda: ours["initial_accumulator_value"])

    def update(grads, _, lr):
        grads, updates = clip(grads), {}
        for key, g in grads.items():
            acc[key] = acc[key] + g * g
            updates[key] = -lr * normalized(g, acc[key], ours)
        return updates, {"accumulator": dict(acc)}

    return update


def novograd(ours, params):
    clip = clipper(ours)
    mu = {key: np.zeros_like(w) for key, w in params.items()}
    nu = {}

    def update(grads, params, lr):
        in_momentum = ours.get("lr_in_momentum", False)
        grads, updates = clip(grads), {}
        for key, g in grads.items():
            square = np.sum(g * g)
            b1, b2 = ours["b1"], ours["b2"]
            nu[key] = b2 * nu[key] + (1 - b2) * square if key in nu else square
            added = normalized(g, nu[key], ours) + ours["weight_decay"] * params[key]
            added *= 1 - b1 if ours["grad_averaging"] else 1
            mu[key] = b1 * mu[key] + (lr * added if in_momentum else added)
            updates[key] = -mu[key] if in_momentum else -lr * mu[key]
        if in_momentum:  # TensorFlow's accumulator holds the update: minus our mu
            return updates, {"m": dict(updates), "v": dict(nu)}
        slots = {"exp_avg": dict(mu), "exp_avg_sq": dict(nu)}
        return updates, dict(slots, momentum=slots["exp_avg"])  # OpenSeq2Seq's name

    return update


def sgd(ours, params):
    mu = {key: np.zeros_like(w) for key, w in params.items()}
    decay = ours.get("momentum")

    def update(grads, _, lr):
        if decay is None:
            return {key: -lr * g for key, g in grads.items()}, {}
        for key, g in grads.items():
            mu[key] = decay * mu[key] + g
        nesterov = ours.get("nesterov", False)
        ahead = {key: grads[key] + decay * mu[key] for key in mu} if nesterov else mu
        return {key: -lr * m for key, m in ahead.items()}, {"momentum": dict(mu)}

    return update


def adam(ours, params):
    """By the row: a row of a row-sparse gradient that is not given stays as it is."""
    b1, b2, eps = ours["b1"], ours["b2"], ours["eps"]
    mu = {key: np.zeros_like(w) for key, w in params.items()}
    nu = {key: np.zeros_like(w) for key, w in params.items()}
    count = 0

    def update(grads, _, lr, given):
        nonlocal count
        count += 1
        updates = {}
        for key, g in grads.items():
            row = given[key]
            mu[key][row] = b1 * mu[key][row] + (1 - b1) * g[row]
            nu[key][row] = b2 * nu[key][row] + (1 - b2) * g[row] ** 2
            m, v = mu[key][row] / (1 - b1**count), nu[key][row] / (1 - b2**count)
            updates[key] = np.zeros_like(g)
            updates[key][row] = -lr * m / (np.sqrt(v) + eps)
        slots = {"exp_avg": mu, "exp_avg_sq": nu}
        return updates, {
            k: {n: x.copy() for n, x in v.items()} for k, v in slots.items()
        }

    return update


def momentum_look_ahead(ours, params):
    b1 = ours["b1"]
    mu = {key: np.zeros_like(w) for key, w in params.items()}

    def update(grads, _, lr):
        updates = {}
        if "alignment" in ours:
            align = ours["alignment"]
            grads = {key: corrected(g, mu[key], **align) for key, g in grads.items()}
        for key, g in grads.items():
            mu[key] = b1 * mu[key] + (1 - b1) * g
            updates[key] = -lr * (g + b1 * mu[key])
        return updates, {"momentum_buffer": dict(mu)}

    return update


def corrected(
    g, m, aligned, opposed, confidence, rotation, shrinkage, max_shrinkage, eps
):
    """HeLoCo's gradient."""
    length, other = np.linalg.norm(g), np.linalg.norm(m)
    if length < eps or other < eps:
        return g
    cosine = np.sum(g * m) / (length * other + eps)
    sure = length / (length + confidence * other + eps)
    if cosine >= aligned:
        return g
    unit = m / (other + eps)
    if cosine < 0:
        beta = min(-shrinkage * cosine * sure, max_shrinkage)
        return g - beta * np.sum(g * unit) * unit
    ramp = 1 - (cosine - opposed) / (aligned - opposed + eps)
    turn = min(rotation * ramp * sure, 1)
    mixed = (1 - turn) * g / (length + eps) + turn * unit
    return mixed / (np.linalg.norm(mixed) + eps) * length


MAKE = {
    "adagrad": adagrad,
    "novograd": novograd,
    "sgd": sgd,
    "momentum_look_ahead": momentum_look_ahead,
    "adam": adam,
}


def normalized(g, squares, ours):
    if ours.get("eps_in_sqrt", True):
        denominator = np.sqrt(squares + ours["eps"])
    else:
        denominator = np.sqrt(squares) + ours["eps"]
    return np.divide(g, denominator, out=np.zeros_like(g), where=denominator != 0)


def clipper(ours):
    def clip(grads):
        if "clipvalue" in ours:
            limit = ours["clipvalue"]
            return {key: np.clip(g, -limit, limit) for key, g in grads.items()}
        if "clipnorm" in ours:
            limit = ours["clipnorm"]
            return {key: by_norm({0: g}, limit)[0][0] for key, g in grads.items()}
        if "global_clipnorm" in ours:
            return by_norm(grads, ours["global_clipnorm"])[0]
        return grads

    return clip


def by_norm(grads, limit, norm=None):
    if norm is None:
        squares = sum(np.sum(g * g) for g in grads.values())
        # In float32's range, so that an entry of 1e30 has an infinite norm.
        norm = np.sqrt(np.float64(np.float32(squares)))
    scale = limit / norm if norm > limit else 1.0
    scale = scale if np.isfinite(norm) else np.nan
    return {key: g * scale for key, g in grads.items()}, norm


def float64(tree):
    return {key: entry(value) for key, value in tree.items()}


def entry(value):
    if isinstance(value, dict) and "fill" in value:
        return np.full(value["shape"], value["fill"])
    if isinstance(value, dict):
        return entry_rows(value, value["dense_shape"])[1]
    return np.array(value, np.float64)


def entry_rows(value, dense_shape):
    """Which rows a row-sparse leaf names, and the dense gradient it stands for."""
    indices = np.array(value["indices"], np.int64)
    named, total = np.zeros(dense_shape[0], bool), np.zeros(dense_shape)
    named[indices] = True
    values = np.array(value["values"], np.float64)
    np.add.at(total, indices, values.reshape(len(indices), *dense_shape[1:]))
    return named, total


def given_rows(step):
    """For each leaf a bool for each row; a dense gradient gives all of them."""
    return {
        key: entry_rows(g, g["dense_shape"])[0]
        if isinstance(g, dict)
        else np.full(np.shape(g)[:1], True)
        for key, g in step["grads"].items()
    }


def reduced(pushes, shapes, reduction):
    """The sum of the pushes, divided leaf by leaf as the reduction asks."""
    sums = {}
    for key, shape in shapes.items():
        sparse = isinstance(pushes[0][key], dict)
        if sparse:
            both = [entry_rows(push[key], shape) for push in pushes]
            holding = np.sum([named for named, _ in both], axis=0)
            total = sum(dense for _, dense in both)
        else:
            total = sum(entry(push[key]) for push in pushes)
        if reduction == "sum":
            divisor = 1.0
        elif reduction == "row_mean" and sparse:
            divisor = np.maximum(holding, 1).reshape(-1, *[1] * (len(shape) - 1))
        else:
            divisor = len(pushes)
        sums[key] = total / divisor
    return sums


def check_step(worst, seen, expected, floor=0.0):
    assert set(seen) == set(expected), (sorted(seen), sorted(expected))
    for key in expected:
        a, b = np.asarray(seen[key]), np.asarray(expected[key])
        assert a.shape == b.shape, (key, a.shape, b.shape)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        least = max(floor, 1e-2 * np.max(np.abs(b), initial=0, where=finite), 1e-30)
        error = np.abs(a - b) / np.maximum(np.abs(b), least)
        worst.append(np.max(error, initial=0, where=finite))


def check_still(before, step, given):
    """Entries whose row-sparse gradient is zero, or not given, keep their bits.

    With ``given`` these are the rows that are not given.
    """
    pairs = [(before["params"], step["params"])]
    pairs += [(old, step["slots"][k]) for k, old in before.get("slots", {}).items()]
    for key, grad in step["grads"].items():
        for old, new in pairs if isinstance(grad, dict) else []:
            still = ~given[key] if given else entry(grad) == 0
            np.testing.assert_array_equal(
                np.array(new[key])[still], np.array(old[key])[still]
            )


def check_clip(ours, step, worst):
    grads = float64({k: g for k, g in step["grads"].items() if g is not None})
    limit = ours["max_norm"]
    if ours["transformation"] == "clip_by_norm":
        clipped = {key: by_norm({0: g}, limit)[0][0] for key, g in grads.items()}
    else:
        clipped, norm = by_norm(grads, limit, ours.get("use_norm"))
        check_step(worst, {"": norm}, {"": step["global_norm"]})
    kept = {k: g for k, g in step["clipped"].items() if g is not None}
    assert set(kept) == set(grads)
    check_step(worst, clipped, float64(kept))


def check_accumulator(ours, params, steps, worst):
    inner, shapes = ours["inner"], {key: w.shape for key, w in params.items()}
    update = MAKE[inner["transformation"]](inner, params)
    global_step, waiting, slots = 0, [], None
    for step in steps:
        taken = None
        accepted = step["local_step"] >= global_step
        if accepted:
            waiting.append(step["grads"])
        if len(waiting) == ours["num_required"]:
            taken = reduced(waiting, shapes, ours["reduction"])
            updates, slots = update(taken, params, inner["learning_rate"])
            params = {key: params[key] + updates[key] for key in params}
            global_step, waiting = global_step + 1, []
        assert step["accepted"] == accepted
        assert step["num_accumulated"] == len(waiting)
        assert step["global_step"] == global_step
        assert (step["taken"] is None) == (taken is None)
        if taken is not None:
            seen = {
                key: entry_rows(g, shapes[key])[1] if isinstance(g, dict) else entry(g)
                for key, g in step["taken"].items()
            }
            check_step(worst, taken, seen)
        check_step(worst, params, float64(step["params"]), floor=1e-2)
        if slots is not None:
            assert set(slots) == set(step["slots"])
            for slot in slots:
                check_step(worst, slots[slot], float64(step["slots"][slot]))


def check(case, worst):
    ours, params = case["ours"], case["params"]
    if ours["transformation"].startswith("clip"):
        return check_clip(ours, case["steps"][0], worst)
    params = float64(params)
    if ours["transformation"] == "conditional_accumulator":
        return check_accumulator(ours, params, case["steps"], worst)
    inner = ours.get("inner", ours)
    update = MAKE[inner["transformation"]](inner, params)
    global_step = stale = 0
    slots, before = None, case
    for i, step in enumerate(case["steps"]):
        lr = inner["learning_rate"]
        lr = lr[i] if isinstance(lr, list) else lr
        dropped = global_step - step.get("local_step", 0) > ours.get("max_staleness", i)
        by_row = [given_rows(step)] if ours["transformation"] == "lazy" else []
        if dropped:
            stale += 1
        else:
            updates, slots = update(float64(step["grads"]), params, lr, *by_row)
            params = {key: params[key] + updates[key] for key in params}
            global_step += 1
        check_still(before, step, *(by_row or [None]))
        before = step
        check_step(worst, params, float64(step["params"]), floor=1e-2)
        for slot in step["slots"]:
            check_step(worst, slots[slot], float64(step["slots"][slot]))
        assert step.get("global_step", global_step) == global_step
        assert step.get("iterations", global_step) == global_step
        assert step.get("stale_counter", stale) == stale
        fraction = np.float32(stale / (global_step + 1))
        assert np.isclose(step.get("stale_percentage", fraction), fraction, rtol=1e-6)
    return None


def main():
    folder = os.path.dirname(os.path.abspath(__file__))
    worst = collections.defaultdict(list)
    with np.errstate(over="ignore", invalid="ignore"):
        for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
            with open(path) as file:
                cases = json.load(file)["cases"]
            for case in cases:
                assert case["ours"] or case["why_not"]
                differences = []
                if "events" in case:
                    differences = [
                        _simulator.distance(*pair) for pair in _simulator.replayed(case)
                    ]
                elif case["ours"] is None:
                    continue
                else:
                    check(case, differences)
                dtype = case.get("dtype", "float32")
                label = os.path.basename(path), case["symbol"], dtype
                worst[label].append((max(differences), case["name"]))
    for (file, symbol, dtype), found in worst.items():
        largest, name = max(found)
        print(f"{file:21} {symbol:43} {dtype} {len(found):3}  {largest:.1e}  {name}")
        assert largest < LIMITS[dtype], name


if __name__ == "__main__":
    main()
