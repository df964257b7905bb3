#!/bin/sh
# Install what `make check`, `make docs` and the tests use, which a user does not need.
set -eu
cd "$(dirname "$0")/.."

stamp=.venv/.developer
[ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && exit 0
echo "Installing the tools of developers; a minute the first time."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints.txt --editable '.[dev]'
touch "$stamp"
