"""Makes tf1_layers.json: batch norm's averages beside late gradients, and regularizers.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_layers.py
"""

import _format
import numpy as np
import tensorflow as tf
from make_tf1 import session

MOMENTUM = 0.9
# How late each push is. More than 1 is too late.
LATENESS = (0, 1, 2, 0, 2, 0)


def batch_norm():
    """DropStaleGradientOptimizer trains a model whose gradients wait for UPDATE_OPS."""
    rng, events = np.random.RandomState(5), []
    with tf.Graph().as_default(), session() as sess:
        global_step = tf.compat.v1.train.get_or_create_global_step()
        x = tf.compat.v1.placeholder(tf.float32, (8, 3))
        y = tf.compat.v1.layers.batch_normalization(
            x, momentum=MOMENTUM, training=True, name="norm"
        )
        loss = tf.reduce_mean(tf.square(y - 1.0))
        opt = tf.contrib.opt.DropStaleGradientOptimizer(
            tf.compat.v1.train.AdagradOptimizer(0.1), 1
        )
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            pairs = opt.compute_gradients(loss)
            push = opt.apply_gradients(pairs, global_step=global_step)
        found = tf.compat.v1.global_variables("norm/")
        found = [v for v in found if not v.op.name.endswith("Adagrad")]
        values = {v.op.name.split("/")[1]: v for v in found}
        grads = {var.op.name.split("/")[1]: grad for grad, var in pairs}
        sess.run(tf.compat.v1.global_variables_initializer())
        start = sess.run(values)
        for lateness in LATENESS:
            batch = np.float32(np.round(256 * rng.random_sample((8, 3))) / 128)
            local_step = sess.run(global_step) - lateness
            fed = {x: batch, opt._local_step: local_step}
            computed, _ = sess.run([grads, push], fed)
            events.append(
                {
                    "local_step": local_step,
                    "batch": batch,
                    "grads": computed,
                    "global_step": sess.run(global_step),
                    "params": sess.run(values),
                }
            )
    return {
        "name": "batch-norm-drop-stale",
        "symbol": "tf.layers.batch_normalization",
        "settings": {"momentum": MOMENTUM, "learning_rate": 0.1, "staleness": 1},
        "params": start,
        "events": events,
    }


def regularizer(name, make, scale):
    value = _format.params(("w",))["w"]
    with tf.Graph().as_default(), session() as sess:
        w = tf.Variable(value)
        loss = make(scale)(w)
        total, (grad,) = sess.run([loss, tf.gradients(loss, [w])], {w: value})
    return {
        "name": name,
        "symbol": name,
        "settings": {"scale": scale},
        "params": {"w": value},
        "loss": total,
        "grads": {"w": grad},
    }


def main():
    layers = tf.contrib.layers
    cases = [
        batch_norm(),
        regularizer("tf.contrib.layers.l2_regularizer", layers.l2_regularizer, 0.01),
        regularizer("tf.contrib.layers.l1_regularizer", layers.l1_regularizer, 0.01),
        regularizer("tf.keras.regularizers.l2", tf.keras.regularizers.l2, 0.01),
    ]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
