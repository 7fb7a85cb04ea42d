"""Kills workers and server at random moments over Ray, and counts everything.

``python -m tests.soak.chaos --minutes M`` (extras ``demo`` and ``ray``) trains the main
job so slowly that it takes M minutes. The seed chooses random pushes. Up to a tenth of
a second after each, the program kills the process of a worker or of the server
(``SIGKILL``). The server saves itself every two seconds. At the end the program
compares its own counts with those of the server and of the optimizer, and with the
checkpoints. It exits with 1 if anything is unaccounted for. ``--without`` makes the
same run without deaths. With ``--server-processes N`` the server is N processes, and
any of them may die. Every leaf with at least N rows is cut over all of them. At the
end the program compares the copies of the other leaves. With ``--pace`` a rule says
when workers begin. With ``--come-and-go`` a worker leaves now and then, and another
joins. After every push the ledger has to close, and with ``bounded_staleness`` no push
may be later than its bound.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

import jax
import numpy as np
import ray
from jax.sharding import PartitionSpec as P

from gradxform import __main__ as main_job
from gradxform import engines
from tests.soak.kills import saved

RATE, EVERY = 50, 2.0  # Pushes a second, seconds between checkpoints.
GOAL = 0.96
PACES = {
    "stale_synchronous": engines.stale_synchronous,
    "bounded_staleness": engines.bounded_staleness,
    "admission": lambda bound: engines.admission(bound, max_concurrent=1000),
}


def kill(actor):
    """Kills the process of an actor; False if it was already dying by itself."""
    try:
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), 9)
    except (ray.exceptions.RayActorError, ProcessLookupError):
        return False
    return True


def schedule(rng, pushes, num_workers, workers, server):
    """The victims by the push after which they die: a worker's index, or None."""
    moments = rng.choice(np.arange(pushes // 20, pushes * 19 // 20), workers + server)
    victims = [*rng.integers(num_workers, size=workers).tolist(), *[None] * server]
    return sorted(zip(moments.tolist(), victims, strict=True), key=lambda pair: pair[0])


def closes(counts):
    """Whether every gradient that was begun is somewhere, once."""
    ended = counts.pushed + counts.given_up + counts.unanswered
    shares = counts.by_worker.values()
    return (
        counts.started == counts.under_way + ended
        and counts.pushed == counts.accepted + counts.dropped + counts.lost
        and counts.accepted == sum(share.accepted for share in shares)
        and counts.dropped == sum(share.dropped for share in shares)
        and min(counts.under_way, counts.unanswered) >= 0
    )


class Asked:
    """A rule that counts how often it has let a worker begin."""

    def __init__(self, rule):
        self.rule, self.begun = rule, 0

    def __call__(self, progress):
        may = self.rule(progress)
        self.begun += may
        return may


def train(job, folder, deaths, rng, processes=1, come_and_go=0):
    """Runs the job and kills the victims.

    After each ``come_and_go`` pushes a worker leaves, and one like it joins. Returns
    the run's end, all its pushes, the counts after which the ledger did not close, and
    whether all processes of the server hold the same copies.
    """

    def cut(path, shape):
        return P("server") if shape and shape[0] % processes == 0 else P()

    pushes, killers, open_ledgers = [], [], []
    checkpoint = engines.Checkpoint(folder, every_seconds=EVERY, max_to_keep=None)
    options = {"server_processes": processes, "server_shardings": cut}
    with engines.ray(
        job, checkpoint=checkpoint, max_deaths=len(deaths), **options
    ) as run:

        def strike(victim, seconds, process):
            time.sleep(seconds)
            while True:
                there = dict(run.workers)
                # The victim may have left; then somebody else dies.
                who = there.get(victim, next(iter(there.values()), None))
                if victim is None:
                    who = run.server.actor
                    if process:
                        who = dict(enumerate(run.server.processes._actors)).get(process)
                if who is not None and kill(who):
                    return
                time.sleep(0.1)  # Between two lives: then the next one.

        for push in run.pushes:
            pushes.append(push)
            counts = run.counts()
            if not closes(counts):
                open_ledgers.append(counts)
            if come_and_go and len(pushes) % come_and_go == 0:
                leaving = int(rng.choice(sorted(run.workers)))
                with contextlib.suppress(ValueError):  # It has left already.
                    run.remove(leaving)
                    run.add(job.workers[leaving % len(job.workers)])
            while deaths and deaths[0][0] <= counts.accepted + counts.dropped:
                _, victim = deaths.pop(0)
                args = victim, rng.uniform(0.0, 0.1), int(rng.integers(processes))
                killers.append(threading.Thread(target=strike, args=args))
                killers[-1].start()
                if victim is None:  # One death of the server at a time.
                    break
        for killer in killers:
            killer.join()
        ended = pushes, run.counts(), run.server.stats(), run.server.state()
        if not closes(ended[1]):
            open_ledgers.append(ended[1])
        actors = run.server.processes._actors if processes > 1 else []
        held = ray.get([actor.__ray_call__.remote(copies) for actor in actors])
        return ended, open_ledgers, all(each == held[0] for each in held)


def copies(actor):
    """Runs in a process of the server: the bytes of the leaves that are not cut."""
    leaves = actor.process.core.version.leaves
    return [bytes(x.addressable_data(0)) for x in leaves if x.is_fully_replicated]


def resumed(job, folder):
    """The last checkpoint, as another run on another engine reads it."""
    with engines.simulated(job, checkpoint=folder) as run:
        assert list(run.pushes) == []  # It is finished.
        return run.server.state()


def saved_steps(folder):
    """The global steps of all checkpoints."""
    folder = pathlib.Path(folder)
    for pushes in saved(folder):
        counters = (folder / str(pushes) / "counters" / "metadata").read_text()
        yield json.loads(counters)["global_step"]


def same(tree, other):
    """Whether they have the same bits."""
    leaves = zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def account(pushes, counts, stats, state, folder, num_workers, goal):
    """All that must hold, and for each whether it does."""
    state = state["state"]
    known = {(push.worker, push.number) for push in pushes}
    incarnations = {}
    for push in pushes:
        incarnations.setdefault(push.local_step.incarnation, []).append(push)
    began = [
        min(push.local_step for push in incarnation)
        for incarnation in incarnations.values()
    ]
    applied = [
        [push.result.global_step for push in incarnation if push.result.applied]
        for incarnation in incarnations.values()
    ]
    tally, steps = (counts.accepted, counts.dropped), int(state.global_step)
    done, unheard = sum(tally), counts.pushed - len(pushes)
    most = num_workers * counts.server_deaths
    apart = all(len(each) == len({*each}) for each in applied)
    return {
        "accepted + dropped + lost = pushed": done + counts.lost == counts.pushed,
        "unheard answers were on their way at a death": 0 <= unheard <= most,
        "all pushes were made": done == goal,
        "the server counts as its users do": stats[:2] == tally,
        "the optimizer counts as the server does": (steps, int(state.stale_count))
        == stats[:2],
        "only lost pushes came twice": len(pushes) - len(known) == counts.lost,
        "only unheard numbers are missing": len(known) + unheard == done,
        "incarnations = deaths of the server + 1": len(incarnations)
        == counts.server_deaths + 1,
        "an incarnation begins at a checkpoint": {*began} <= {0, *saved_steps(folder)},
        "within an incarnation no step comes twice": apart,
    }


def main():
    """Prints the counts, and which checks hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.5, help="lowest time")
    parser.add_argument("--seed", type=int, default=0, help="for random victims")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--server-processes", type=int, default=1)
    parser.add_argument("--server-deaths", type=int, help="number of these")
    parser.add_argument("--worker-deaths", type=int, help="number of these")
    parser.add_argument("--goal", type=float, default=GOAL, help="test accuracy")
    parser.add_argument("--without", action="store_true", help="nobody is killed")
    parser.add_argument("--pace", choices=PACES, help="a rule for the workers")
    parser.add_argument("--bound", type=int, default=2, help="its first argument")
    parser.add_argument(
        "--come-and-go", type=int, default=0, help="pushes between two changes"
    )
    options = parser.parse_args()
    pushes = round(60 * RATE * options.minutes)
    arguments = ["--steps", str(pushes), "--work", str(options.workers / RATE)]
    arguments += ["--workers", str(options.workers)]
    model, digits = main_job.build_model(0), main_job.load_digits()
    job = main_job.make_job(main_job.parse(arguments), model, digits)
    rule = PACES[options.pace](options.bound) if options.pace else None
    pace = Asked(rule or (lambda progress: True))
    job = job._replace(pace=pace)
    rng = np.random.default_rng(options.seed)
    workers = options.worker_deaths or max(2, round(2 * options.minutes))
    server = options.server_deaths or max(1, round(0.5 * options.minutes))
    deaths = schedule(rng, pushes, options.workers, workers, server)

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        victims = [] if options.without else deaths
        ended, unclosed, alike = train(
            *(job, folder, victims, rng),
            *(options.server_processes, options.come_and_go),
        )
        seconds = time.perf_counter() - start
        checks = account(*ended, folder, options.workers, job.pushes)
        checks["the processes hold the same copies"] = alike
        checks["the ledger closes after every push"] = not unclosed
        started = ended[1].started
        checks["started = how often workers were let begin"] = started == pace.begun
        if options.pace == "bounded_staleness":
            latest = max(push.result.staleness for push in ended[0])
            checks[f"no push is later than {options.bound}"] = latest <= options.bound
        *_, counts, _, state = ended
        checks["resumed, it has the same bits"] = same(resumed(job, folder), state)
    labels = np.argmax(model.logits(state["params"], digits.test_images), axis=-1)
    accuracy = float(np.mean(labels == digits.test_labels))
    checks[f"accuracy >= {options.goal}"] = accuracy >= options.goal
    print(f"{seconds:.0f} s, test accuracy {accuracy:.3f}")
    shares = counts.by_worker
    counted = counts._replace(by_worker=len(shares))
    print(", ".join(f"{name} {count}" for name, count in counted._asdict().items()))
    for unclosed_counts in unclosed[:3]:
        print(unclosed_counts)
    for name, holds in checks.items():
        print(f"{'yes' if holds else 'NO':4}{name}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
