#!/usr/bin/env bash
# Sets up the environment and runs the tests; arguments go to pytest:
#
#   bash tools/test.sh tests/config/test_job.py -k typo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh dev
exec .venv/bin/python -m pytest "$@"
