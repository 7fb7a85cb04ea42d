"""Keeps pytest from importing the makers, which need the original systems."""

collect_ignore_glob = ["_format.py", "make_*.py"]
