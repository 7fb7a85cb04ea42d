"""Row sparsity, and all that knows it.

``indexed_slices`` is a few rows and their indices: a gradient. ``table_rows`` has such
rows of a table among parameters. ``stored_rows`` stores both, lets them go through JAX
and pickle, and lets them refuse functions for dense arrays; ``opaque`` hides the row
numbers from these. ``rows`` reads and writes rows. ``boundary`` shows arrays to
everything outside.

``lookup`` reads tables so that their gradients are row-sparse, and ``readings`` finds
what a loss reads. ``lazy`` lets any transformation work on the touched rows, and
``by_row`` says what is special about them. ``densify`` makes arrays of the gradients.
"""
