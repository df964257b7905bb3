#!/bin/sh
# Make .venv with all dependencies, from a Python >= 3.11. Does nothing when it is up to date.
set -eu
cd "$(dirname "$0")/.."

stamp=.venv/.installed
if [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then
    exit 0
fi

fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.14 python3.11; do
        for folder in "" /opt/homebrew/bin/ /usr/local/bin/ /usr/bin/; do
            if [ -n "$name" ] && command -v "$folder$name" >/dev/null 2>&1 && fits "$folder$name"; then
                echo "$folder$name"
                return
            fi
        done
    done
}

python=$(find_python)
if [ -z "$python" ]; then
    echo "No Python 3.11 or later was found. Get one, then run make again:" >&2
    echo "  Mac:    brew install python@3.12      (or the installer from python.org)" >&2
    echo "  Debian: sudo apt-get install python3 python3-venv" >&2
    exit 1
fi
if [ "$(uname -s)-$(uname -m)" = Darwin-x86_64 ]; then
    echo "This is an Intel Mac (or a Python under Rosetta): current torch has no builds for it." >&2
    exit 1
fi

echo "Making .venv with $("$python" --version) and installing dependencies; a few minutes the first time."
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
touch "$stamp"
