"""Where arrays lie: on the devices of a mesh, or in the host's memory.

- ``mesh``: sums over devices, inside ``shard_map``.
- ``abstract_state``: where a new state lies, before it is made.
- ``host``: arrays in the host's memory: ``on_host``, and how a step gets at them.
"""
