#!/usr/bin/env bash
# Checks ISP with the newest installable transformers, peft, datasets and accelerate; torch stays.
#
#   bash tools/check_newest.sh [transformers==VERSION]
#
# Traces every type of transformers and lists what differs from docs/reference/architectures.md;
# compares a type for each mechanism with its unmodified model; runs the tests that use peft, datasets
# and accelerate.
# The result is written to tools/newest.txt. Fails if a supported type is lost, or if a comparison or
# a test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh dev

# An environment of its own, whose packages are found before those of .venv.
environment=outputs/newest
.venv/bin/python -m venv --clear "$environment"
python="$environment/bin/python"
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
echo "import site; site.addsitedir('$(.venv/bin/python -c "$packages")')" \
    >"$("$python" -c "$packages")/base.pth"
torch="$("$python" -c 'import torch; print(torch.__version__)')"
"$python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy only-if-needed \
    "torch==$torch" "${@:-transformers}" peft datasets accelerate

{
    failed=0
    "$python" - <<'VERSIONS'
import datetime, importlib.metadata as found
names = "torch", "transformers", "peft", "datasets", "accelerate"
print(datetime.date.today(), *(f"{name} {found.version(name)}" for name in names), sep=", ")
VERSIONS
    "$python" tools/check_architectures.py --newest 2>"$environment/errors.txt" || {
        failed=1
        tail -n 3 "$environment/errors.txt"
    }
    "$python" -m pytest -q -n 0 --no-header -rf tests/integrations tests/models/huggingface/test_adapters.py \
        tests/models/huggingface/test_versions.py tests/data/test_tables.py tests/data/test_stream.py |
        grep -E "^(FAILED|ERROR)|passed|failed" || failed=1
    exit "$failed"
} | tee tools/newest.txt
