"""Transformations from plain dicts, and dicts from transformations.

- ``config``: ``from_config`` and ``get_config``.
- ``hints``: what a value may be, as the annotation of its argument says it.
- ``keras``: what Keras and TensorFlow Addons write, put into our words.
- ``schedules``: the schedules that a config may name.

Imports the public face, of which a config names the functions, and ``_trees``.
"""
