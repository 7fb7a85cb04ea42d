"""Benchmarks: ``python -m benchmarks`` lists the programs, and runs one by name."""
