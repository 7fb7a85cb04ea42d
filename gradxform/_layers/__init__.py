"""The loss by layers: forward, backward, and the update of each layer.

- ``layers``: the step that applies the gradients of scanned layers in the backward
  pass. ``stacks`` finds their scan in the jaxpr of a loss, ``passes`` has its forward
  and backward pass, and ``by_layer`` the update of one layer, whose leaves
  ``step_leaves`` knows.
- ``evaluate``: the forward pass alone; ``forward`` evaluates its jaxpr.
- ``layer_loop``: a loop over layers; ``tpu``: its schedule for TPU.
"""
