#!/usr/bin/env bash
# Makes the missing checkpoints of tests/golden/checkpoints: with the oldest releases
# that are supported, in an environment of its own. It takes about two minutes. Python
# is 3.11, 3.12 or 3.13. An existing checkpoint stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/oldest"
export PATH=$work/oldest/bin:$PATH
mapfile -t pins < <(python -c '
import tomllib
for package in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    print(package.replace(">=", "=="))')
python -m pip install -q -e '.[checkpoint]' "${pins[@]}"
python -m tests.golden.make_checkpoints
