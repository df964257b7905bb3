"""`python -m exogym.info`: what this machine has; with `--check`, how fast processes of it exchange tensors."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import Any

from exogym.errors import ExogymError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m exogym.info", description="What this machine has for training.")
    parser.add_argument("--check", action="store_true", help="time the communication of real processes")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="how many processes (2)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16], metavar="MB", help="sizes (1 16)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of which the median is shown (5)")
    options = parser.parse_args(argv)

    from exogym.about import info

    print(info())
    if not options.check:
        return 0

    from exogym.comm_check import check_communication

    try:
        found = check_communication(options.nproc, options.megabytes, repeats=options.repeats)
    except ExogymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{found}")
    return 0 if found.passed else 1


class _Module(ModuleType):
    """Once it has been imported, `exogym.info` is this module, and no longer the function of about.py."""

    def __call__(self) -> dict[str, Any]:
        from exogym.about import info

        return info()


sys.modules[__name__].__class__ = _Module

if __name__ == "__main__":
    sys.exit(main())
