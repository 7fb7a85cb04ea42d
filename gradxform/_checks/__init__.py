"""Errors that name the argument, the path, what was given and what to do.

- ``arguments``: whether an argument is a number in its range, a flag, a function.
- ``keywords``: which keywords are static, and whether somebody reads each of them.
- ``nested``: whether a value of dicts and lists is small.
- ``structures``: whether trees fit each other, and how messages name their leaves.
"""
