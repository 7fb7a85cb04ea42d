"""Row sparsity, and all that knows it.

``stored_rows`` is a few rows and their indices: of a gradient (``indexed_slices``), or
of a table among parameters (``table_rows``). ``opaque`` hides the row numbers from
functions for dense arrays. ``rows`` reads and writes rows. ``boundary`` shows arrays to
everything outside.

``lookup`` reads tables so that their gradients are row-sparse, and ``readings`` finds
what a loss reads. ``lazy`` lets any transformation work on the touched rows, and
``by_row`` says what is special about them. ``densify`` makes arrays of the gradients.

Imports ``_trees``.
"""
