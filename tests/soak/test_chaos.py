"""Workers and server are killed for a while, and everything is counted."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import OF_RAY

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.parametrize(
    # A push to a server of two processes waits for both, which here share the cores.
    ("processes", "workers", "pushes", "goal", "more"),
    [
        (2, 2, 200, 0.5, ""),
        (1, 4, 300, 0.5, "--pace bounded_staleness --come-and-go 100"),
    ],
)
def test_every_push_of_a_chaos_run_is_counted(processes, workers, pushes, goal, more):
    chaos = [sys.executable, "-m", "tests.soak.chaos", "--seed", "1"]
    chaos += ["--minutes", f"{pushes / 3000}", "--goal", f"{goal}"]
    chaos += ["--workers", f"{workers}", "--server-processes", f"{processes}"]
    chaos += more.split()
    done = subprocess.run(
        chaos, capture_output=True, env=os.environ | OF_RAY, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {
        name: int(count)
        for name, count in re.findall(r"(\w+) (\d+)(?:, |\n)", done.stdout)
    }
    assert counts["accepted"] + counts["dropped"] == pushes
    assert counts["accepted"] + counts["dropped"] + counts["lost"] == counts["pushed"]
    assert counts["worker_deaths"] >= 2
    assert counts["server_deaths"] >= 1
    checks = 16 if "bounded_staleness" in more else 15
    assert len(re.findall("^yes ", done.stdout, re.M)) == checks
    assert "NO" not in done.stdout
