"""The loss by layers: forward, backward, and the update of each layer.

- ``layers``: the step that applies the gradients of scanned layers in the backward
  pass. ``passes`` has the forward and the backward pass of a loss, and ``by_layer``
  the update of one layer, whose leaves ``step_leaves`` knows.
- ``evaluate``: the forward pass alone; ``turns`` is for its loops and conditionals.
- ``forward``: evaluates the jaxpr of both; ``stacks``: what waits in it.
- ``layer_loop``: a loop over layers; ``tpu``: its schedule for TPU.
"""
