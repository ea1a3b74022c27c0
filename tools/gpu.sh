#!/usr/bin/env bash
# Runs tests, checks and benchmarks that need a GPU, and updates one report after each step:
#
#   bash tools/gpu.sh first                 the most informative steps, in 530 seconds
#   bash tools/gpu.sh second                steps that `first` had no time for, then others, in 290
#   bash tools/gpu.sh                       every step; those that have passed are not run again
#   bash tools/gpu.sh parity attention mfu  only these steps
#   bash tools/gpu.sh --seconds 400         the steps that fit in 400 s; run it again to resume
#   bash tools/gpu.sh --list                names the steps
#   bash tools/gpu.sh --device cpu first    the same at toy size, without a GPU
#
# Uses the Python that PYTHON names, else that of .venv, else python3. Missing packages are installed
# into a temporary folder for the run from wheels in .whl, if there are any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" tools/gpu_run.py "$@"
