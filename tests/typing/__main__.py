"""Whether mypy and pyright find the mistakes in a user's program, and no others."""

import json
import pathlib
import re
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("every_name.py")


def mypy(path):
    """The lines with errors, and the report."""
    command = ["mypy", "--strict", "--follow-imports=silent", "--config-file=", path]
    text = run(*command)
    return {int(n) for n in re.findall(r"\.py:(\d+): error", text)}, text


def pyright(path):
    """The lines with errors or warnings, and the report."""
    text = run("pyright", "--outputjson", "--pythonpath", sys.executable, path)
    found = json.loads(text)["generalDiagnostics"]
    return {x["range"]["start"]["line"] + 1 for x in found}, text


def run(tool, *arguments):
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=PROGRAM.parents[2]
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mistakes(path):
    lines = path.read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if line.endswith("# a mistake")}


def main():
    expected = mistakes(PROGRAM)
    assert len(expected) == 6
    for tool in mypy, pyright:
        found, report = tool(PROGRAM)
        if found != expected:
            sys.exit(f"{report}\n{tool.__name__} finds errors in {found}")


if __name__ == "__main__":
    main()
