"""The server in several processes.

All its processes write ``checkpoints`` together, each its own parts.

Imports all subpackages above it.
"""
