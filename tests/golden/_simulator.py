"""Asynchronous training by a virtual clock in float64 NumPy: the equations alone.

A method is a *rule*, what the server does with a gradient, and two bounds on how late
a gradient may be: where the server drops it, and where the worker gives it up. Nothing
here comes from gradxform, or from the simulator that left the traces: each rule is
written from its equation.

A rule is called with the gradient, the worker, the staleness and the global step k
before that push. It returns what is subtracted from the parameters, or None for no
step.
"""

import math

import numpy as np


def always(number):
    """A bound that is the same at every global step."""
    return lambda k: number


def square_root(k):
    """Ringmaster's growing bound: s < R, R = floor(sqrt(k - 1)), at least 1."""
    return max(1, math.isqrt(max(0, k - 1))) - 1


def run(rule, params, gradient, duration, workers, drops=math.inf, gives_up=math.inf):
    """One event after the other, endlessly: a push, or a gradient that is given up.

    Workers pull, take ``duration(worker, number)`` seconds, push, and begin the next
    number. If pushes arrive at once, the one of the lower worker goes first.

    drops     a push is dropped if its staleness is above this, or above ``drops(k)``.
    gives_up  after a step to global step k, a gradient under way that is later than
              this, or than ``gives_up(k)``, is begun anew: at the same time, with the
              same number, at the new parameters.
    """
    drops = drops if callable(drops) else always(drops)
    gives_up = gives_up if callable(gives_up) else always(gives_up)
    now, global_step, number = 0.0, 0, [0] * workers
    pulled = {}  # By worker: the global step and the parameters, and when it is done.

    def begin(worker):
        done = now + duration(worker, number[worker])
        pulled[worker] = done, global_step, params

    def event(worker, **what):
        local_step = pulled[worker][1]
        return dict(
            time=now,
            worker=worker,
            number=number[worker],
            local_step=local_step,
            **what,
        )

    for worker in range(workers):
        begin(worker)
    while True:
        now, worker = min((pulled[worker][0], worker) for worker in pulled)
        _, local_step, seen = pulled[worker]
        staleness = global_step - local_step
        update = None
        accepted = staleness <= drops(global_step)
        if accepted:
            g = gradient(worker, number[worker], seen)
            update = rule(g, worker, staleness, global_step)
        if update is not None:
            params, global_step = params - update, global_step + 1
        yield event(worker, accepted=accepted, global_step=global_step, params=params)
        number[worker] += 1
        begin(worker)
        if update is None:
            continue
        for worker in range(workers):
            if global_step - pulled[worker][1] > gives_up(global_step):
                yield event(
                    worker, given_up=True, global_step=global_step, params=params
                )
                begin(worker)


def sgd(rate, weight):
    """u = rate w(s) g."""
    return lambda g, worker, s, k: rate * weight(s) * g


def delay_adaptive(workers):
    """w(s) = n / max(n, s)."""
    return lambda s: workers / max(workers, s)


def normalized_momentum(rate, alpha=None):
    """m = (1 - a) m + a g, u = rate m / (|m| + 1e-10).

    If alpha is None, it is 1 / sqrt(k) from k = 1 on and 1 before that, and the rate is
    rate / (k + 1)^(3/4).
    """

    def direction(g, m, a):
        return m / (np.sqrt(np.sum(m * m)) + 1e-10)

    return _linear_minimization(rate, alpha, direction)


def muon(rate, alpha=None, nesterov=True):
    """The same m; u = rate O((1 - a) m + a g), or rate O(m), by Newton and Schulz."""

    def direction(g, m, a):
        return orthogonalized((1 - a) * m + a * g if nesterov else m)

    return _linear_minimization(rate, alpha, direction)


def _linear_minimization(rate, alpha, direction):
    state = {"m": 0.0}

    def rule(g, worker, s, k):
        a = alpha if alpha is not None else 1 / math.sqrt(max(1, k))
        rate_k = rate if alpha is not None else rate / (k + 1) ** 0.75
        state["m"] = a * g + (1 - a) * state["m"]
        return rate_k * direction(g, state["m"], a)

    return rule


def orthogonalized(g):
    """U p(p(p(p(p(S / |S|))))) V, where p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    u, s, v = np.linalg.svd(g, full_matrices=False)
    s = s / (np.sqrt(np.sum(s * s)) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    rows, columns = g.shape
    return (u * s) @ v * math.sqrt(max(1.0, rows / columns))


def rennala(rate, batch):
    """u = rate (g_1 + ... + g_B) / B, at every B-th push."""
    collected = []

    def rule(g, worker, s, k):
        collected.append(g)
        if len(collected) < batch:
            return None
        mean = sum(collected) / batch
        collected.clear()
        return rate * mean

    return rule


def mean_of_means(table):
    """The mean over workers of the mean of each worker's gradients."""
    return sum(sum(row) / len(row) for row in table.values()) / len(table)


def malenia(rate, workers):
    """u = rate mean_i mean_j g_ij, once every worker i has pushed; then it restarts."""
    table = {}

    def rule(g, worker, s, k):
        table.setdefault(worker, []).append(g)
        if len(table) < workers:
            return None
        update = rate * mean_of_means(table)
        table.clear()
        return update

    return rule


def ia2sgd(rate, workers):
    """u = rate mean_i g_i of the latest g_i; no step before the table was full."""
    table = {}

    def rule(g, worker, s, k):
        full = len(table) == workers
        table[worker] = [g]
        return rate * mean_of_means(table) if full else None

    return rule


def ringleader(rate, workers):
    """Cycles of n steps on the mean of means; each worker's push makes one of them."""
    table, following, stepped = {}, {}, set()

    def rule(g, worker, s, k):
        nonlocal table, following
        into = following if worker in stepped else table
        into.setdefault(worker, []).append(g)
        if into is following or len(table) < workers:
            return None
        update = rate * mean_of_means(table)
        stepped.add(worker)
        if len(stepped) == workers:
            table, following = following, {}
            stepped.clear()
        return update

    return rule


def federated(params, pushes, alpha, weight, buffer=1):
    """x = x + alpha sum_i w(s_i) d_i, over as many pushes as the buffer holds.

    A push has d = -gradient, or d = local model - x, with x as it was at that push.
    """
    total, held, global_step = dict.fromkeys(params, 0.0), 0, 0
    for push in pushes:
        staleness = global_step - push["local_step"]
        scale = alpha * weight(staleness)
        for name, x in params.items():
            if "grads" in push:
                d = -np.array(push["grads"][name])
            else:
                d = np.array(push["local_model"][name]) - x
            total[name] = total[name] + scale * d
        held += 1
        if held == buffer:
            params = {name: x + total[name] for name, x in params.items()}
            total, held = dict.fromkeys(params, 0.0), 0
            global_step += 1
        yield {"staleness": staleness, "global_step": global_step, "params": params}


def buffered(params, pushes, rule, size, weight, divisor=None, bound=math.inf):
    """x = x - u(sum_i w(s_i) g_i / n), over ``size`` pushes with s_i <= bound.

    ``divisor`` says what n is, from the weights w(s_i); without it n is 1.
    """
    held, global_step = [], 0
    for push in pushes:
        staleness = global_step - push["local_step"]
        accepted = staleness <= bound
        if accepted:
            held.append((weight(staleness), push["grads"], staleness))
        if len(held) == size:
            weights, _, late = zip(*held, strict=True)
            n = divisor(weights) if divisor else 1
            total = {
                name: sum(w * np.array(g[name]) for w, g, _ in held) / n
                for name in params
            }
            update = rule(total, max(late))
            params = {name: x - update[name] for name, x in params.items()}
            held, global_step = [], global_step + 1
        event = {"staleness": staleness, "global_step": global_step, "params": params}
        yield dict(event, accepted=accepted)


def gradient_descent(rate):
    """u = rate g."""
    return lambda g, late: {name: rate * x for name, x in g.items()}


def adam(rate, b1, b2, eps, amsgrad=False, threshold=math.inf):
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g², both corrected for their start.

    u = rate m / (sqrt(v) + eps). AMSGrad has the largest v so far, and corrects it
    afterwards. If the latest push in the buffer is later than the threshold, the rate
    is divided by its staleness.
    """
    state = {"m": {}, "v": {}, "largest": {}, "t": 0}

    def rule(g, late):
        state["t"] += 1
        t, update = state["t"], {}
        for name, x in g.items():
            m = b1 * state["m"].get(name, 0.0) + (1 - b1) * x
            v = b2 * state["v"].get(name, 0.0) + (1 - b2) * x * x
            largest = np.maximum(state["largest"].get(name, 0.0), v)
            state["m"][name], state["v"][name] = m, v
            state["largest"][name] = largest
            second = (largest if amsgrad else v) / (1 - b2**t)
            update[name] = rate * m / (1 - b1**t) / (np.sqrt(second) + eps)
            if late > threshold:
                update[name] = update[name] / late
        return update

    return rule


def polynomial(a):
    """w(s) = (s + 1)^-a; FedBuff's is a = 1/2."""
    return lambda s: (s + 1) ** -a


def hinge(a, b):
    """w(s) = 1 up to s = b, then 1 / (a (s - b) + 1)."""
    return lambda s: 1 if s <= b else 1 / (a * (s - b) + 1)


def weight_of(settings):
    """The weight of a case of fedasync.json."""
    options = settings.get("staleness_fn_kwargs", {})
    makers = {"polynomial": polynomial, "hinge": hinge}
    return makers[settings["staleness_fn"]](**options) if options else always(1)


def flsims_weight(settings):
    """The weight of a case of flsim.json: 1 at the average staleness."""
    options = settings["staleness_weight"]
    if "cutoff" in options:
        cutoff, later = options["cutoff"], options["value_after_cutoff"]

        def weight(s):
            return 1 if s <= cutoff else later

    else:
        weight = polynomial(options["exponent"])
    return lambda s: weight(s) / weight(options["avg_staleness"])


def buffered_of(case):
    """The arguments of ``buffered`` for a case of flsim.json or fadas.json."""
    settings = case["settings"]
    rate = settings["lr"]
    options = [rate, *(settings.get(n) for n in ("beta1", "beta2", "eps"))]
    if "update_freq" in settings:
        bound = math.inf if settings["tauc"] is None else settings["tauc"]
        rule = adam(*options, amsgrad=True, threshold=bound)
        return rule, settings["update_freq"], always(1), len
    weight = flsims_weight(settings)
    kind = settings["reduction_type"]
    if not kind.startswith("WEIGHTED"):
        weight = always(1)
    divisor = sum if kind.endswith("AVERAGE") else None
    rule = adam(*options) if "beta1" in settings else gradient_descent(rate)
    return rule, settings["buffer_size"], weight, divisor, settings["max_staleness"]


def rule_of(case):
    """The rule of a case of ringmaster.json, and how late its workers may be."""
    name, settings = case["symbol"].rpartition(".")[2], case["settings"]
    workers, alpha = len(case["durations"]), settings.get("alpha")
    rate = settings.get("gamma", settings.get("eta"))
    threshold = settings.get("max_delay", settings.get("threshold"))
    late = math.inf if threshold is None else threshold - 1
    if settings.get("parameter_agnostic") or "Agnostic" in name:
        late = square_root
    if name in ("RennalaSGD", "MaleniaSGD"):
        late = 0
    weight = delay_adaptive(workers) if settings.get("delay_adaptive") else always(1)
    rules = {
        "AsynchronousSGD": lambda: sgd(rate, weight),
        "RingmasterASGD": lambda: sgd(rate, weight),
        "Momentum_Normalized_RingmasterASGD": lambda: normalized_momentum(rate, alpha),
        "RingmasterMuonASGD": lambda: muon(
            rate, alpha=0.05, nesterov=settings.get("nesterov", True)
        ),
        "ParameterAgnosticRingmasterMuonASGD": lambda: muon(rate),
        "RennalaSGD": lambda: rennala(rate, settings["batch_size"]),
        "MaleniaSGD": lambda: malenia(rate, workers),
        "IAASGD": lambda: ia2sgd(rate, workers),
        "RingleaderASGD": lambda: ringleader(rate, workers),
    }
    return rules[name](), late


def problem_of(case):
    """Functions for the gradient and the duration of a number; the first parameters."""
    of = {name: np.array(value) for name, value in case["problem"].items()}

    def gradient(worker, number, params):
        noise = of["noise"][number % len(of["noise"])]
        return of["curvature"][worker] @ params - of["pull"][worker] + noise

    def duration(worker, number):
        row = case["durations"][worker]
        return row[number % len(row)]

    return gradient, duration, of["start"]


def replayed(case):
    """Each event of a trace, in a pair with what the equations say about it."""
    if "problem" in case:
        rule, late = rule_of(case)
        gradient, duration, start = problem_of(case)
        workers = len(case["durations"])
        expected = run(rule, start, gradient, duration, workers, gives_up=late)
    else:
        start = {name: np.array(x) for name, x in case["params"].items()}
        settings, events = case["settings"], case["events"]
        if "alpha" in settings:
            weight, buffer = weight_of(settings), settings.get("K", 1)
            expected = federated(start, events, settings["alpha"], weight, buffer)
        else:
            expected = buffered(start, events, *buffered_of(case))
    for event in case["events"]:
        yield event, next(expected)


def distance(event, expected):
    """The distance between the parameters. Everything else must be equal."""
    for name in event.keys() - {"params"} & expected.keys():
        assert event[name] == expected[name], (name, event, expected)
    assert ("given_up" in event) == ("given_up" in expected), (event, expected)
    theirs, ours = event.get("params", []), expected["params"]
    if not isinstance(theirs, dict):
        theirs, ours = {"": theirs}, {"": ours if theirs else []}
    pairs = [(np.array(theirs[name]), ours[name]) for name in theirs]
    return np.max([np.max(np.abs(a - b), initial=0.0) for a, b in pairs])
