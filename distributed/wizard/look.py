"""A first look at each machine, all at once: can it be reached, what is it, does it have the environment."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from whisper_tuner.errors import HostError

from ..ask import ask
from ..console import size
from ..environment import Pins, own_pins, probe, unlike
from ..hosts import Host
from ..remote import Remote

LOOK_S = 30


@dataclass(frozen=True, kw_only=True)
class Look:
    """`differs`: what of its environment is unlike this machine's; None: it has none."""

    host: Host
    facts: dict = field(default_factory=dict)
    differs: tuple[str, ...] | None = None
    error: HostError | None = None

    @property
    def ready(self) -> bool:
        return self.differs == ()

    @property
    def state(self) -> str:
        if self.error:
            return "see below"
        if self.differs is None:
            return "no environment yet"
        return f"differs: {', '.join(self.differs[:2])}" if self.differs else "ready"


def look_at(hosts: Sequence[Host]) -> list[Look]:
    pins = own_pins()
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return list(pool.map(lambda host: _look(host, pins), hosts))


def table(looks: Sequence[Look]) -> Table:
    table = Table(header_style="bold")
    for column in ("machine", "system", "cores", "memory", "environment"):
        table.add_column(column, overflow="fold")
    for look in looks:
        facts = look.facts
        system = f"{facts['system']} {facts['machine']}" if facts else ""
        cells = (str(facts["cpus"]), size(facts["memory"])) if facts else ("", "")
        table.add_row(escape(look.host.address), system, *cells, look.state)
    return table


def _look(host: Host, pins: Pins) -> Look:
    try:
        with Remote.connect(host) as remote:
            facts = ask(remote, "facts", timeout=LOOK_S)
            found = probe(remote, remote.expand(host.python), list(pins.all))
    except HostError as error:
        return Look(host=host, error=error)
    return Look(host=host, facts=facts, differs=None if found is None else tuple(unlike(pins, found[1])))
