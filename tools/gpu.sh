#!/usr/bin/env bash
# Runs all that wants a GPU - tests, checks, benchmarks - and writes one report, step by step:
#
#   bash tools/gpu.sh                       every step, at most 47 minutes on one GPU
#   bash tools/gpu.sh tests attention mfu   these alone
#   bash tools/gpu.sh --minutes 9           what fits in that; run it again to resume
#   bash tools/gpu.sh --list                what they are
#   bash tools/gpu.sh --device cpu          all of it at toy size, where there is no GPU
#
# Takes .venv, or else the python3 that is active, or the one that PYTHON names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" tools/gpu_run.py "$@"
