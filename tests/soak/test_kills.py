"""What each signal leaves of the demo, once; ``tests.soak.kills`` sends many."""

import os
import pathlib
import signal
import tempfile
import time

import pytest

from tests.conftest import promotion, xla_flags
from tests.soak import kills

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc"), reason="looks for processes there"),
]

# A group is Ray's engine too, with one process more. The run that compiles everything
# for the others is one of threads, and it is terminated as well. One process is enough
# to test how Ctrl-C ends threads, and what ends a simulated run.
PAIRS = ("group", "TERM"), ("threads", "KILL"), ("group", "INT")
CODES = {"TERM": "143:", "KILL": "-9:", "INT": "130:"}


def test_a_signal_leaves_no_process_and_a_checkpoint_that_loads(capsys, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(kills, "AFTER", 0.5)
    monkeypatch.setenv("XLA_FLAGS", xla_flags(level=1))
    monkeypatch.setenv("FORCE_COLOR", "1")  # As in a terminal: a bar shows the pushes.
    with promotion():
        faults = kills.table(PAIRS, times=1, seed=0)
    printed = capsys.readouterr().out
    _, *rows = printed.splitlines()
    assert [tuple(row.split()[:5]) for row in rows] == [
        (engine, name, "1", CODES[name], "1") for engine, name in PAIRS
    ], printed
    assert faults == 0


@pytest.fixture
def folder():
    """A folder with a short name: Ray puts its sockets there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        yield pathlib.Path(temporary)


def test_ray_is_terminated_while_it_starts(folder):
    pytest.importorskip("ray")
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    with kills.started("ray", folder, cache, **{kills.COMPILED: "inf"}) as process:
        while "gcs_server" not in kills.processes_of(folder).values():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    said = (folder / "stderr").read_text()
    assert said.endswith("terminated: nothing was done that could be saved\n")
    assert "Traceback" not in said
