"""Makes areal.json: when AReaL's ``StalenessManager`` lets another rollout begin.

With Python 3.11, from the repository's root, and AReaL checked out elsewhere:

    git clone https://github.com/inclusionAI/AReaL ../AReaL  # at 4aef98d8
    python benchmarks/golden/make_areal.py ../AReaL

``areal.api`` imports PyTorch. The manager needs one class of it, the record of its
counts, which is taken from its source.
"""

import ast
import dataclasses
import importlib.util
import os
import random
import sys
import types

import _format

EVENTS = 1600
CASES = [
    (0, 1, 1),
    (0, 4, 3),
    (1, 8, 1),
    (1, 3, 5),
    (2, 16, 4),
    (2, 100, 2),
    (3, 5, 2),
    (4, 12, 3),
    (4, 1000, 8),
    (7, 32, 4),
    (9, 6, 1),
    (12, 64, 5),
    (15, 1000, 1),
    (15, 20, 16),
]
"""max_staleness, max_concurrent_rollouts, consumer_batch_size."""


def load(checkout):
    """The class of the manager."""
    areal = os.path.join(checkout, "areal")
    with open(os.path.join(areal, "api", "io_struct.py")) as file:
        tree = ast.parse(file.read())
    wanted = [node for node in tree.body if getattr(node, "name", "") == "RolloutStat"]
    sys.modules["areal"] = types.ModuleType("areal")
    api = sys.modules["areal.api"] = types.ModuleType("areal.api")
    api.dataclass = dataclasses.dataclass
    exec(compile(ast.Module(wanted, []), "io_struct.py", "exec"), vars(api))
    path = os.path.join(areal, "infra", "staleness_manager.py")
    spec = importlib.util.spec_from_file_location("staleness_manager", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StalenessManager


class Version:
    """What the manager asks for the version of the model."""

    def __init__(self):
        self.version = 0

    def get_version(self):
        return self.version


def run(manager_of, number, settings):
    """One case: random events, and after each whether there is capacity.

    At most one rollout in a hundred begins without capacity, so the manager sees counts
    above its limits, too.
    """
    rng = random.Random(number)
    max_staleness, concurrent, batch = settings
    version = Version()
    manager = manager_of(version, concurrent, batch, max_staleness)
    events, may_begin, trained = [], [], 0
    while len(events) < EVENTS:
        stats = manager.get_stats()
        event = rng.choice("SSSAARV") if rng.random() < 0.99 else "?"
        if event == "?":
            event = str(rng.randrange(10)) if rng.random() < 0.3 else "S"
        elif event == "S" and manager.get_capacity() <= 0:
            event = "A"
        if event in "AR" and not stats.running:
            continue
        if event == "R" and rng.random() < 0.7:
            continue
        if event == "V" and stats.accepted - trained < batch:
            continue
        if event == "S":
            manager.on_rollout_enqueued()
            manager.on_rollout_submitted()
        elif event == "A":
            manager.on_rollout_accepted()
        elif event == "R":
            manager.on_rollout_rejected()
        elif event == "V":
            version.version += 1
            trained += batch
        else:  # The run is resumed at that version.
            manager = manager_of(version, concurrent, batch, max_staleness)
            version.version = int(event)
            manager.on_version_recovered(version.version)
            trained = version.version * batch
        events.append(event)
        may_begin.append("01"[manager.get_capacity() > 0])
    names = ("max_staleness", "max_concurrent_rollouts", "consumer_batch_size")
    return {
        "name": "areal-" + "-".join(map(str, settings)),
        "symbol": "areal.infra.staleness_manager.StalenessManager",
        "settings": dict(zip(names, settings, strict=True)),
        "ours": {"rule": "admission"},
        "sequence": "".join(events),
        "may_begin": "".join(may_begin),
    }


def cases(manager):
    return [run(manager, number, each) for number, each in enumerate(CASES)]


if __name__ == "__main__":
    _format.write(__file__, {"AReaL": "4aef98d8"}, cases(load(sys.argv[1])))
