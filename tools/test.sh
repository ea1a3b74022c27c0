#!/usr/bin/env bash
# Sets up the environment and runs the tests; arguments go to pytest:
#
#   bash tools/test.sh tests/config/test_job.py -k typo
#
# Two files are tested at a time, those with slow tests first; -n 0 tests one after another, in one
# process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh dev
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
