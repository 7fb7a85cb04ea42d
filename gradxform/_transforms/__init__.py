"""Transformations that act at once: clips, scales, and the learning rate behind them.

One transformation a file: its state, ``scale_by_x``, and the alias ``x`` that chains a
clip in front of it and the learning rate behind it. The paper's equation stands above
the line that computes it.

A file has the name of its alias. Beside these:

- ``clipping``: by the global norm, by the norm of each leaf, and ``clip_before``, which
  puts Keras's clip arguments in front of an optimizer and hands it the norms.
- ``momentum``: how momentum begins and is read, for every optimizer that has one.
- ``alignment``: HeLoCo's correction of a gradient, for ``momentum_look_ahead``.
- ``learning_rate``: the last link of every alias.

Imports ``_trees``.
"""
