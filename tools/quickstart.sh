#!/usr/bin/env bash
# Sets up the environment, trains a small model in isp mode on 4 CPU ranks and writes text with it.
#
#   bash tools/quickstart.sh                                  as configs/quickstart.yaml says
#   bash tools/quickstart.sh --parallel.tensor.mode msp       the same, in another mode
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
.venv/bin/python -m isp train configs/quickstart.yaml --nproc 4 "$@"
case " $* " in
    *" --job."*) ;; # the run is in another folder; its log says how to generate from it
    *) .venv/bin/python -m isp generate outputs/quickstart/latest --prompt "    def __init__(self, " \
        --max-new-tokens 300 --temperature 0.8 ;;
esac
