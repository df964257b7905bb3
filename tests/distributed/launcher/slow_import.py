"""A worker on which the import of torch holds the interpreter's lock, as on a Mac that scans its libraries."""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder

HELD_S = "HELD_S"


class Scanned(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            ctypes.PyDLL(None).sleep(int(os.environ[HELD_S]))  # PyDLL: with the lock held
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Scanned())
    from distributed.worker.main import main

    os._exit(main())
