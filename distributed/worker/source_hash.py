"""Which code is really running: a host may load another copy than the one that was sent."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from distributed.hosts.code import PACKAGES


def loaded_source_hash() -> str:
    """Hash of the source files of our packages that this process has loaded, by module name."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.split(".")[0] in PACKAGES:
            digest.update(name.encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()[:16]
