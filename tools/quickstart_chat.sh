#!/usr/bin/env bash
# Sets up the environment, makes a tiny Hugging Face chat model, and fine-tunes it on 4 CPU ranks.
#
#   bash tools/quickstart_chat.sh                                as configs/chat.yaml says
#   bash tools/quickstart_chat.sh --parallel.tensor.size 4        each sequence over four ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh hf
.venv/bin/python tools/make_tiny_chat_model.py outputs/tiny_chat
.venv/bin/python -m isp train configs/chat.yaml --nproc 4 "$@"
cat <<'END'

Ask the model a question (outputs/chat is the run's folder, unless an option changed it):
  .venv/bin/python -m isp generate outputs/chat/latest --chat --prompt "What is dumps in json?"
END
