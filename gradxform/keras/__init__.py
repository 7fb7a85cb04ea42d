"""Trains Keras models: any transformation as the optimizer of ``fit``.

- ``_optimizer``: a ``keras.optimizers.Optimizer`` around a transformation.

It needs Keras 3 with its JAX backend, and ``import gradxform`` does not import it.
"""

from gradxform.keras._optimizer import Optimizer as Optimizer
