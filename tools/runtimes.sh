#!/bin/sh
# Install the runtimes that exported models are tested with, and the library that reads data sets of the hub.
# Without one its tests are skipped; CI allows no skips.
set -eu
cd "$(dirname "$0")/.."

stamp=.venv/.runtimes
[ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && exit 0
echo "Installing the runtimes for exported models; a minute the first time."
if .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[runtimes,datasets]'; then
    touch "$stamp"
else
    echo "Some runtimes could not be installed: their tests are skipped." >&2
fi
