"""Whole matrices on a mesh, for optimizers that multiply or decompose them.

- ``whole_matrices``: the transformation, and its plan for a traced update.
- ``cores``: the parts of an update that need whole matrices.
- ``equality``: what is equal for equal programs.
- ``placements``: where the leaves of a step lie.
- ``exchange``: brings matrices together on devices, and takes them back.
"""
