"""Trains a digit classifier with workers that share a server.

The workers pull parameters from the server and push gradients to it. Prints how many
pushes were accepted and dropped, and the accuracy on test digits as its last line. The
progress goes to stderr: a bar on a terminal, and elsewhere a line every five seconds.

To see the cost of lateness: --workers 16 --max-staleness 30, then 6. To see the cost of
a slow worker: --straggler 5 --mode sync, then backup. With --checkpoint DIR the same
command goes on where it was killed. Ctrl-C ends it at once, with exit code 130. SIGTERM
saves it first and gives exit code 143.
"""

# The text above is what --help says first. Then come the options of a class below. This
# module is imported before JAX, and needs nothing but Python.

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import shutil
import signal
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, TextIO

from gradxform import __version__

OPTIMIZERS = ("novograd", "adagrad")  # Functions of gradxform.
ENGINES = ("threads", "ray", "simulated")  # Functions of gradxform.engines.
PROGRAM = "python -m gradxform"
WIDTH = 80  # No row of the output is wider.
PICTURES = (".png", ".pdf", ".svg")
MODES = ("async", "backup", "sync")
MANY = 2**31 - 1  # Steps are int32 on the device.

# Options that have an effect only with another one, and with which value of it.
NEEDS = {
    "address": ("engine", "ray"),
    "backups": ("mode", "backup"),
    "checkpoint_every": ("checkpoint", "DIR"),
    "connect_timeout": ("engine", "ray"),
    "max_staleness": ("mode", "async"),
    "server_processes": ("engine", "ray"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2."""
        fail(message)


def fail(message: str) -> NoReturn:
    """Ends the process with an error of one line and exit code 2."""
    line = " ".join(message.splitlines())
    print(f"{PROGRAM}: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a text to ``sys.stdout``, or to another stream.

    If that fails, it ends the process with one line. If the reader has gone, as with
    ``head``, it ends without a line and with exit code 141, as other programs do.
    """
    stream = stream or sys.stdout
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        # Python flushes again as it ends, and would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        fail(f"the results cannot be printed: {error.strerror}")


def interrupt(*_: object) -> NoReturn:
    """Ends the process at once. It is a handler of SIGINT, too.

    The interpreter's own end crashes while XLA is still at work.
    """
    os.write(sys.stderr.fileno(), f"{PROGRAM}: interrupted\n".encode())
    os._exit(130)


def begin() -> None:
    """Checks the command line and prints a first line, before anything is loaded.

    Until :func:`loaded`, Ctrl-C ends the process without an exception: one in the midst
    of an import, or of JAX's callbacks, may be lost or become another one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    parse()
    say("loading, compiling\n", sys.stderr)


def loaded() -> None:
    """From now on Ctrl-C is a ``KeyboardInterrupt``, which engines clean up after."""
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _number(kind: type, low: float, high: float = MANY) -> dict[str, Any]:
    """What ``argparse`` has to know of an option with a value in [low, high]."""
    word, metavar = ("an integer", "N") if kind is int else ("a number", "X")

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        allowed = f"must be {word} in [{low:.10g}, {high:.10g}]"
        raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")

    return {"type": parse, "metavar": metavar}


def _picture(path: str) -> str:
    """Looks before the training whether a picture can be written there."""
    if not path.lower().endswith(PICTURES):
        allowed = ", ".join(PICTURES)
        raise argparse.ArgumentTypeError(f"must end in {allowed}, got {path!r}")
    if os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise argparse.ArgumentTypeError(f"{path!r} cannot be written")
    return path


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says; :func:`parse` makes the command line from it.

    Attributes:
      mode: in async each gradient that is not too late makes a step; in sync a step
        waits for a gradient of every worker and takes their mean; backup is sync, but
        no step waits for the slowest
      engine: where workers run: threads of this process, processes of a local Ray
        cluster, or simulated, on a virtual clock
      optimizer: the optimizer that scales the clipped gradients
      workers: the number of workers that push gradients
      backups: in mode backup, the number of slowest workers that a step does not wait
        for
      max_staleness: in mode async, drop a push whose worker pulled more than N steps
        ago
      steps: in every mode, how many pushes reach the server, accepted and dropped ones
        together
      work: how many seconds a gradient takes, on average: a worker sleeps for the rest,
        as if the model were heavier
      straggler: the last worker takes this many times as long as the others
      seed: the seed of weights, minibatches and durations; with simulated it repeats a
        run exactly, but with threads and ray the order of pushes may differ
      checkpoint: save the training to DIR while it runs, and go on from a training that
        is saved there; on Ray its server may then die, too
      checkpoint_every: save it every X seconds
      logdir: write event files for TensorBoard to DIR, to watch the training with
      address: the address of the Ray cluster to run on, as host:6379, or auto for the
        cluster of this machine (default: a cluster of its own)
      server_processes: the number of processes of the server; each has a part of the
        leaves above a megabyte, and the whole of this small model
      connect_timeout: how many seconds the Ray cluster may take to answer
      plot: draw the loss and the staleness of all pushes to FILE, such as x.png
    """

    mode: Annotated[str, {"choices": MODES}] = "async"
    engine: Annotated[str, {"choices": ENGINES}] = "threads"
    optimizer: Annotated[str, {"choices": OPTIMIZERS}] = "novograd"
    workers: Annotated[int, _number(int, 1, 1000)] = 4
    backups: Annotated[int, _number(int, 1, 999)] = 1
    max_staleness: Annotated[int, _number(int, 0)] = 4
    steps: Annotated[int, _number(int, 1)] = 3000
    work: Annotated[float, _number(float, 0.001, 60.0)] = 0.01
    straggler: Annotated[float, _number(float, 1.0, 1000.0)] = 1.0
    seed: Annotated[int, _number(int, 0)] = 0
    checkpoint: Annotated[str | None, {"metavar": "DIR"}] = None
    checkpoint_every: Annotated[float, _number(float, 0.0, math.inf)] = 5.0
    logdir: Annotated[str | None, {"metavar": "DIR"}] = None
    address: Annotated[str | None, {"metavar": "ADDRESS"}] = None
    server_processes: Annotated[int, _number(int, 1, 64)] = 1
    connect_timeout: Annotated[float, _number(float, 0.001, math.inf)] = 30.0
    plot: Annotated[str | None, {"type": _picture, "metavar": "FILE"}] = None

    def settings(self) -> dict[str, Any]:
        """The options that decide what is trained, for checkpoints to remember."""
        names = ("mode", "optimizer", "workers", "seed", "backups", "max_staleness")
        return {name: getattr(self, name) for name in names}


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; checks those that depend on each other."""
    width = min(WIDTH, shutil.get_terminal_size().columns) - 2
    parser = Parser(
        prog=PROGRAM,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=functools.partial(argparse.HelpFormatter, width=width),
        argument_default=argparse.SUPPRESS,  # So that ``given`` has no other options.
    )
    parser.add_argument(
        "--version", action="version", version=f"gradxform {__version__}"
    )
    said = re.findall(
        r"^  (\w+): (.*(?:\n    .*)*)", inspect.getdoc(Options) or "", re.M
    )
    told = {name: " ".join(text.split()) for name, text in said}
    hints = typing.get_type_hints(Options, include_extras=True)
    for field in dataclasses.fields(Options):
        help = told[field.name]
        if field.default is not None:
            help += f" (default: {field.default})"
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, help=help, **hints[field.name].__metadata__[0])
    given = vars(parser.parse_args(argv))
    options = Options(**given)
    for name in given.keys() & NEEDS.keys():
        other, value = NEEDS[name]
        present = getattr(options, other)
        if present is None or value not in (present, "DIR"):
            fail(f"argument --{name.replace('_', '-')}: needs --{other} {value}")
    if options.mode == "backup" and options.backups >= options.workers:
        fail(f"argument --backups: must be below --workers, got {options.backups}")
    return options
