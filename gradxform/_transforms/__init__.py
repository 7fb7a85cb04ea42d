"""Transformations that act at once: clips, scales, and the learning rate behind them.

One transformation a file: its state, ``scale_by_x``, and the alias ``x`` that chains a
clip in front of it and the learning rate behind it. The paper's equation stands above
the line that computes it.

- ``clipping``: by the global norm, by the norm of each leaf, and ``clip_before``, which
  puts Keras's clip arguments in front of an optimizer and hands it the norms.
- ``adagrad`` and ``novograd``: they take those norms and read the gradients once less.
- ``momentum``: how the momentum of these and the next two begins, and is read.
- ``delayed_nesterov``: momentum for gradients that arrive one by one, and late.
- ``momentum_look_ahead``: also for such gradients; it steps ahead along the momentum.
  With ``alignment`` it corrects gradients that do not point along the momentum.
- ``measure_cosine``: the cosine between each gradient and the one before it.
- ``learning_rate``: the last link of every alias.
- ``densify``: makes row-sparse gradients dense, for a link that must change every row.

Imports ``_trees``.
"""
