#!/usr/bin/env bash
# Installs jasgd into .venv (once) and runs the main job on this machine.
# Extra arguments go to it: ./launch/local.sh --config.delays=0,16
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment launch
run "$VENV/bin/python" -m launch.train --config=configs/digits_delay.py "$@"
