#!/usr/bin/env bash
# Installs jasgd with its test tools into .venv (once), checks style and types,
# and runs the tests. Extra arguments go to pytest:
#
#   ./tests/run.sh -k delay     some of them
#   ./tests/run.sh -m slow      the long ones, which are left out otherwise
#   ./tests/run.sh -m ''        all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
run "$VENV/bin/ruff" check .
run "$VENV/bin/ruff" format --check .
run "$VENV/bin/pyrefly" check --python-interpreter-path "$VENV/bin/python"
run "$VENV/bin/python" -m pytest --numprocesses=auto --dist=loadgroup "$@"
