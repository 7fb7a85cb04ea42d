"""How a backup worker helps: seconds to a test accuracy, in ``sync`` and ``backup``.

``python -m benchmarks.backup`` trains the demo on threads, with one worker of four
slowed down 5 times, until the test accuracy is reached.
``sync`` waits for the slow worker in each step, ``backup`` (one backup worker) never
does. The two run in turns. Both runs of a pair have the same seed, and a learning rate
that falls over the same number of steps. The clock starts with the first push, when
everything has been compiled.
"""

import argparse
import time

import numpy as np

from gradxform import __main__ as main_job
from gradxform import engines

MODES = {"sync": 4, "backup": 3}  # How many of the four workers make a step.
STEPS = 400  # At most. Over so many the learning rate falls.
INTERVAL = 5  # Steps from one test to the next.


def seconds_to(target, mode, options, model, digits):
    """(seconds, steps) until the test accuracy is at least ``target``."""
    arguments = ["--mode", mode, "--straggler", str(options.straggler)]
    arguments += ["--work", str(options.work), "--steps", str(STEPS * MODES[mode])]
    job = main_job.make_job(main_job.parse(arguments), model, digits)
    start, tested = None, 0
    with engines.threads(job._replace(pushes=STEPS * len(job.workers))) as run:
        for push in run.pushes:
            start = start or time.perf_counter()
            if push.result.global_step < tested + INTERVAL:
                continue
            params, tested = run.server.pull()
            labels = np.argmax(model.logits(params, digits.test_images), axis=-1)
            if np.mean(labels == digits.test_labels) >= target:
                return time.perf_counter() - start, tested
    raise SystemExit(f"{mode} has not reached {target} within {STEPS} steps")


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs")
    parser.add_argument("--target", type=float, default=0.96, help="test accuracy")
    parser.add_argument("--work", type=float, default=0.02, help="gradient seconds")
    parser.add_argument("--straggler", type=float, default=5.0, help="times as slow")
    options = parser.parse_args()
    digits = main_job.load_digits()
    print(f"{'run':>4}{'sync':>16}{'backup':>16}{'backup / sync':>16}")
    for seed in range(options.runs):
        model = main_job.build_model(seed)
        model.logits(model.params, digits.test_images)  # Compiles it.
        (sync, sync_steps), (backup, backup_steps) = (
            seconds_to(options.target, mode, options, model, digits) for mode in MODES
        )
        left = f"{sync:6.1f} s / {sync_steps:3}"
        right = f"{backup:6.1f} s / {backup_steps:3}"
        print(f"{seed:4}{left:>16}{right:>16}{backup / sync:16.2f}", flush=True)


if __name__ == "__main__":
    main()
