"""What the agent can be asked."""

from __future__ import annotations

import time

from .facts import code, facts, space
from .files import check, commit, lacking
from .folders import Folders
from .holdings import holdings
from .links import Links
from .session import serve
from .torch_process import TorchProcess


def clock() -> dict:
    return {"clock": time.time()}


def main() -> None:
    links, torch, folders = Links(), TorchProcess(), Folders()
    operations = [facts, clock, space, code, check, lacking, commit, holdings]
    operations += [folders.mark, folders.seen]
    operations += [links.open, links.connect, links.heard, links.burst]
    operations += [torch.torch_facts, torch.begin_groups, torch.form_groups]
    serve({operation.__name__: operation for operation in operations})
