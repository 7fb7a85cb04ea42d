"""Transformations from plain dicts, and dicts from transformations.

- ``config``: ``from_config`` and ``get_config``.
- ``keras``: translates the configs that Keras and TensorFlow Addons write.
- ``schedules``: Keras's schedules that optax lacks.
"""
