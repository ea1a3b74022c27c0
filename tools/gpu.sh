#!/usr/bin/env bash
# Runs all that wants a GPU - tests, checks, benchmarks - and writes one report, step by step:
#
#   bash tools/gpu.sh first                 the most telling steps, in 530 seconds
#   bash tools/gpu.sh second                what that had no time for, then the next ones, in 290
#   bash tools/gpu.sh                       every step; those that have passed are not run again
#   bash tools/gpu.sh parity attention mfu  these alone
#   bash tools/gpu.sh --seconds 400         what fits in that; run it again to resume
#   bash tools/gpu.sh --list                what they are
#   bash tools/gpu.sh --device cpu first    the same at toy size, where there is no GPU
#
# Takes .venv, or else the python3 that is active, or the one that PYTHON names. Packages that are
# missing are installed for its time from wheels in .whl, if there are any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" tools/gpu_run.py "$@"
