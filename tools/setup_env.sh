#!/usr/bin/env bash
# Makes the virtual environment .venv with every version pinned by constraints.txt.
#
#   bash tools/setup_env.sh             packages that a run needs
#   bash tools/setup_env.sh report hf   also those of these extras of setup.py: pictures of isp
#                                       evaluate, Hugging Face tokenizers (others: data,
#                                       tensorboard, flash, peft)
#   bash tools/setup_env.sh dev         also those of tests, linters and type checks
#
# PYTHON chooses the interpreter. An environment made from the same files is reused. A stamp, written
# last, marks it as complete: an interrupted set-up is done again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

known="$(sed -n '/extras_require/,/^    }/s/^        "\([a-z-]*\)": .*/\1/p' setup.py | xargs)"
for extra in "$@"; do
    case " $known " in
        *" $extra "*) ;;
        *) echo "error: unknown extra '$extra': name some of $known, or none" >&2; exit 2 ;;
    esac
done

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON is no Python 3.11 or newer: $("$PYTHON" --version 2>&1 | head -n 1)" >&2
        return 1
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        is_new_enough "$candidate" && { echo "$candidate"; return; }
    done
    echo "error: no Python 3.11 or newer found; name one: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}

# One set-up at a time: a second one waits, then finds the work done.
if command -v flock >/dev/null; then
    exec 9<tools
    flock 9
fi

python="$(find_python)"
wanted="$(
    { "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; pwd; cat constraints.txt setup.py; } | cksum
)"
is_stamped() { [ "$(cat ".venv/$1.stamp" 2>/dev/null)" = "$wanted" ]; }
stamp() { echo "$wanted" >".venv/$1.stamp.new" && mv ".venv/$1.stamp.new" ".venv/$1.stamp"; }

if ! is_stamped run; then
    echo "setup: making .venv with $("$python" --version) (once; takes a minute or two)"
    "$python" -m venv --clear .venv
    # torch first and alone: any other request for it could bring in another build.
    install "$(grep '^torch==' constraints.txt)"
    # The build runs on the pinned setuptools in .venv, so it fetches nothing of its own.
    install "$(grep '^setuptools==' constraints.txt)"
    install --no-build-isolation -e .
    stamp run
fi
for extra in "$@"; do
    if ! is_stamped "$extra"; then
        echo "setup: adding the packages of [$extra] to .venv"
        install --no-build-isolation -e ".[$extra]"
        stamp "$extra"
    fi
done
