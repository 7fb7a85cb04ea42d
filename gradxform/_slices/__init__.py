"""Runs a function of whole arrays on some slices of them, as rows or layers.

- ``rules``: a table, what each operation does to the slices of an array.
- ``slices``: evaluates a jaxpr for some slices, by this table.
- ``kinds``: which leaves of a step have slices, and along which axis.
"""
