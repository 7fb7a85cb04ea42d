"""Benchmarks: each module prints one table; run it with ``python -m``."""
