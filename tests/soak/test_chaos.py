"""Workers and server are killed for a while, and everything is counted."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import OF_RAY

pytest.importorskip("ray")


# A push to a server of two processes waits for both, which here share the cores.
PUSHES = 300
HOW = (
    *("--seed", "1", "--minutes", f"{PUSHES / 3000}", "--goal", "0.5"),
    *("--workers", "3", "--server-processes", "2"),
    *("--pace", "bounded_staleness", "--come-and-go", "100"),
)


@pytest.mark.slow
def test_every_push_of_a_chaos_run_is_counted():
    chaos = [sys.executable, "-m", "tests.soak.chaos", *HOW]
    done = subprocess.run(
        chaos, capture_output=True, env=os.environ | OF_RAY, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {
        name: int(count)
        for name, count in re.findall(r"(\w+) (\d+)(?:, |\n)", done.stdout)
    }
    assert counts["accepted"] + counts["dropped"] == PUSHES
    assert counts["accepted"] + counts["dropped"] + counts["lost"] == counts["pushed"]
    assert counts["worker_deaths"] >= 2
    assert counts["server_deaths"] >= 1
    assert len(re.findall("^yes ", done.stdout, re.M)) == 16
    assert "NO" not in done.stdout
