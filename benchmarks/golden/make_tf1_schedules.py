"""Makes tf1_schedules.json: the learning rates of TensorFlow 1.15.5's schedules.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_schedules.py
"""

import _format
import tensorflow as tf
from make_tf1 import session

# The calls of the page of TensorFlow, letter by letter.
CALLS = [
    "exponential_decay(0.1, step, steps, 0.5)",
    "exponential_decay(0.1, step, steps, 0.5, staircase=True)",
    "piecewise_constant(step, [steps, 2 * steps], [0.1, 0.05, 0.01])",
    "polynomial_decay(0.1, step, steps, 0.01, power=2.0)",
    "polynomial_decay(0.1, step, steps, 0.0, power=0.5)",
    "polynomial_decay(0.1, step, steps, 0.01, power=2.0, cycle=True)",
    "natural_exp_decay(0.1, step, steps, 0.5)",
    "natural_exp_decay(0.1, step, steps, 0.5, staircase=True)",
    "inverse_time_decay(0.1, step, steps, 0.5)",
    "inverse_time_decay(0.1, step, steps, 0.5, staircase=True)",
    "cosine_decay(0.1, step, steps, alpha=0.2)",
    "cosine_decay_restarts(0.1, step, steps, t_mul=2.0, m_mul=0.5)",
    "linear_cosine_decay(0.1, step, steps)",
]
# 41 / 41 is 1, and 41 times the float32 nearest to 1 / 41 is less.
STEPS = (6, 41, 100, 1000, 10_000, 100_000, 1_000_000)


def counts(steps):
    """The start, and at, before and behind each multiple up to the seventh."""
    near = {n * steps + k for n in range(8) for k in (-1, 0, 1)} | {steps // 2}
    return sorted(count for count in near if count >= 0)


def case(call, steps):
    with tf.Graph().as_default(), session() as sess:
        step = tf.compat.v1.placeholder(tf.int64, ())
        rate = eval("tf.train." + call, {"tf": tf, "step": step, "steps": steps})
        rates = [sess.run(rate, {step: count}) for count in counts(steps)]
    return {
        "name": "{}-{}".format(call, steps),
        "symbol": "tf.train." + call.split("(")[0],
        "call": "tf.train." + call,
        "decay_steps": steps,
        "counts": counts(steps),
        "rates": rates,
    }


def main():
    cases = [case(call, steps) for call in CALLS for steps in STEPS]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
