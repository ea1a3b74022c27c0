#!/usr/bin/env bash
# Sets up the environment and trains a small model in isp mode on 4 CPU ranks.
#
#   bash tools/quickstart.sh                                  as configs/quickstart.yaml says
#   bash tools/quickstart.sh --parallel.tensor.mode msp       the same, in another mode
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
exec .venv/bin/python -m isp train configs/quickstart.yaml --nproc 4 "$@"
