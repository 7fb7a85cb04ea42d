"""Which lines of gradxform/ each test runs: a plugin of pytest.

``python -m pytest -p tests.lines --lines=FOLDER`` writes them there, and how many
seconds of the processor each test takes, as JSON, one file a process. Lines that run
while tests are collected have no test. Each file traces for itself: before its first
test all is forgotten that others have traced. A test that uses what an earlier test of
its file has traced does not run those lines. Some tests start processes. Their lines
are not seen. It needs Python 3.12.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import pytest

PACKAGE = f"{pathlib.Path(__file__).parents[1] / 'gradxform'}{os.sep}"


class Run(NamedTuple):
    """What one test does."""

    seconds: float  # Of the processor.
    lines: dict[str, set[int]]  # Of each module, by its path in gradxform/.


def read(folder: pathlib.Path) -> dict[str, Run]:
    """What each test does, from all processes, in their order; "" is the collection."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.glob("*.json")):
        for test, (seconds, lines) in json.loads(path.read_text()).items():
            before, known = runs.get(test, Run(0.0, {}))
            for module, numbers in lines.items():
                known.setdefault(module, set()).update(numbers)
            runs[test] = Run(before + seconds, known)
    return runs


def file_of(test: str) -> str:
    """The file of a test, by its name."""
    return test.split("::")[0]


def forget() -> None:
    """Drops what JAX and the package have cached."""
    sys.modules["jax"].clear_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith("gradxform"):
            for value in vars(module).values():
                getattr(value, "cache_clear", int)()


class Recorder:
    """Writes down each line that a test runs."""

    def __init__(self, target: pathlib.Path) -> None:
        self.target = target
        self.test = ""  # None yet: tests are being collected.
        self.began = 0.0
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.lines: dict[str, dict[str, set[int]]] = {}
        events = sys.monitoring
        events.use_tool_id(events.COVERAGE_ID, "tests.lines")
        events.register_callback(events.COVERAGE_ID, events.events.LINE, self.on_line)
        events.set_events(events.COVERAGE_ID, events.events.LINE)

    def on_line(self, code: types.CodeType, line: int) -> object:
        """Is called by Python at the beginning of each line, until it says enough."""
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        lines = self.lines.setdefault(self.test, {})
        lines.setdefault(code.co_filename.removeprefix(PACKAGE), set()).add(line)
        return None

    def begin(self, test: str) -> None:
        """From now on, lines and seconds are those of this test."""
        now = sum(os.times()[:4])  # Of this process and of those that have ended.
        self.seconds[self.test] += now - self.began
        self.test, self.began = test, now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test begins before its fixtures."""
        if file_of(item.nodeid) != file_of(self.test):
            forget()
        self.begin(item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        """Writes the record of this process."""
        self.begin("")
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        runs = {
            test: (
                seconds,
                {name: sorted(of) for name, of in self.lines.get(test, {}).items()},
            )
            for test, seconds in self.seconds.items()
        }
        self.target.write_text(json.dumps(runs))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that says where to write."""
    parser.addoption("--lines", metavar="FOLDER", help="record the lines that run")


def pytest_configure(config: pytest.Config) -> None:
    """Begins before anything is collected."""
    if folder := config.getoption("--lines"):
        process = os.environ.get("PYTEST_XDIST_WORKER", "main")
        recorder = Recorder(pathlib.Path(folder, f"{process}.json"))
        config.pluginmanager.register(recorder)
