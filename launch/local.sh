#!/usr/bin/env bash
# Installs jasgd into .venv (once) and runs the main job on this machine: four
# simulated asynchronous learners on scikit-learn's digits. Extra arguments go to
# it: ./launch/local.sh --workdir=/tmp/a --config.num_epochs=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment launch
# A run of its own each time; --workdir=... in the arguments comes later and wins.
run "$VENV/bin/python" -m launch.train --config=configs/digits_async.py \
  --workdir="$(mktemp -d)" "$@"
