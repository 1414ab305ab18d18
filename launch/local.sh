#!/usr/bin/env bash
# Installs jasgd into .venv (once) and runs the main job on this machine: one
# server and four learner processes on scikit-learn's digits; then replays the
# run, which must give the same bits. Extra arguments go to the training:
#
#   ./launch/local.sh --workdir=/tmp/a --config.num_epochs=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment launch
# A run of its own each time, unless the arguments say where.
workdir=$(mktemp -d)
for argument in "$@"; do
  case $argument in
    --workdir=*) workdir=${argument#--workdir=} ;;
  esac
done
run "$VENV/bin/python" -m launch.train --config=configs/digits_server.py \
  --workdir="$workdir" "$@"
run "$VENV/bin/python" -m launch.replay --workdir="$workdir"
