"""Makes ringmaster.json: runs of asynchronous methods in their authors' simulator.

With Python 3.11, from the repository's root, and the simulator checked out elsewhere:

    git clone -b ringmaster_muon https://github.com/vectozavr/ringmaster-lmo \\
        ../ringmaster-lmo  # at 08b9f68d
    pip install "numpy==2.4.6"
    python benchmarks/golden/make_ringmaster.py ../ringmaster-lmo

Its ``function`` module imports PyTorch and packages that draw. No master and no
transport uses it, so an empty module stands in for it.
"""

import contextlib
import io
import os
import sys
import types

import _format
import numpy as np

WORKERS = 4
NOISES = 16
"""As many draws of noise there are; the gradient of a number has that of its number."""


def load(checkout):
    """The modules of the masters and of the transport."""
    sys.path.insert(0, os.path.join(checkout, "code", "experiments"))
    sys.modules["function"] = types.ModuleType("function")
    sys.modules["function"].OptimizationProblemMeta = object
    from asynchronous import algorithm, asynchronous_transport
    from signature import Signature

    return (
        algorithm,
        asynchronous_transport.RandomDelayedAsynchronousTransport,
        Signature,
    )


def durations():
    """For each pattern, the seconds that each worker's gradients take, in their order.

    All but "one-dies" begin anew behind the last. They are multiples of 1/1024, so the
    sums are exact in any order.
    """
    rng = np.random.RandomState(5)
    spread = np.sqrt(np.arange(1, WORKERS + 1))
    noisy = 1 + np.sqrt(np.arange(WORKERS)) + np.abs(spread * rng.randn(8, WORKERS))
    return {
        "equal": [[1.0]] * WORKERS,
        "linear": [[1.0], [2.0], [3.0], [4.0]],
        "noisy": (
            np.round(1024 * noisy) / 1024
        ).T.tolist(),  # 1 + sqrt(i) + |N(0, i + 1)|
        "cubes": [[2.0], [3.0], [8.0], [27.0]],
        "changing": [[1.0] * 4 + [7.5], [6.25, 1.25], [2.5], [9.0, 0.75, 0.75]],
        "one-dies": [[1.0], [2.5], [3.25], [1.5, np.inf]],
    }


def problem(shape):
    """Quadratics that differ by worker: f_i(x) = <x, A_i x> / 2 - <b_i, x>."""
    rng = np.random.RandomState(11)
    roots = rng.randint(-8, 9, (WORKERS, 2, 2)) / 8
    return {
        "curvature": roots @ roots.transpose(0, 2, 1) + np.eye(2) / 2,
        "pull": rng.randint(-16, 17, (WORKERS, *shape)) / 8,
        "noise": rng.randint(-8, 9, (NOISES, *shape)) / 32,
        "start": rng.randint(-16, 17, shape) / 8,
    }


class Quadratic:
    """What a node computes; ``numbers`` has the current number of each node."""

    def __init__(self, problem, numbers, index):
        self._a, self._b = problem["curvature"][index], problem["pull"][index]
        self._noise, self._numbers, self._index = problem["noise"], numbers, index

    def stochastic_gradient(self, point):
        noise = self._noise[self._numbers[self._index] % NOISES]
        return self._a @ point - self._b + noise


def recorded(transport):
    """Their transport, which writes down what becomes of each gradient."""

    class Recorded(transport):
        def __init__(self, nodes, numbers, seconds):
            self.numbers, self.events, self.positions = numbers, [], {}
            self._local_steps = [0] * WORKERS
            self._arrived = self.master = None

            def takes(index):
                return seconds[index][numbers[index] % len(seconds[index])]

            super().__init__(nodes, np.zeros(WORKERS), takes)

        @property
        def global_step(self):
            return 0 if self.master is None else self.master._iter

        def settle(self):
            """Later changes do not belong to the last event."""
            if self.events:
                self.events[-1].setdefault("global_step", self.global_step)

        def call_available_node_method(self, time, node_index, **kwargs):
            self._local_steps[node_index] = self.global_step
            self.positions.setdefault(self.global_step, kwargs["point"].copy())
            return super().call_available_node_method(time, node_index, **kwargs)

        def call_ready_node(self, time, node_index):
            self._add(time, node_index)
            self.numbers[node_index] += 1
            self._arrived = node_index
            return super().call_ready_node(time, node_index)

        def ignore_node(self, time, node_index):
            self._add(time, node_index, given_up=True)
            super().ignore_node(time, node_index)

        def reset_all_nodes(self, time=None):
            for index in range(WORKERS):
                # The worker of the last push has begun anew at this very time.
                if self._outputs[index] is not None and index != self._arrived:
                    self._add(self.master.get_time(), index, given_up=True)
            super().reset_all_nodes(time)

        def _add(self, time, index, **what):
            self.settle()
            event = {
                "time": time,
                "worker": int(index),
                "number": self.numbers[index],
                "local_step": self._local_steps[index],
            }
            self.events.append(dict(event, **what))

    return Recorded


def run(modules, name, symbol, pattern, calls, settings, ours, shape=(2,)):
    """One case: ``calls`` calls of the master's ``step``, and all that they did."""
    algorithm, transport, signature = modules
    of, seconds, numbers = problem(shape), durations()[pattern], [0] * WORKERS
    node = algorithm.StochasticGradientNodeAlgorithm
    nodes = [signature(node, Quadratic(of, numbers, i)) for i in range(WORKERS)]
    seen = recorded(transport)(nodes, numbers, seconds)
    one = {"max_events": 1} if symbol == "IAASGD" else {}
    with contextlib.redirect_stdout(io.StringIO()):  # One of the masters prints.
        master = getattr(algorithm, symbol)(seen, of["start"].copy(), **settings)
        seen.master = master
        for _ in range(calls):
            master.step(**one)
            seen.settle()
            seen.positions[seen.global_step] = master.get_point().copy()
    stepped = 0
    for event in seen.events:
        moved, stepped = event["global_step"] > stepped, event["global_step"]
        if moved:
            event["params"] = seen.positions[stepped]
    return {
        "name": name,
        "symbol": "asynchronous.algorithm." + symbol,
        "settings": settings,
        "dtype": "float64",
        "ours": ours,
        "problem": of,
        "durations": seconds,
        "events": seen.events,
    }


RATE = 0.125
SQUARE_ROOT = "max(1, floor(sqrt(max(0, k - 1)))) - 1"
"""The greatest staleness at global step k, where the threshold grows."""


def ours(transformation, gives_up, inner=None, **options):
    """gradxform's names: a transformation, and how late a worker may be."""
    inner = inner or {"transformation": "sgd", "learning_rate": RATE}
    transformation = dict({"transformation": transformation}, **options)
    return dict(transformation, inner=inner, job={"max_staleness": gives_up})


def drop_stale(threshold, inner=None):
    """Ringmaster with that threshold."""
    late = SQUARE_ROOT if threshold is None else threshold - 1
    return ours("drop_stale", late, inner, max_staleness=late)


def cases(modules):
    """All cases."""

    def add(name, symbol, pattern, calls, settings, *args):
        name = name + "-" + pattern
        made.append(run(modules, name, symbol, pattern, calls, settings, *args))

    made = []
    for pattern, calls in ("linear", 16), ("noisy", 14), ("cubes", 18):
        settings = {"gamma": RATE}
        tx = ours("drop_stale", None, max_staleness=np.inf)
        add("sgd", "AsynchronousSGD", pattern, calls, settings, tx)
    settings = {"gamma": RATE, "delay_adaptive": True}
    weight = {"transformation": "scale_by_staleness", "weight": "4 / max(4, s)"}
    tx = ours("drop_stale", None, [weight, tx["inner"]], max_staleness=np.inf)
    add("delay-adaptive", "AsynchronousSGD", "cubes", 18, settings, tx)

    for threshold, pattern, calls in (
        (1, "linear", 8),
        (2, "noisy", 12),
        (3, "cubes", 14),
        (3, "equal", 12),
        (4, "linear", 14),
        (3, "changing", 14),
        (2, "one-dies", 10),
    ):
        settings = {"gamma": RATE, "max_delay": threshold}
        name, tx = "ringmaster-%d" % threshold, drop_stale(threshold)
        add(name, "RingmasterASGD", pattern, calls, settings, tx)
    for kind, calls, settings in (
        ("3", 8, {"gamma": 0.5, "threshold": 3, "alpha": 0.25}),
        ("agnostic", 18, {"gamma": 0.5, "parameter_agnostic": True}),
    ):
        tx = drop_stale(settings.get("threshold"), "normalized momentum")
        name, symbol = "normalized-" + kind, "Momentum_Normalized_RingmasterASGD"
        add("ringmaster-" + name, symbol, "noisy", calls, settings, tx)
    for kind, calls, symbol, settings in (
        ("3", 8, "RingmasterMuonASGD", {"gamma": RATE, "max_delay": 3}),
        ("agnostic", 18, "ParameterAgnosticRingmasterMuonASGD", {"eta": 0.5}),
    ):
        tx = drop_stale(settings.get("max_delay"), "muon")
        add("ringmaster-muon-" + kind, symbol, "linear", calls, settings, tx, (2, 3))
    settings = {"gamma": RATE, "max_delay": 3, "nesterov": False}
    muon = {"transformation": "scale_by_muon", "beta": 0.95, "nesterov": False}
    tx = drop_stale(3, [muon, {"transformation": "sgd", "learning_rate": RATE}])
    name, symbol = "ringmaster-muon-plain-3", "RingmasterMuonASGD"
    add(name, symbol, "linear", 8, settings, tx, (2, 3))

    for batch, pattern, calls in (
        (1, "noisy", 5),
        (3, "linear", 5),
        (4, "equal", 3),
        (6, "noisy", 3),
        (5, "one-dies", 3),
    ):
        settings = {"gamma": RATE, "batch_size": batch}
        tx = ours("conditional_accumulator", 0, num_required=batch)
        add("rennala-%d" % batch, "RennalaSGD", pattern, calls, settings, tx)
    for pattern, calls in ("linear", 3), ("noisy", 3), ("equal", 2):
        tx = ours("worker_mean", 0, num_workers=WORKERS, method="all")
        add("malenia", "MaleniaSGD", pattern, calls, {"gamma": RATE}, tx)
    for pattern, calls in ("linear", 12), ("noisy", 10):
        tx = ours("worker_mean", None, num_workers=WORKERS, method="latest")
        add("ia2sgd", "IAASGD", pattern, calls, {"gamma": RATE}, tx)
    for pattern, calls in ("linear", 3), ("noisy", 3), ("cubes", 2), ("equal", 3):
        tx = ours("worker_mean", None, num_workers=WORKERS, method="ringleader")
        add("ringleader", "RingleaderASGD", pattern, calls, {"gamma": RATE}, tx)
    return made


if __name__ == "__main__":
    _format.write(__file__, {"ringmaster-lmo": "08b9f68d"}, cases(load(sys.argv[1])))
