"""The modules of the demo: its options, its data and model, and its output.

``python -m gradxform`` runs ``gradxform/__main__.py``, which makes workers,
transformation and job. It uses these modules in this order: ``command_line`` checks the
options before anything is loaded; ``digits`` gives the data and the model; ``report``
shows the progress and the results.

- ``command_line``: every option, with its default and range.
- ``digits``: the data and the model. It imports nothing of the package.
- ``report``: the progress and the table.

Imports the public API, ``engines`` and ``_server``. Only the demo imports it.
"""
