"""Where arrays lie: on the devices of a mesh, or in the host's memory.

- ``mesh``: sums over devices, inside ``shard_map``.
- ``host``: arrays in the host's memory: ``on_host``, and how a step gets at them.
"""
