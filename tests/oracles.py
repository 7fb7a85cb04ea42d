"""The formulas of the papers in float64 NumPy, independent of the library.

Each public transformation has one here, or in ``AT_ONCE`` if it keeps no state. A
generator of its name yields parameters and state after each step. The generator of a
wrapper takes gradients and the updates of the inner transformation, and yields new
updates. A wrapper that gives its inner transformation other gradients is in ``ACTING``.
``expected`` composes them, so that each row of ``descriptors.py`` is compared.
"""

import itertools

import numpy as np


def global_norm(grads):
    return np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in grads.values()))


def clip_by_global_norm(grads, max_norm, use_norm=None):
    norm = global_norm(grads) if use_norm is None else use_norm
    factor = max_norm / norm if norm > max_norm else 1.0
    if not np.isfinite(norm):
        factor = np.nan
    return {k: g * factor for k, g in grads.items()}


def clip_by_zscore(
    params, sequence, learning_rate, threshold=2.5, decay=0.97, warmup=25
):
    """Yields ``(params, mean, var)`` after each step: ZClip, with all norms so far."""
    collected, mean, var = [], 0.0, 0.0
    for grads in sequence:
        norm = limit = global_norm(grads)
        if len(collected) < warmup:
            if np.isfinite(norm):
                collected.append(norm)
                mean, var = np.mean(collected), np.var(collected)
        elif np.isfinite(norm):
            z = (norm - mean) / (np.sqrt(var) + 1e-6)
            if z > threshold:
                limit = mean + threshold * np.sqrt(var) / (z / threshold)
            mean = decay * mean + (1 - decay) * limit
            var = decay * var + (1 - decay) * (limit - mean) ** 2
        factor = limit / (norm + 1e-6) if limit < norm else 1.0
        factor = factor if np.isfinite(norm) else np.nan
        params = {k: params[k] - learning_rate * factor * g for k, g in grads.items()}
        yield params, mean, var


def clip_by_norm(grads, max_norm):
    return {k: clip_by_global_norm({k: g}, max_norm)[k] for k, g in grads.items()}


def clip(grads, clipnorm=None, clipvalue=None, global_clipnorm=None):
    if clipnorm is not None:
        return clip_by_norm(grads, clipnorm)
    if clipvalue is not None:
        return {k: np.clip(g, -clipvalue, clipvalue) for k, g in grads.items()}
    if global_clipnorm is not None:
        return clip_by_global_norm(grads, global_clipnorm)
    return grads


def divided(g, acc, eps, eps_in_sqrt):
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = g / (np.sqrt(acc + eps) if eps_in_sqrt else np.sqrt(acc) + eps)
    return np.where(g == 0, 0, quotient)


def measure_norms(params, sequence, learning_rate):
    """Yields ``(params, norms)`` after each step."""
    for grads in sequence:
        params = {k: params[k] - learning_rate * g for k, g in grads.items()}
        yield params, {k: np.sqrt(np.sum(np.abs(g) ** 2)) for k, g in grads.items()}


def adagrad(
    params,
    sequence,
    learning_rate,
    initial_accumulator_value=0.1,
    eps=1e-7,
    *,
    eps_in_sqrt=True,
    row_wise=False,
    **clips,
):
    """Yields ``(params, accumulators)`` after each step."""
    acc = {
        k: np.full(p.shape[:1] if row_wise else p.shape, initial_accumulator_value)
        for k, p in params.items()
    }
    for t, grads in enumerate(sequence):
        lr = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        new_params, new_acc = {}, {}
        for k, g in clip(grads, **clips).items():
            square = np.abs(g) ** 2
            if row_wise and g.ndim:
                square = square.reshape(g.shape[0], -1).mean(axis=1)
            new_acc[k] = acc[k] + square
            lined_up = new_acc[k]
            if row_wise and g.ndim:
                lined_up = lined_up.reshape(-1, *[1] * (g.ndim - 1))
            new_params[k] = params[k] - lr * divided(g, lined_up, eps, eps_in_sqrt)
        params, acc = new_params, new_acc
        yield params, acc


def proximal_adagrad(
    params,
    sequence,
    learning_rate,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
):
    """Yields ``(params, accumulators)`` after each step."""
    acc = {k: np.full(p.shape, initial_accumulator_value) for k, p in params.items()}
    for t, grads in enumerate(sequence):
        lr = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        acc = {k: acc[k] + np.abs(g) ** 2 for k, g in grads.items()}
        eta = {k: lr * divided(np.ones_like(a), a, 0.0, True) for k, a in acc.items()}
        new = {}
        for k, g in grads.items():
            v, least = params[k] - eta[k] * g, eta[k] * l1_regularization_strength
            with np.errstate(divide="ignore", invalid="ignore"):
                shrunk = np.where(np.abs(v) <= least, 0, v - least * v / np.abs(v))
            new[k] = np.where(least == 0, v, shrunk)
            new[k] = new[k] / (1 + eta[k] * l2_regularization_strength)
        params = new
        yield params, acc


def novograd(
    params,
    sequence,
    learning_rate,
    b1=0.95,
    b2=0.98,
    eps=1e-8,
    weight_decay=0.0,
    *,
    mask=None,
    grad_averaging=False,
    nesterov=False,
    eps_in_sqrt=True,
    lr_in_momentum=False,
    **clips,
):
    """Yields ``(params, mu, nu)`` after each step."""
    mu = {k: np.zeros_like(p) for k, p in params.items()}
    nu = {}
    for t, grads in enumerate(sequence):
        lr = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        new_params, new_mu, new_nu = {}, {}, {}
        for k, g in clip(grads, **clips).items():
            square = np.sum(np.abs(g) ** 2)
            new_nu[k] = square if t == 0 else b2 * nu[k] + (1 - b2) * square
            added = divided(g, new_nu[k], eps, eps_in_sqrt)
            if mask is None or mask[k]:
                added = added + weight_decay * params[k]
            if grad_averaging:
                added = (1 - b1) * added
            if lr_in_momentum:
                added = lr * added
            new_mu[k] = b1 * mu[k] + added
            step = added + b1 * new_mu[k] if nesterov else new_mu[k]
            new_params[k] = params[k] - (step if lr_in_momentum else lr * step)
        params, mu, nu = new_params, new_mu, new_nu
        yield params, mu, nu


def ftrl(
    params,
    sequence,
    learning_rate,
    learning_rate_power=-0.5,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    l2_shrinkage_regularization_strength=0.0,
    beta=0.0,
    *,
    multiply_linear_by_learning_rate=False,
    **clips,
):
    """Yields ``(params, n, z)`` after each step, in the paper's n, z, sigma, alpha."""
    l1, l2 = l1_regularization_strength, 2 * l2_regularization_strength
    n = {k: np.full(p.shape, initial_accumulator_value) for k, p in params.items()}
    z = {k: np.zeros_like(p) for k, p in params.items()}
    for t, grads in enumerate(sequence):
        alpha = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        unit = alpha if multiply_linear_by_learning_rate else 1.0  # Of z.
        new = {k: {} for k in "wnz"}
        for k, g in clip(grads, **clips).items():
            w = params[k]
            new["n"][k] = n[k] + np.abs(g) ** 2
            root = new["n"][k] ** -learning_rate_power
            sigma = (root - n[k] ** -learning_rate_power) / alpha
            pull = g + 2 * l2_shrinkage_regularization_strength * w - sigma * w
            new["z"][k] = z[k] + unit * pull
            size, divisor = np.abs(new["z"][k]) / unit, (beta + root) / alpha + l2
            with np.errstate(divide="ignore", invalid="ignore"):
                moved = -(1 - l1 / size) * new["z"][k] / unit / divisor
            new["w"][k] = np.where((size <= l1) | (divisor == 0), 0, moved)
        params, n, z = new["w"], new["n"], new["z"]
        yield params, n, z


def learning_rate(params, sequence, learning_rate):
    """Yields ``(params,)`` after each step: gradient descent."""
    for t, grads in enumerate(sequence):
        lr = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        params = {k: params[k] - lr * g for k, g in grads.items()}
        yield (params,)


def delayed_nesterov(
    params, sequence, learning_rate, b1=0.9, *, num_delay, activation=0.0
):
    """Yields ``(params, mu, sum)`` after each step, in the paper's Δ, ε, β, c and N."""
    n, c, beta = num_delay, activation, b1
    mu, total = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    for t, grads in enumerate(sequence):
        eps = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        # The sum stays until the next gradient begins another one.
        total = {k: g + (0 if t % n == 0 else total[k]) for k, g in grads.items()}
        if (t + 1) % n == 0:
            mu = {k: beta * mu[k] + total[k] / n for k in grads}
            share = 1 - c * n + c
        else:
            share = c
        params = {
            k: params[k] - eps * (share * beta * mu[k] + g / n)
            for k, g in grads.items()
        }
        yield params, mu, total


def momentum_look_ahead(params, sequence, learning_rate, b1=0.9, *, alignment=None):
    """Yields ``(params, m)`` after each step, with HeLoCo's G instead of g."""
    m = {k: np.zeros_like(p) for k, p in params.items()}
    for t, given in enumerate(sequence):
        lr = float(learning_rate(t)) if callable(learning_rate) else learning_rate
        grads = given
        if alignment is not None:
            grads = {k: aligned(g, m[k], **alignment) for k, g in given.items()}
        m = {k: b1 * m[k] + (1 - b1) * g for k, g in grads.items()}
        params = {k: params[k] - lr * (g + b1 * m[k]) for k, g in grads.items()}
        yield params, m


def kind(g, m, *, aligned, eps, **_):
    """The case that a gradient is to HeLoCo."""
    lengths = np.linalg.norm(g), np.linalg.norm(m)
    if min(lengths) < eps or 0 in lengths or not np.isfinite(lengths).all():
        return "short"
    cosine = np.vdot(m, g).real / (lengths[0] * lengths[1] + eps)
    return "aligned" if cosine >= aligned else "opposed" if cosine < 0 else "between"


def aligned(g, m, **numbers):
    """HeLoCo's correction, by geometry: the part along m, and the angle to it."""
    which, eps = kind(g, m, **numbers), numbers["eps"]
    if which in ("short", "aligned"):
        return g
    length, other = np.linalg.norm(g), np.linalg.norm(m)
    cosine = np.vdot(m, g).real / (length * other + eps)
    sure = length / (length + numbers["confidence"] * other + eps)
    if which == "opposed":
        part = np.vdot(m, g).real * m / (other + eps) ** 2
        share = min(numbers["shrinkage"] * -cosine * sure, numbers["max_shrinkage"])
        return g - share * part
    ends = numbers["aligned"] - cosine, numbers["aligned"] - numbers["opposed"] + eps
    ramp = min((ends[0] + eps) / ends[1], 1)
    turn = min(numbers["rotation"] * ramp * sure, 1)
    mixed = (1 - turn) * g / (length + eps) + turn * m / (other + eps)
    size = np.linalg.norm(mixed)
    return g if size < eps else mixed * length / (size + eps)


def cautious(sequence, moved):
    """Yields ``(updates,)``: what is left of those of the inner optimizer."""
    for grads, updates in zip(sequence, moved, strict=True):
        yield (tree_map(masked, grads, updates),)


def masked(g, u):
    """As the authors' code: it subtracts updates, and complex numbers are pairs."""
    if np.iscomplexobj(u):
        pairs = (np.stack([x.real, x.imag], -1) for x in (g, u))
        return masked(*pairs) @ np.array([1, 1j])
    mask = np.float64(-u * g > 0)
    return mask / max(mask.mean(), 1e-3) * u


def drop_stale(params, pushes, max_staleness, apply):
    """Plays ``(grads, local_step)`` pushes; yields ``(params, step, stale)``."""
    global_step = stale = 0
    for grads, local_step in pushes:
        limit = max_staleness(global_step) if callable(max_staleness) else max_staleness
        if global_step - local_step <= limit:
            params, global_step = apply(params, grads), global_step + 1
        else:
            stale += 1
        yield params, global_step, stale


def skip_spikes(pushes, window=128, sigmas=6.0, warmup=None):
    """Plays tuples of a norm and a loss, or None; yields whether a push is applied."""
    warmup = max(2, window // 2) if warmup is None else warmup
    histories = [], []
    for pushed in pushes:
        pairs = [
            (x, h) for x, h in zip(pushed, histories, strict=True) if x is not None
        ]
        if not all(np.isfinite(x) for x, _ in pairs):
            yield False
            continue
        last = [(x, h[-window:]) for x, h in pairs if len(h) >= warmup]
        yield not any(x - np.mean(h) > sigmas * np.std(h, ddof=1) for x, h in last)
        for x, h in pairs:
            h.append(x)


def fresh(pushes, max_staleness):
    """Yields all gradients that acted until then, the step and stale."""
    return drop_stale([], pushes, max_staleness, lambda acted, grads: [*acted, grads])


def delayed(sequence, num_steps):
    """Yields what acts at each step, or None while a list of that many is not full."""
    waiting = []
    for grads in sequence:
        waiting.append(grads)
        yield waiting.pop(0) if len(waiting) > num_steps else None


def sums(
    pushes,
    num_required,
    reduction="mean",
    *,
    max_staleness=0,
    weight=lambda s: 1,
    skip_nonfinite=False,
):
    """Plays ``(grads, local_step)``; yields what acts or None, step, held and stale."""
    held, global_step, stale = [], 0, 0
    for grads, local_step in pushes:
        acts, s = None, 0 if local_step is None else global_step - local_step
        finite = all(np.isfinite(g).all() for g in grads.values())
        bound = max_staleness
        dropped = s > (bound(global_step) if callable(bound) else bound)
        stale += dropped
        if not dropped and (finite or not skip_nonfinite):
            held.append(tree_map(lambda g, s=s: g * weight(max(0, s)), grads))
        if len(held) == num_required:
            divisor = num_required if reduction == "mean" else 1
            acts = tree_map(lambda g, n=divisor: g / n, total(held))
            held, global_step = [], global_step + 1
        yield acts, global_step, held, stale


def worker_mean(pushes, num_workers, method):
    """Plays ``(grad, worker, local_step)``; yields what acts or None, step and stale.

    It works like the code of the authors of Ringleader ASGD, but with whole lists in
    the place of running means: each worker's pushes of this cycle, and of the next.
    """
    now, later = ([[] for _ in range(num_workers)] for _ in range(2))
    stepped, global_step, stale = set(), 0, 0
    for g, worker, local_step in pushes:
        acts = None
        if method == "all" and local_step < global_step:
            stale += 1
        elif method == "latest":
            full = all(now)
            now[worker] = [g]
            acts = _mean_of_means(now) if full else None
        elif worker in stepped:
            later[worker].append(g)
        else:
            now[worker].append(g)
            if all(now):
                acts = _mean_of_means(now)
                stepped.add(worker)
                if method == "all" or len(stepped) == num_workers:
                    now, later = later, [[] for _ in range(num_workers)]
                    stepped = set()
        global_step += acts is not None
        yield acts, global_step, stale


def _mean_of_means(rows):
    return np.mean([np.mean(row, axis=0) for row in rows], axis=0)


def asynchronous(rule, params, gradient, duration, workers, drops=np.inf):
    """Workers by a virtual clock: yields each push and the parameters after it.

    They pull, take ``duration(worker, number)`` seconds, push, and begin the next
    number, endlessly. If pushes arrive at once, the one of the lower worker goes first.
    A push that is more than ``drops`` steps late is dropped. ``rule(g, worker)`` gives
    what is subtracted from the parameters, or None for no step.
    """
    global_step, numbers = 0, [0] * workers
    pulled = [(duration(worker, 0), 0, params) for worker in range(workers)]
    while True:
        now, worker = min((done, i) for i, (done, *_) in enumerate(pulled))
        _, local_step, seen = pulled[worker]
        number, update = numbers[worker], None
        accepted = global_step - local_step <= drops
        if accepted:
            update = rule(gradient(worker, number, seen), worker)
        if update is not None:
            params, global_step = params - update, global_step + 1
        event = {"time": now, "worker": worker, "number": number}
        event |= {"local_step": local_step, "global_step": global_step}
        yield event | {"accepted": accepted, "params": params}
        numbers[worker] += 1
        pulled[worker] = now + duration(worker, number + 1), global_step, params


# Every row of the table of descriptors, composed of these.


def tree_map(f, *trees):
    return {k: f(*(tree[k] for tree in trees)) for k in trees[0]}


def total(trees):
    return tree_map(lambda *x: sum(x), *trees)


AT_ONCE = {
    "densify": lambda g: g,
    "measure_cosine": lambda g: g,
    # Of float32 parameters.
    "round_stochastically": lambda g, seed: g,
    "clip_by_global_norm": clip_by_global_norm,
    "clip_by_norm": clip_by_norm,
    # Of three steps, as in the rows of the table.
    "scale_by_staleness": lambda g, power=1.0, weight=None: tree_map(
        lambda x: x * (weight(3) if weight else 3**-power), g
    ),
    # Of worker 1, as in the row of the table.
    "scale_by_worker": lambda g, factors: tree_map(lambda x: x * factors[1], g),
    # Each parameter of the worker is smaller by 1.
    "compensate_delay": lambda g, variance_control=0.04: tree_map(
        lambda x: x + variance_control * np.abs(x) ** 2, g
    ),
}


def of(name):
    """The oracle of a public factory, or None."""
    known = AT_ONCE.get(name) or ACTING.get(name)
    return known or globals().get(name.removeprefix("scale_by_"))


def expected(row, params, pushes):
    """The sum of all updates of a row of the table, for pushes one by one."""
    return after(row, params, pushes)[0]


def after(row, params, pushes, local_step=None):
    """The sum of all updates, then the trees of its state, if a push has acted.

    ``pushes`` are dicts of arrays. All of them have the row's ``local_step``.
    """
    options = dict(row.kwargs)
    local_step = row.local_step if local_step is None else local_step
    if row.name in ACTING:
        inner = options.pop("inner")
        acted = ACTING[row.name](pushes, local_step, **options)
        return after(inner, params, acted, local_step)
    if not pushes:
        return (tree_map(np.zeros_like, params),)
    if row.name in AT_ONCE:
        return (total([AT_ONCE[row.name](grads, **options) for grads in pushes]),)
    oracle = of(row.name)
    if oracle is None:
        raise LookupError(f"tests/oracles.py has no formula of {row.name}")
    if "inner" in options:
        return _changed(oracle, options.pop("inner"), options, params, pushes)
    for dtype in ("mu_dtype", "accumulator_dtype"):
        options.pop(dtype, None)
    if "alignment" in options:
        options["alignment"] = options["alignment"]._asdict()
    *_, last = oracle(params, pushes, **{"learning_rate": -1.0} | options)
    kept = last[1 : 1 + len(row.kept(np.float64))]
    return tree_map(np.subtract, last[0], params), *kept


def _changed(oracle, inner, options, params, pushes):
    """:func:`after` for a wrapper that changes the updates of ``inner``."""
    if inner.reads_params:
        raise LookupError(
            f"{inner} reads parameters, which the wrapper moves elsewhere"
        )
    *sums, last = [after(inner, params, pushes[:n]) for n in range(len(pushes) + 1)]
    pairs = itertools.pairwise(tree for tree, *_ in (*sums, last))
    moved = [tree_map(np.subtract, now, before) for before, now in pairs]
    changed, *kept = zip(*oracle(pushes, moved, **options), strict=True)
    return total(changed), *(field[-1] for field in kept), *last[1:]


# What a wrapper gives to its inner transformation, of (pushes, local_step, **options).


def _all_act(pushes, local_step, **_):
    return pushes


def _fresh_act(pushes, local_step, max_staleness):
    *_, (acted, *_) = fresh([(grads, local_step) for grads in pushes], max_staleness)
    return acted


def _usual_act(pushes, local_step, **options):
    applied = skip_spikes([(global_norm(g), None) for g in pushes], **options)
    return [g for g, acts in zip(pushes, applied, strict=True) if acts]


def _earlier_act(pushes, local_step, num_steps):
    return _some(delayed(pushes, num_steps))


def _sums_act(pushes, local_step, accumulator_dtype=None, **options):
    stamped = [(grads, local_step) for grads in pushes]
    return _some(acts for acts, *_ in sums(stamped, **options))


def _means_act(pushes, local_step, num_workers, method):
    return _some(_mean_of_one_worker(pushes, local_step, method))


def _some(played):
    return [grads for grads in played if grads is not None]


ACTING = {
    "accumulate": _sums_act,
    "conditional_accumulator": _sums_act,
    "delayed": _earlier_act,
    "drop_stale": _fresh_act,
    "lazy": _all_act,
    "whole_matrices": _all_act,
    "low_bit_state": _all_act,
    "master_weights": _all_act,
    "skip_spikes": _usual_act,
    "worker_mean": _means_act,
}


def _mean_of_one_worker(pushes, local_step, method):
    if method == "latest":  # It moves its mean, so NaN and inf stay in that.
        before = [total(pushes[: t + 1]) for t in range(len(pushes))]
        both = zip(pushes, before, strict=True)
        pushes = [tree_map(lambda g, b: g + 0 * b, *x) for x in both]
    played = (
        worker_mean([(g[k], 0, local_step) for g in pushes], 1, method)
        for k in pushes[0]
    )
    for leaves in zip(*played, strict=True):
        means = [mean for mean, *_ in leaves]
        yield None if means[0] is None else dict(zip(pushes[0], means, strict=True))
