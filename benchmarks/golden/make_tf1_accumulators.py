"""Makes tf1_accumulators.json: TensorFlow 1.15.5's gradient accumulators.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_accumulators.py
"""

import threading
import time

import _format
import numpy as np
import tensorflow as tf
from make_tf1 import session

LEAVES = ("w", "b", "s")
RATE = 0.5
WAIT = 0.3  # Seconds after which a take has blocked for good, or surely waits.

LAGS = {
    1: (0, 0, 1, -2, 0, 5, 0, -1, 2, 0),
    2: (0, 0, 1, 0, -3, 0, 1, 2, 0, -1, 0, 1, 0),
    3: (0, 0, -1, 1, 0, 0, 2, -2, 0, 1, 0, 0, 3, 0),
}
"""By num_required: how far behind the accumulator's step each push's local step is.

Above 0 is stale, below 0 ahead. For 2 and 3 there are stale ones while gradients wait
and while none do, and the sequence ends within a round.
"""

INNERS = _format.inners(RATE)


def rows(gradient, *indices):
    """A row-sparse gradient: the first rows of a dense one, put at ``indices``."""
    return {
        "indices": np.int64(indices),
        "values": gradient[: len(indices)],
        "dense_shape": gradient.shape,
    }


class Input:
    """Placeholders for one leaf's gradient, whose shape is checked when it runs."""

    def __init__(self, name, sparse, dtype="float32"):
        def hole(dtype, shape):
            return tf.compat.v1.placeholder(dtype, shape, "g_" + name)

        if sparse:
            rank = len(_format.SHAPES[name])
            self.gradient = tf.IndexedSlices(
                hole(dtype, [None] * rank), hole("int64", [None]), hole("int64", [rank])
            )
        else:
            self.gradient = hole(dtype, None)

    def feed(self, value):
        if isinstance(value, dict):
            parts = as_entry(self.gradient)
            return {parts[key]: value[key] for key in parts}
        return {self.gradient: value}


def feed(inputs, grads):
    fed = {}
    for name, value in grads.items():
        fed.update(inputs[name].feed(value))
    return fed


def as_entry(gradient):
    """A gradient's tensors, arranged the way the traces write it."""
    if isinstance(gradient, tf.IndexedSlices):
        return {
            "indices": gradient.indices,
            "values": gradient.values,
            "dense_shape": gradient.dense_shape,
        }
    return gradient


def variables(leaves, dtype="float32"):
    return {
        name: tf.Variable(value.astype(dtype), name=name, use_resource=False)
        for name, value in _format.params(leaves).items()
    }


def make_inner(inner):
    symbol, settings, _ = INNERS[inner]
    return getattr(tf.compat.v1.train, symbol.split(".")[-1])(**settings)


def agreed(counts):
    """The one count that the accumulators of all leaves hold."""
    assert len(set(counts)) == 1, counts
    return counts[0]


def ours(num_required, reduction, inner):
    return {
        "transformation": "conditional_accumulator",
        "num_required": num_required,
        "reduction": reduction,
        "inner": INNERS[inner][2],
    }


# --- The accumulators themselves -----------------------------------------------------


class Accumulators:
    """An accumulator a leaf, each with a push, a take and gradient descent."""

    def __init__(self, leaves, sparse, reduction_type, dtype="float32"):
        self.history = []
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.params = variables(leaves, dtype)
            self.inputs = {n: Input(n, n in sparse, dtype) for n in leaves}
            self.averages = {n: Input(n, n in sparse, dtype) for n in leaves}
            self.step = tf.compat.v1.placeholder("int64", [], "step")
            self.required = tf.compat.v1.placeholder("int32", [], "required")
            self.pushes, self.counts, self.settings, self.takes = [], [], [], {}
            for name in leaves:
                of = {"shape": _format.SHAPES[name], "reduction_type": reduction_type}
                if name in sparse:
                    it = tf.compat.v1.SparseConditionalAccumulator(dtype, **of)
                    push = it.apply_indexed_slices_grad
                    take = it.take_indexed_slices_grad
                else:
                    it = tf.compat.v1.ConditionalAccumulator(dtype, **of)
                    push, take = it.apply_grad, it.take_grad
                self.pushes.append(push(self.inputs[name].gradient, self.step))
                self.takes[name] = as_entry(take(self.required))
                self.counts.append(it.num_accumulated())
                self.settings.append(it.set_global_step(self.step))
            self.train = make_inner("sgd").apply_gradients(
                [(self.averages[n].gradient, self.params[n]) for n in leaves]
            )
            self.init = tf.compat.v1.global_variables_initializer()
        self.session = self.new_session()

    def new_session(self):
        """A session. It owns the accumulators' state, so they are new in it."""
        with self.graph.as_default():
            new = session()
        new.run(self.init)
        return new

    def push(self, grads, local_step):
        fed = {**feed(self.inputs, grads), self.step: local_step}
        self.session.run(self.pushes, fed)
        self.history.append((self.pushes, fed))

    def take(self, num_required):
        fed = {self.required: num_required}
        limit = tf.compat.v1.RunOptions(timeout_in_ms=int(1000 * WAIT))
        taken = self.session.run(self.takes, fed, options=limit)
        self.history.append((self.takes, fed))
        self.session.run(self.train, feed(self.averages, taken))
        return taken

    def set_global_step(self, to):
        self.session.run(self.settings, {self.step: to})
        self.history.append((self.settings, {self.step: to}))

    def count(self):
        return agreed(self.session.run(self.counts))

    def values(self):
        return self.session.run(self.params)

    def global_step(self):
        """The accumulators' own step: the lowest local step that they accept.

        No operation tells it, so this asks a copy that has the same history.
        """
        fed = dict(next(fed for ops, fed in self.history if ops is self.pushes))
        fed[self.step] = -2
        with self.new_session() as copy:
            for ops, given in self.history:
                copy.run(ops, given)
            before = copy.run(self.counts)
            while copy.run(self.counts) == before:
                fed[self.step] += 1
                copy.run(self.pushes, fed)
        return fed[self.step]


def case_of(name, sparse, reduction_type, steps, leaves, dtype="float32", **entries):
    kind = "SparseConditionalAccumulator" if sparse else "ConditionalAccumulator"
    opt, opt_settings, _ = INNERS["sgd"]
    settings = {"reduction_type": reduction_type}
    if "num_required" in entries:
        settings["num_required"] = entries.pop("num_required")
    settings.update(opt=opt, opt_settings=opt_settings)
    case = {"name": name, "symbol": "tf." + kind, "settings": settings, "dtype": dtype}
    case.update(entries)
    params = _format.params(leaves)
    case["params"] = {key: value.astype(dtype) for key, value in params.items()}
    case["steps"] = steps
    return case


def rounds(
    name,
    num_required,
    pushes,
    reduction="mean",
    sparse=(),
    dtype="float32",
    last=(),
    **entries,
):
    """Pushes of (lag, gradients), with a take as soon as there are num_required.

    After the pushes with the numbers in ``last``, a take asks for as many as there are.
    """
    leaves = tuple(pushes[0][1])
    reduction_type = "SUM" if reduction == "sum" else "MEAN"
    accumulators = Accumulators(leaves, sparse, reduction_type, dtype)
    steps, global_step, count = [], 0, 0
    for number, (lag, grads) in enumerate(pushes):
        local_step, taken = global_step - lag, None
        accumulators.push(grads, local_step)
        accepted = accumulators.count() - count
        if accumulators.count() >= num_required:
            taken = accumulators.take(num_required)
        elif number in last and accumulators.count():
            taken = accumulators.take(accumulators.count())
        count, global_step = accumulators.count(), accumulators.global_step()
        steps.append(
            {
                "local_step": local_step,
                "grads": grads,
                "accepted": bool(accepted),
                "taken": taken,
                "num_accumulated": count,
                "global_step": global_step,
                "params": accumulators.values(),
                "slots": {},
            }
        )
        if last:
            steps[-1]["last"] = number in last
    entries["num_required"] = num_required
    if "why_not" in entries:
        entries["ours"] = None
    else:
        entries["ours"] = ours(num_required, reduction, "sgd")
    return case_of(name, sparse, reduction_type, steps, leaves, dtype, **entries)


def events(name, why_not, *told, leaf="b", sparse=False):
    """Operations one by one, for all that our accumulator does not have."""
    accumulators = Accumulators((leaf,), (leaf,) if sparse else (), "MEAN")
    steps = []
    for event, *given in told:
        step = {"event": event}
        try:
            if event == "push":
                step["grads"], step["local_step"] = {leaf: given[0]}, given[1]
                accumulators.push(step["grads"], step["local_step"])
            elif event == "take":
                (step["num_required"],) = given
                step["taken"] = accumulators.take(*given)
            else:
                (step["to"],) = given
                accumulators.set_global_step(*given)
        except tf.errors.OpError as error:
            message = str(error).split("\n", 1)[0]
            step["error"] = {"type": type(error).__name__, "message": message}
        step["num_accumulated"] = accumulators.count()
        step["global_step"] = accumulators.global_step()
        step["params"] = accumulators.values()
        steps.append(step)
    return case_of(name, sparse, "MEAN", steps, (leaf,), ours=None, why_not=why_not)


def waiting_take():
    """A take that waits, as SyncReplicasOptimizer's does, while pushes come."""
    accumulators = Accumulators(("b",), (), "MEAN")
    fed = {accumulators.required: 2}
    taken = []

    def wait():
        taken.append(accumulators.session.run(accumulators.takes, fed))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(WAIT)
    steps = [{"event": "take", "num_required": 2, "note": "waits"}]
    for grads in _format.gradients("plain", 3, ("b",)):
        accumulators.push(grads, 0)
        step = {"event": "push", "grads": grads, "local_step": 0}
        step["num_accumulated"] = accumulators.count()
        steps.append(step)
        if not step["num_accumulated"] and thread:
            thread.join()
            accumulators.history.append((accumulators.takes, fed))
            steps.append({"event": "taken", "taken": taken[0]})
            thread = None
        step["global_step"] = accumulators.global_step()
    assert len(steps) == 5, "the take was not yet waiting"
    return case_of(
        "conditional-accumulator-waiting-take",
        (),
        "MEAN",
        steps,
        ("b",),
        ours=None,
        why_not="ours has no take: it acts by itself, when this take is served",
    )


# --- SyncReplicasOptimizer -----------------------------------------------------------


def sync_replicas(name, inner, num_required, workers, pushes, sparse=(), **entries):
    """The optimizer itself; its chief's queue runner is run by hand."""
    leaves = tuple(pushes[0][1])
    steps, count = [], 0
    with tf.Graph().as_default() as graph, session() as sess:
        global_step = tf.compat.v1.train.get_or_create_global_step()
        params = variables(leaves)
        inputs = {name: Input(name, name in sparse) for name in leaves}
        inner_opt = make_inner(inner)
        opt = tf.compat.v1.train.SyncReplicasOptimizer(inner_opt, num_required, workers)
        push = opt.apply_gradients(
            [(inputs[name].gradient, params[name]) for name in leaves], global_step
        )
        opt.ready_for_local_init_op.mark_used()
        (synchronize,) = opt.get_chief_queue_runner().enqueue_ops
        tokens = opt.get_init_tokens_op(len(pushes))  # So that no worker waits.
        counts = [it.num_accumulated() for it, _ in opt._accumulator_list]
        takes = [op for op in graph.get_operations() if "TakeGradient" in op.type]
        takes = {name: take_entry(takes[i]) for i, name in enumerate(leaves)}
        slots = {
            slot: {name: inner_opt.get_slot(params[name], slot) for name in leaves}
            for slot in inner_opt.get_slot_names()
        }
        sess.run(tf.compat.v1.global_variables_initializer())
        sess.run(tf.compat.v1.local_variables_initializer())
        sess.run([opt.chief_init_op, tokens])
        for lag, grads in pushes:
            local_step, taken = sess.run(global_step) - lag, None
            opt._local_step.load(local_step, sess)  # What this worker had seen.
            sess.run(push, feed(inputs, grads))
            accepted = agreed(sess.run(counts)) - count
            if agreed(sess.run(counts)) >= num_required:
                taken, _ = sess.run([takes, synchronize])
            count = agreed(sess.run(counts))
            steps.append(
                {
                    "local_step": local_step,
                    "grads": grads,
                    "accepted": bool(accepted),
                    "taken": taken,
                    "num_accumulated": count,
                    "global_step": sess.run(global_step),
                    "params": sess.run(params),
                    "slots": sess.run(slots) if slots else {},
                }
            )
    opt_symbol, opt_settings, _ = INNERS[inner]
    case = {
        "name": "sync-replicas-" + name,
        "symbol": "tf.train.SyncReplicasOptimizer",
        "settings": {
            "opt": opt_symbol,
            "opt_settings": opt_settings,
            "replicas_to_aggregate": num_required,
            "total_num_replicas": workers,
        },
        "ours": ours(num_required, "row_mean" if sparse else "mean", inner),
    }
    case.update(entries)
    case["params"] = _format.params(leaves)
    case["steps"] = steps
    return case


def take_entry(op):
    """What a take gives, arranged the way the traces write it."""
    if len(op.outputs) == 1:
        return op.outputs[0]
    indices, values, dense_shape = op.outputs
    return {"indices": indices, "values": values, "dense_shape": dense_shape}


# --- The cases -----------------------------------------------------------------------


def lagging(num_required, variant="plain", leaves=LEAVES):
    lags = LAGS[num_required]
    grads = _format.gradients(variant, len(lags), leaves)
    return [(lag, grads[k]) for k, lag in enumerate(lags)]


def fresh(*pushes):
    return [(0, grads) for grads in pushes]


def dense():
    name = "conditional-accumulator-"
    plain = _format.gradients("plain", 9, LEAVES)
    zeros = {key: np.zeros_like(g) for key, g in plain[0].items()}
    nan_in_b = dict(plain[7], b=np.float32([1.0, np.nan, np.inf]))
    poison = {key: np.full_like(g, np.nan) for key, g in plain[0].items()}
    poison["b"] = np.full_like(plain[0]["b"], np.inf)
    half = [{"b": np.float16(g)} for g in ([4e4, 2048, 1], [4e4, 1, 2], [0, 1, 3])]
    cases = [
        rounds(f"{name}required-{n}", n, lagging(n), variant="plain") for n in (1, 2, 3)
    ]
    cases += [
        rounds(f"{name}sum-{n}", n, lagging(n), "sum", variant="plain") for n in (1, 3)
    ]
    cases += [
        rounds(f"{name}scales", 3, lagging(3, "scales"), variant="scales"),
        rounds(
            f"{name}backup-worker",
            2,
            [(k % 3 == 2, grads) for k, grads in enumerate(plain)],
            variant="plain",
            note="three workers read the same step; the third comes too late",
        ),
        rounds(
            f"{name}zeros",
            2,
            fresh(zeros, plain[0], plain[1], zeros, zeros, zeros, plain[2], plain[3]),
        ),
        rounds(
            f"{name}stale-nan",
            2,
            [
                *fresh(plain[0], plain[1]),
                *[(1, poison), (0, plain[2]), (2, poison)],
                *fresh(plain[3], plain[4]),
            ],
        ),
        rounds(
            f"{name}fresh-nan",
            2,
            fresh(plain[0], plain[1], plain[2], nan_in_b, plain[3], plain[4]),
        ),
        rounds(
            f"{name}last-window",
            3,
            [*fresh(*plain[:5]), (1, poison), *fresh(plain[5]), (1, poison)],
            last=(4, 5, 7),
            note="of two pushes; of none, as the one push is stale; of one, as the "
            "push that asks for it is stale",
        ),
        rounds(
            f"{name}float16",
            3,
            fresh(*half),
            dtype="float16",
            why_not="the sum is in float16 there; ours is in float32",
        ),
    ]
    b = [grads["b"] for grads in plain]
    settable = "set_global_step, of which ours has none"
    cases += [
        events(
            f"{name}more-than-required",
            "a take that comes late averages all there are; ours acts at once",
            *[("push", b[0], 0), ("push", b[1], 0), ("push", b[2], 0), ("take", 2)],
            *[("push", b[3], 0), ("push", b[4], 1)],
        ),
        waiting_take(),
        events(
            f"{name}too-few",
            "take is an operation of its own there; ours acts by itself",
            *[("push", b[0], 0), ("push", b[1], 0), ("take", 3), ("push", b[2], 0)],
            *[("take", 4), ("take", 0), ("take", -1), ("take", 3)],
        ),
        events(
            f"{name}set-global-step",
            settable,
            *[("push", b[0], 0), ("push", b[1], 0), ("set_global_step", 4)],
            *[("push", b[2], 3), ("push", b[3], 4), ("take", 3), ("push", b[4], 4)],
            *[("push", b[5], 5)],
        ),
        events(
            f"{name}set-global-step-lower",
            settable,
            *[("push", b[0], 0), ("set_global_step", 7), ("push", b[1], 6)],
            *[("set_global_step", 2), ("push", b[2], 1), ("push", b[3], 2)],
            *[("take", 2), ("push", b[4], 2), ("push", b[5], 3)],
        ),
        events(
            f"{name}wrong-shape",
            "errors, in TensorFlow's words",
            *[("push", b[0], 0), ("push", np.ones(4, "f"), 0), ("push", b[1], 0)],
            *[("push", np.float32(1.0), 9), ("take", 2)],
            *[("push", np.ones(4, "f"), 0), ("push", np.ones((1, 3), "f"), 1)],
            ("push", b[2], 1),
        ),
    ]
    return cases


def sparse():
    name = "sparse-conditional-accumulator-"
    g = [grads["w"] for grads in _format.gradients("plain", 14, ("w",))]
    nan = np.full_like(g[0], np.nan)

    def sparse_rounds(case, n, reduction, *pushed, **entries):
        pushes = [(lag, {"w": rows(value, *at)}) for lag, value, *at in pushed]
        return rounds(name + case, n, pushes, reduction, ("w",), **entries)

    def plainly(*values):
        """A gradient whose rows hold one number each."""
        return np.outer(np.resize(np.float32(values), 4), np.ones(3, "f"))

    def at(*indices):
        """Fresh pushes, with these indices."""
        return [(0, g[k], *here) for k, here in enumerate(indices)]

    overlapping = at(
        *[(0, 2), (2, 3), (0, 1, 3), (1, 3), (1,), (0, 2, 3)],
        *[(0, 1, 2, 3), (2,), (3,), (0, 3), (0,), (0, 1)],
    )
    stale = at((0, 2), (1, 2), (0, 1), (1, 3), (2, 3), (3,))
    stale.insert(2, (1, nan, 0, 1))
    stale.insert(4, (2, nan, 3))
    wide = np.ones((4, 2), "f")
    return [
        sparse_rounds("overlapping-1", 1, "row_mean", *overlapping[:4]),
        sparse_rounds("overlapping-2", 2, "row_mean", *overlapping),
        sparse_rounds("overlapping-3", 3, "row_mean", *overlapping),
        sparse_rounds(
            "same-rows", 2, "mean", *at((0, 2), (0, 2), (1, 2, 3), (1, 2, 3))
        ),
        sparse_rounds("one-push", 1, "row_mean", *at((2, 0, 2), (3, 3, 3), (1, 0))),
        sparse_rounds(
            "same-repeated-rows", 2, "row_mean", *at((0, 0, 2), (0, 0, 2), (3,), (1, 1))
        ),
        sparse_rounds(
            "empty",
            2,
            "row_mean",
            *at((), (1,), (1, 2), (), (), (), (0, 3), (3,)),
        ),
        sparse_rounds("stale", 2, "row_mean", *stale),
        sparse_rounds("last-window", 3, "row_mean", *overlapping[:8], last=(4, 5, 7)),
        sparse_rounds(
            "sum",
            3,
            "sum",
            *at((0, 2), (2, 3), (0, 1, 3), (3, 3, 0), (2, 0), (0, 3, 0)),
            *at((), (), (1,)),
        ),
        sparse_rounds(
            "repeated-row",
            2,
            "row_mean",
            *[(0, plainly(1, 10), 0, 0), (0, plainly(100), 0)],
            *[(0, plainly(1), 0), (0, plainly(10, 100), 0, 0)],
            *[(0, plainly(1, 10), 0, 0), (0, plainly(100, 1000, 5), 0, 0, 0)],
            why_not="a row repeated in one push counts slot by slot there: its first "
            "slot is averaged with the other push's, its second is added whole; ours "
            "adds both, then divides by 2",
        ),
        sparse_rounds(
            "unsorted-rows",
            2,
            "row_mean",
            *[(0, plainly(1, 10), 2, 0), (0, plainly(100, 1000), 0, 2)],
            *[(0, plainly(1, 10), 0, 2), (0, plainly(100, 1000), 2, 0)],
            *[(0, plainly(1, 10), 0, 2), (0, plainly(100, 1000, 5), 3, 2, 1)],
            why_not="rows are merged as if sorted there, and a row that the merge has "
            "passed is added undivided; ours finds every row",
        ),
        events(
            name + "wrong-shape",
            "errors, in TensorFlow's words",
            ("push", rows(g[0], 0, 2), 0),
            ("push", rows(g[1], 4), 0),
            ("push", rows(wide, 1), 0),
            ("push", rows(np.ones((5, 3), "f"), 1), 0),
            ("push", {**rows(g[1], 1, 2), "indices": [1]}, 0),
            ("push", rows(g[1], 0), 0),
            ("take", 2),
            ("push", rows(g[1], 4), 0),
            ("push", rows(g[2], -1), 1),
            ("take", 1),
            leaf="w",
            sparse=True,
        ),
    ]


def synchronous():
    indices = ((0, 2), (2, 3), (1,), (0, 1, 3), (), (0, 3), (1, 2), (2,), (3,), (2, 3))
    plain = lagging(2, leaves=("w", "b"))
    mixed = [
        (plain[k][0], dict(plain[k][1], w=rows(plain[k][1]["w"], *here)))
        for k, here in enumerate(indices)
    ]
    cases = [sync_replicas("sgd-3", "sgd", 3, 4, lagging(3), variant="plain")]
    cases += [
        sync_replicas(f"{inner}-2", inner, 2, 3, lagging(2), variant="plain")
        for inner in ("momentum", "adagrad")
    ]
    cases.append(sync_replicas("sparse-and-dense-2", "sgd", 2, 3, mixed, ("w",)))
    return cases


def main():
    cases = dense() + sparse() + synchronous()
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
