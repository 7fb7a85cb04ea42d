"""Transformations from plain dicts, and dicts from transformations.

- ``config``: ``from_config`` and ``get_config``.
- ``hints``: the values that the annotation of an argument allows.
- ``keras``: translates the configs that Keras and TensorFlow Addons write.
- ``schedules``: the schedules that a config may name.

Imports ``_trees`` and the public API, whose functions a config names.
"""
