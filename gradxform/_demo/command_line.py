"""The command line of the demo: every option, default and range."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import optax

import gradxform as gx
from gradxform import engines
from gradxform._server.folder import is_remote

# With peak learning rates. Late gradients act like momentum (Mitliagkas et al. 2016,
# https://arxiv.org/abs/1605.09774), so novograd needs less momentum than usual.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "novograd": (functools.partial(gx.novograd, b1=0.9), 0.015),
    "adagrad": (gx.adagrad, 0.2),
}

ENGINES: dict[str, Callable[..., Any]] = {
    "threads": engines.threads,
    "ray": engines.ray,
    "simulated": engines.simulated,
}
MODES = ("async", "backup", "local", "sync")
GRADIENTS = 3000  # Of all workers together, by default.

# Options that have an effect only with another one, and with which of its values.
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "address": ("engine", ("ray",)),
    "backups": ("mode", ("backup",)),
    "checkpoint_every": ("checkpoint", ()),  # With any value.
    "connect_timeout": ("engine", ("ray",)),
    "local_steps": ("mode", ("local",)),
    "max_staleness": ("mode", ("async", "local")),
    "server_processes": ("engine", ("ray",)),
}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is trained, for checkpoints to remember."""
    names = ["mode", "optimizer", "workers", "seed"]
    of_modes = {"backup": ["backups"], "local": ["local_steps", "max_staleness"]}
    of_modes["async"] = ["max_staleness"]
    names += of_modes.get(args.mode, [])
    return {name: getattr(args, name) for name in names}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """The options; checks those that depend on each other."""
        not_given = argparse.Namespace(**dict.fromkeys(NEEDS))
        parsed = super().parse_args(args, not_given)
        for name, (other, values) in NEEDS.items():
            present = getattr(parsed, other)
            if getattr(parsed, name) is None:
                setattr(parsed, name, self.get_default(name))
            elif present is None or (values and present not in values):
                needs = " ".join([f"--{other}", " or ".join(values)]).rstrip()
                but = f", not {present}" if values else ""
                option = name.replace("_", "-")
                self.error(f"argument --{option}: needs {needs}{but}")
        mode, workers, backups = parsed.mode, parsed.workers, parsed.backups
        if mode == "backup" and backups >= workers:
            self.error(f"argument --backups: must be below --workers, got {backups}")
        if parsed.steps is None:
            each = parsed.local_steps if mode == "local" else 1
            parsed.steps = max(1, GRADIENTS // each)
        return parsed

    def add_number(
        self,
        name: str,
        default: float | None,
        low: float,
        high: float,
        help: str,
        shown: str = "%(default)s",
    ) -> None:
        """Adds an option with a value in [low, high].

        The value is an integer if the default is one, or if the default is None because
        it depends on other options.
        """
        kind = int if default is None else type(default)

        def parse(text: str) -> float:
            with contextlib.suppress(ValueError):
                if low <= kind(text) <= high:
                    return kind(text)
            word = "an integer" if kind is int else "a number"
            allowed = f"must be {word} in [{low:.10g}, {high:.10g}]"
            raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")

        help += f" (default: {shown})"
        metavar = "N" if kind is int else "X"
        self.add_argument(name, type=parse, default=default, metavar=metavar, help=help)


def expanded(path: str) -> str:
    """Replaces ``~`` by the user's home: a shell leaves it in ``--plot=~/x``.

    Raises:
      ArgumentTypeError: it is empty, for example from a variable that is not set.
    """
    if not path:
        raise argparse.ArgumentTypeError("must not be empty")
    return path if is_remote(path) else os.path.expanduser(path)


def writable_png(path: str) -> str:
    """Makes sure that a PNG can be written, before the training."""
    path = expanded(path)
    if not path.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {path!r}")
    existed = os.path.lexists(path)
    try:
        open(path, "ab").close()  # The only sure test; appending changes nothing.
    except OSError as error:
        message = f"must be a file that can be written, got {path!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    finally:
        if not existed and os.path.lexists(path):
            os.remove(path)
    return path


def writable_folder(path: str) -> str:
    """Makes sure that a folder can be made and written to, before the training."""
    path = expanded(path)
    if is_remote(path):
        return path
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    try:
        tempfile.TemporaryFile(dir=above).close()  # The only sure test.
    except OSError as error:
        message = f"must be a folder to write to, got {path!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    return path


def make_parser() -> Parser:
    """The command line, with every default and range."""
    parser = Parser(
        prog="python -m gradxform",
        description="Trains a digit classifier with workers that pull parameters from "
        "a server and push gradients to it. Prints how many pushes were accepted and "
        "dropped, and the accuracy on test digits as its last line.",
        epilog="To see the cost of lateness: --workers 16 --max-staleness 30, then 6. "
        "To see the cost of a slow worker: --straggler 5 --mode sync, then backup. "
        "With --checkpoint DIR the same command goes on where it was killed. Ctrl-C "
        "ends it at once, with exit code 130. SIGTERM saves it first and gives exit "
        "code 143.",
        allow_abbrev=False,
    )
    add_training(parser)
    add_surroundings(parser)
    return parser


def add_training(parser: Parser) -> None:
    """The options that say what is trained, by whom and how fast."""
    many = 2**31 - 1  # Steps are int32 on the device.
    how = "in async each gradient that is not too late makes a step; in sync a step "
    how += "waits for a gradient of every worker and takes their mean; backup is sync, "
    how += "but no step waits for the slowest; in local workers train on their own and "
    how += "push the change of their parameters, as in async (default: %(default)s)"
    parser.add_argument("--mode", choices=MODES, default="async", help=how)
    how = "where workers run: threads of this process, processes of a local Ray "
    how += "cluster, or simulated, on a virtual clock (default: %(default)s)"
    parser.add_argument("--engine", choices=ENGINES, default="threads", help=how)
    how = "the optimizer that scales the clipped gradients (default: %(default)s)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="novograd", help=how)
    how = "the number of workers that push gradients"
    parser.add_number("--workers", 4, 1, 1000, how)
    how = "in mode backup, the number of slowest workers that a step does not wait for"
    parser.add_number("--backups", 1, 1, 999, how)
    how = "in mode local, how many gradients make a push"
    parser.add_number("--local-steps", 10, 1, 1000, how)
    how = "in modes async and local, drop a push whose worker pulled more than N steps "
    how += "ago"
    parser.add_number("--max-staleness", 4, 0, many, how)
    how = "in every mode, how many pushes reach the server, accepted and dropped ones "
    how += "together"
    shown = f"{GRADIENTS}, in mode local {GRADIENTS} / --local-steps"
    parser.add_number("--steps", None, 1, many, how, shown)
    how = "how many seconds a gradient takes, on average: a worker sleeps for the "
    how += "rest, as if the model were heavier"
    parser.add_number("--work", 0.01, 0.001, 60.0, how)
    how = "the last worker takes this many times as long as the others"
    parser.add_number("--straggler", 1.0, 1.0, 1000.0, how)
    how = "the seed of weights, minibatches and durations; with simulated it repeats a "
    how += "run exactly, but with threads and ray the order of pushes may differ"
    parser.add_number("--seed", 0, 0, many, how)


def add_surroundings(parser: Parser) -> None:
    """The options that say what is saved and shown, and what a cluster needs."""
    how = "save the training to DIR while it runs, and go on from a training that is "
    how += "saved there; on Ray its server may then die, too"
    parser.add_argument("--checkpoint", type=writable_folder, metavar="DIR", help=how)
    how = "save it every X seconds"
    parser.add_number("--checkpoint-every", 5.0, 0.0, math.inf, how)
    how = "write event files for TensorBoard to DIR, to watch the training with"
    parser.add_argument("--logdir", type=writable_folder, metavar="DIR", help=how)
    how = "the address of the Ray cluster to run on, as host:6379, or auto for the "
    how += "cluster of this machine (default: a cluster of its own)"
    parser.add_argument("--address", metavar="ADDRESS", help=how)
    how = "the number of processes of the server, each with a part of the model"
    parser.add_number("--server-processes", 1, 1, 64, how)
    how = "how many seconds the Ray cluster may take to answer"
    parser.add_number("--connect-timeout", 30.0, 0.001, math.inf, how)
    how = "write loss, staleness and gradient norm over the pushes to FILE, a .png"
    parser.add_argument("--plot", type=writable_png, metavar="FILE", help=how)
    how = "print all public names: what they do, their state and extra arguments"
    parser.add_argument("--list", action="store_true", help=how)
