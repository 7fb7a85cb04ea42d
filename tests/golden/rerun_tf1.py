"""Runs the makers of TensorFlow 1 under another version, and compares: writes nothing.

The traces of tf1.json, tf1_accumulators.json and tf1_sparse.json are 1.15.5's. In an
environment with TensorFlow 1.12.3, 1.13.2 or 1.14.0, from the repository's root:

    python tests/golden/rerun_tf1.py

For each symbol it prints how many traces are the same to the bit. It names the others
and says how far apart they are, relative to the largest number of their list, or that
they do not fit at all.
"""

import collections
import json
import os

import _format
import numpy as np
import tensorflow as tf

if not hasattr(tf.compat, "v1"):  # Before 1.13 its names lie in tf itself.
    tf.compat.v1 = tf

import make_tf1
import make_tf1_accumulators

HERE = os.path.dirname(os.path.abspath(__file__))
OWN_TRACES = tf.__version__ < "1.14"  # tf.keras: tf1_12.json and tf1_13.json.


def where_it_runs(module, *makers):
    """Prints each case that this version refuses, so that the others go on."""

    def or_none(make):
        def made(*args, **kwargs):
            try:
                return make(*args, **kwargs)
            except Exception as error:
                said = str(error).split("\n")[0][:60]
                print("  {}{}: {}".format(make.__name__, args[:1], said))

        return made

    for maker in makers:
        setattr(module, maker, or_none(getattr(module, maker)))


def apart(got, expected):
    """How far two traces are apart; None where they do not fit."""
    if isinstance(expected, dict):
        if not isinstance(got, dict) or sorted(got) != sorted(expected):
            return None
        return largest([apart(got[key], expected[key]) for key in expected])
    if isinstance(expected, list) and not is_numbers(expected):
        if not isinstance(got, list) or len(got) != len(expected):
            return None
        return largest(list(map(apart, got, expected)))
    if not is_numbers(expected):
        return 0.0 if got == expected else None
    got, expected = np.array(got, np.float64), np.array(expected, np.float64)
    finite = np.isfinite(expected)
    if got.shape != expected.shape or (np.isfinite(got) != finite).any():
        return None
    if not finite.any():
        return 0.0
    scale = max(np.abs(expected[finite]).max(), 1e-30)
    return np.abs(got[finite] - expected[finite]).max() / scale


def is_numbers(value):
    return np.asarray(value).dtype.kind in "if" and np.size(value) > 0


def largest(distances):
    return None if None in distances else max(distances, default=0.0)


def compare(maker, versions, cases):
    """Takes the place of ``_format.write``."""
    name = os.path.basename(maker)[len("make_") : -len(".py")] + ".json"
    with open(os.path.join(HERE, name)) as file:
        recorded = {case["name"]: case for case in json.load(file)["cases"]}
    same, of = collections.Counter(), collections.Counter()
    for case in filter(None, cases):
        got, expected = case["steps"], recorded[case["name"]]["steps"]
        text = _format._dump(got)
        of[case["symbol"]] += 1
        if text == _format._dump(expected):
            same[case["symbol"]] += 1
        else:
            print("  {}: {}".format(case["name"], apart(json.loads(text), expected)))
    for symbol in of:
        print(name, symbol, same[symbol], "of", of[symbol], "the same to the bit")


if __name__ == "__main__":
    _format.write = compare
    print("TensorFlow", tf.__version__)
    makers = ("drop_stale", "clip_global", "clip_leaf", "adagrad", "plain_adagrad")
    where_it_runs(make_tf1, *makers)
    where_it_runs(make_tf1_accumulators, "rounds", "events", "sync_replicas")
    import make_tf1_sparse  # It takes the two clips from make_tf1.

    if OWN_TRACES:
        tf.keras.experimental = None  # Its schedules are unlike all others.
        make_tf1.adagrad = make_tf1_sparse.keras = lambda *args, **kwargs: None
    where_it_runs(make_tf1_sparse, "plain", "keras")
    for maker in (make_tf1, make_tf1_accumulators, make_tf1_sparse):
        maker.main()
