"""Transformations for any gradient: clips, scales, and the learning rate behind them.

One transformation a file, which has the name of its alias. Beside these:

- ``clipping``: by the global norm, by the norm of each leaf, and ``keras_clip``, which
  puts Keras's clip arguments in front of an optimizer.
- ``momentum``: how momentum begins and is read, for every optimizer that has one.
- ``half``: half precision, for ``master_weights`` and ``round_stochastically``.
- ``measure_norms``: norms for the log, which change nothing.
- ``learning_rate``: the last link of every alias.
"""
