"""The modules of the demo: its options, its data and model, and its output.

``python -m gradxform`` runs ``gradxform/__main__.py``, which makes workers,
transformation and job. It uses these modules in this order: ``command_line`` checks the
options before anything is loaded; ``digits`` gives the data and the model; ``report``
shows the progress and the results.

Python imports the package before its ``__main__``. So ``gradxform/__init__.py`` calls
``ctrl_c.hear`` and ``command_line.begin`` first, if the command is ``python -m
gradxform``.

- ``ctrl_c``: how Ctrl-C ends it.
- ``command_line``: every option, with its default and range.
- ``digits``: the data and the model. It imports nothing of the package.
- ``report``: the progress, the table and the picture.
"""
