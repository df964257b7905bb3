"""What the agent can be asked."""

from __future__ import annotations

import time

from .facts import code, facts, space, torch_facts
from .files import check, commit
from .links import Links
from .session import serve


def clock() -> dict:
    return {"clock": time.time()}


def main() -> None:
    operations = [facts, clock, space, code, torch_facts, check, commit]
    links = Links()
    operations += [links.open, links.connect, links.heard, links.burst]
    serve({operation.__name__: operation for operation in operations})
