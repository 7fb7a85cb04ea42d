"""Whole matrices on a mesh, for optimizers that multiply or decompose them.

- ``whole_matrices``: the transformation, and its plan for a traced update.
- ``unplaced``: a traced update without its mesh.
- ``division``: conditionals of several parameters, divided.
- ``loops``: loops of several parameters, divided.
- ``due``: in which branches of a conditional an array is needed.
- ``owners``: which equations of an update belong to one parameter.
- ``nested``: programs inside of an equation, and which of their variables are which.
- ``axes``: along which axes matrices stand alone.
- ``boundary``: where the fewest bytes pass.
- ``cores``: the parts of an update that need whole matrices.
- ``equality``: what is equal for equal programs.
- ``placements``: where the leaves of a step lie.
- ``layout``: where all its arrays lie, and which devices share which matrices.
- ``exchange``: brings matrices together on devices, and takes them back.
"""
