"""Makes tf1_checkpoint.json: what TensorFlow 1.15.5 saves, and the steps behind it.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_checkpoint.py
"""

import os
import tempfile

import _format
import tensorflow as tf
from make_tf1 import feed, linear_loss, placeholders, session, slot_variables, variables

LEAVES = ("w", "b")
BEFORE, AFTER = 4, 4
RATE = {"learning_rate": 0.1}
CASES = {
    "AdagradOptimizer": RATE,
    "FtrlOptimizer": dict(RATE, l1_regularization_strength=0.01),
    "MomentumOptimizer": dict(RATE, momentum=0.9),
    "AdamOptimizer": RATE,
}


def case(name, staleness=None):
    """Trains, saves, reads the checkpoint, and trains on from it in a new session.

    With a staleness, DropStaleGradientOptimizer is around it, and two pushes are late.
    """
    settings = CASES[name]
    with tf.Graph().as_default(), session() as sess:
        global_step = tf.compat.v1.train.get_or_create_global_step()
        params, grads = variables(LEAVES, use_resource=False), placeholders(LEAVES)
        inner = opt = getattr(tf.compat.v1.train, name)(**settings)
        if staleness is not None:
            opt = tf.contrib.opt.DropStaleGradientOptimizer(inner, staleness)
        pairs = opt.compute_gradients(linear_loss(params, grads), list(params.values()))
        push = opt.apply_gradients(pairs, global_step=global_step)
        slots = slot_variables(inner, params)
        saver = tf.compat.v1.train.Saver()
        pushes = _format.gradients("plain", BEFORE + AFTER, LEAVES)

        def step(number):
            fed = feed(grads, pushes[number])
            recorded = {"grads": pushes[number]}
            if staleness is not None:
                late = staleness + 1 if number in (2, BEFORE + 2) else 0
                recorded["local_step"] = sess.run(global_step) - late
                fed[opt._local_step] = recorded["local_step"]
            sess.run(push, fed)
            recorded["global_step"] = sess.run(global_step)
            recorded["params"] = sess.run(params)
            recorded["slots"] = sess.run(slots)
            return recorded

        sess.run(tf.compat.v1.global_variables_initializer())
        for number in range(BEFORE):
            step(number)
        with tempfile.TemporaryDirectory() as folder:
            saver.save(sess, os.path.join(folder, "model.ckpt"), global_step)
            sess.run(tf.compat.v1.global_variables_initializer())
            saver.restore(sess, tf.train.latest_checkpoint(folder))
            names = [name for name, _ in tf.train.list_variables(folder)]
            checkpoint = {name: tf.train.load_variable(folder, name) for name in names}
        then = [step(number) for number in range(BEFORE, BEFORE + AFTER)]
    return {
        "name": name + ("-drop-stale" if staleness is not None else ""),
        "symbol": "tf.train." + name,
        "settings": settings,
        "checkpoint": checkpoint,
        "dtypes": {name: str(value.dtype) for name, value in checkpoint.items()},
        "then": then,
    }


def scope_and_parts():
    """A variable in a scope, and a table in two parts, after one step of Adagrad."""
    with tf.Graph().as_default(), session() as sess:
        partitioner = tf.compat.v1.fixed_size_partitioner(2)
        table = tf.compat.v1.get_variable("table", [5, 2], partitioner=partitioner)
        with tf.compat.v1.variable_scope("layer"):
            kernel = tf.compat.v1.get_variable("kernel", [3])
        rows = tf.nn.embedding_lookup(table, [0, 3], partition_strategy="div")
        loss = tf.reduce_sum(rows) + tf.reduce_sum(kernel)
        push = tf.compat.v1.train.AdagradOptimizer(**RATE).minimize(loss)
        sess.run(tf.compat.v1.global_variables_initializer())
        sess.run(push)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.ckpt")
            tf.compat.v1.train.Saver().save(sess, path)
            return {
                "name": "scope-and-parts",
                "symbol": "tf.train.Saver",
                "shapes": dict(tf.train.list_variables(folder)),
                "checkpoint": {
                    name: tf.train.load_variable(folder, name)
                    for name in ("table/Adagrad", "layer/kernel/Adagrad")
                },
            }


def main():
    cases = [case(name) for name in CASES] + [case("AdagradOptimizer", staleness=1)]
    cases.append(scope_and_parts())
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
