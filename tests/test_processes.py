"""Several processes train one sharded model, and agree with one process alone."""

import contextlib
import itertools
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import process_worker as worker

ROOT = pathlib.Path(__file__).parents[1]


@contextlib.contextmanager
def processes(count, folder):
    """Runs so many workers and ends them all. Prints their logs if the test fails."""
    with contextlib.ExitStack() as stack:
        # The coordinator binds to this port too. Until then nobody else is given it.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        command = [sys.executable, "-m", worker.__name__, reserved.getsockname()[1]]
        started = []
        for rank in range(count):
            with open(folder / f"{rank}.log", "wb") as log:
                process = subprocess.Popen(
                    [str(a) for a in (*command, count, rank, folder)],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        try:
            yield started
        except BaseException:
            for rank in range(count):
                log = (folder / f"{rank}.log").read_text(errors="replace")
                print(f"== process {rank}\n{log}")
            raise


@pytest.mark.slow
def test_processes_agree_with_one(tmp_path):
    # One process with one device, where nothing is sharded.
    alone = {gate: worker.outcome(gate) for gate in worker.GATES}
    dropping, waiting = alone["drop_stale"], alone["accumulator"]
    assert dropping["['state'].stale_count"] == waiting["['state'].stale_count"] == 2
    count = 4
    with processes(count, tmp_path) as started:
        assert [p.wait(timeout=180) for p in started] == [0] * count
    for rank, (gate, how) in itertools.product(range(count), worker.CASES):
        with np.load(tmp_path / f"{rank}.{gate}.{how}.npz") as file:
            got = dict(file)
        assert got.keys() == alone[gate].keys()
        for name, expected in alone[gate].items():
            assert got[name].dtype == expected.dtype
            np.testing.assert_allclose(
                got[name],
                expected,
                rtol=0,
                atol=1e-6 * np.max(np.abs(expected)),
                equal_nan=False,
                err_msg=f"{name} in process {rank}, {gate} {how}",
            )
