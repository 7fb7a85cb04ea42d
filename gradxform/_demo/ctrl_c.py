"""Ctrl-C in the demo: it ends the process at once, with one line, from its start on.

Python imports this module before all others of the package, so it needs no more than
signals do.
"""

from __future__ import annotations

import os
import signal
import sys

PROGRAM = "python -m gradxform"


def interrupt(*_: object) -> None:
    """Ends the process at once. It is a handler of SIGINT, too.

    The interpreter's own end crashes while XLA is still at work.
    """
    os.write(sys.stderr.fileno(), f"{PROGRAM}: interrupted\n".encode())
    os._exit(130)


def hear() -> None:
    """Until :func:`loaded`, Ctrl-C ends the process without an exception.

    One in the midst of an import, or of JAX's callbacks, may be lost or become another
    one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def loaded() -> None:
    """From now on Ctrl-C is a ``KeyboardInterrupt``, which engines clean up after."""
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
