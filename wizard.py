"""Questions instead of flags: `python wizard.py` asks what to train and where, then makes the same call as the CLI."""

from __future__ import annotations

import sys

import cli_typer


def main() -> int:
    return cli_typer.main(["wizard", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
