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
import difflib
import functools
import inspect
import math
import os
import re
import shutil
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TextIO

from gradxform import __version__
from gradxform._demo.ctrl_c import PROGRAM
from gradxform._server.extras import check_installed

OPTIMIZERS = ("novograd", "adagrad")  # Functions of gradxform.
ENGINES = ("threads", "ray", "simulated")  # Functions of gradxform.engines.
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


def begin() -> None:
    """Checks the command line and prints a first line, before anything is loaded."""
    parse()
    say("loading, compiling\n", sys.stderr)


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


def _check_picture(name: str, path: str) -> None:
    """Looks before the training whether a picture can be written there."""
    if not path.lower().endswith(PICTURES):
        allowed = ", ".join(PICTURES)
        fail(f"argument --{name}: must end in {allowed}, got {path!r}")
    if os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK):
        fail(f"argument --{name}: {path!r} cannot be written")


def _check_folder(name: str, path: str) -> None:
    """Looks before the training whether files can be written in a folder.

    If there is none yet, the one above it is looked at. A bucket of a cloud is not.
    """
    if not path:
        fail(f"argument --{name}: must be a path, got {path!r}")
    if "://" in path:
        return
    there = os.path.abspath(os.path.expanduser(path))
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        fail(f"argument --{name}: {there!r} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        fail(f"argument --{name}: {path!r} cannot be written")


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
    plot: Annotated[str | None, {"metavar": "FILE"}] = None

    def settings(self) -> dict[str, Any]:
        """The options that decide what is trained, for checkpoints to remember."""
        names = ("mode", "optimizer", "workers", "seed", "backups", "max_staleness")
        return {name: getattr(self, name) for name in names}

    def packages(self) -> Iterator[tuple[str, str, str]]:
        """Packages that not every user has: the option, "" for any; its extra."""
        yield from (("", package, "demo") for package in ("flax", "rich", "sklearn"))
        if self.engine == "ray":
            yield "engine", "ray", "ray"
        if self.checkpoint is not None:
            yield "checkpoint", "orbax.checkpoint", "checkpoint"
        if self.logdir is not None:
            yield "logdir", "tensorboardX", "tensorboard"
        if self.plot is not None:
            yield "plot", "matplotlib", "demo"


def _check_places(options: Options) -> None:
    """Ends with one line if a folder or a package that is asked for is not there."""
    if options.checkpoint is not None and options.address is None:
        _check_folder("checkpoint", options.checkpoint)  # Else it is the cluster's.
    if options.logdir is not None:
        _check_folder("logdir", options.logdir)
    if options.plot is not None:
        _check_picture("plot", options.plot)
    for name, package, extra in options.packages():
        try:
            check_installed(package, extra)
        except ImportError as error:
            fail(f"argument --{name}: {error}" if name else f"{error}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    names = {field.name: _option(field.name) for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(Options):
        help = told[field.name]
        if field.default is not None:
            help += f" (default: {field.default})"
        more = hints[field.name].__metadata__[0]
        parser.add_argument(names[field.name], help=help, **more)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names.values())
        meant = f"; did you mean {near[0]}?" if near else ""
        fail(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    given = vars(found)
    options = Options(**given)
    for name in given.keys() & NEEDS.keys():
        other, value = NEEDS[name]
        present = getattr(options, other)
        if present is None or value not in (present, "DIR"):
            fail(f"argument {names[name]}: needs --{other} {value}")
    if options.mode == "backup" and options.backups >= options.workers:
        fail(f"argument --backups: must be below --workers, got {options.backups}")
    _check_places(options)
    return options
