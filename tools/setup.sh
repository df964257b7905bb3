#!/bin/sh
# Make .venv with all dependencies. Does nothing when it is up to date.
set -eu
cd "$(dirname "$0")/.."
. distributed/hosts/find_python.sh

stamp=.venv/.installed
venv=.venv/bin/python
if [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && judge "$venv"; then
    exit 0
fi

mac_remedy() {
    if [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" != 1 ]; then
        echo "This is an Intel Mac: current torch has no builds for it."
    elif [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ]; then
        echo "This terminal runs under Rosetta. Start one that does not, for example with: arch -arm64 zsh"
    elif [ ! -x /opt/homebrew/bin/brew ]; then
        echo "First get the Homebrew in /opt/homebrew, from https://brew.sh: one in /usr/local is for Intel Macs."
    fi
}

has_pip() {
    "$venv" -m pip --version >/dev/null 2>&1
}

# Its Python may be gone, or another version than it was (brew upgrade), or the making of it was interrupted. One that
# uv has made comes without pip.
usable() {
    judge "$venv" || return
    said="has no pip"
    has_pip || { "$venv" -m ensurepip >/dev/null 2>&1 && has_pip; }
}

if ! usable; then
    [ ! -e .venv ] || echo "Making a new .venv; the Python of the old one: $said."
    find_python ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.14 python3.11
    printf %s "$passed" | sed 's/^/Skipped /'
    if [ -z "$found" ]; then
        echo "No Python that can train was found. Get one, then run make again:" >&2
        echo "  Mac:    brew install python@3.13      (or the installer from python.org)" >&2
        echo "  Debian: sudo apt-get install python3 python3-venv" >&2
        [ "$(uname -s)" != Darwin ] || mac_remedy >&2
        exit 1
    fi
    echo "Making .venv with $found."
    [ ! -L .venv ] || rm .venv # and not what it leads to, which may be another project's
    "$found" -m venv --clear .venv
fi
echo "Installing dependencies; a few minutes the first time."
"$venv" -m pip install --quiet --disable-pip-version-check --constraint tools/constraints.txt --editable .
echo "Loading them once: later it takes seconds, but the first time a Mac scans them for up to a minute."
"$venv" -I distributed/hosts/first_import.py # -I: beside it are modules with names of the library's
touch "$stamp"
