"""What is known of all hosts once they have been looked at: facts of each, every pair's link, what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distributed.plan.automatic import Measured
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from whisper_tuner.errors import ConfigError, DataError, HostError

from .findings import Finding, Severity

NOT_TRIED = "not tried"


@dataclass(kw_only=True)
class HostFacts:
    """One host; None is what could not be found out."""

    host: Host
    reached: bool = False
    facts: dict = field(default_factory=dict)  # as the agent's `facts` gives them
    clock_ahead_s: float | None = None
    spaces: list[dict] = field(default_factory=list)  # of each folder where a run keeps files; the last one counts
    differ: list[str] | None = None  # files of code that are not the master's
    torch: dict | None = None
    device: str | None = None  # on which it would train
    spare_memory: float | None = None  # bytes beyond what each of its workers needs
    address: str | None = None  # of the chosen interface
    interface: str | None = None

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def space(self) -> dict | None:
        return self.spaces[-1] if self.spaces else None

    @property
    def has_torch(self) -> bool:
        return bool(self.torch and "version" in self.torch)

    @property
    def machine(self) -> str:
        """Tell this machine from others: hosts of the file may be one. "" if it is not known."""
        return self.facts.get("memory", {}).get("machine", "")


@dataclass(kw_only=True)
class Pair:
    """A connection from `source` to `target`. mbit: what `target` received, Mbit/s; failed: why there is none."""

    source: str
    target: str
    latency_s: float | None = None
    mbit: float | None = None
    failed: str | None = NOT_TRIED
    errno: int | None = None


@dataclass(kw_only=True)
class Report:
    """remotes: connections to the workers in the order of the hosts file; those to all of them if there is no error.

    pairs: on the network that training would use. Where that is not the usual one, `network` tells the user so in a
    line, and `meeting` is this machine's address in it.
    """

    hosts: list[HostFacts]
    pairs: list[Pair] = field(default_factory=list)
    network: str = ""
    meeting: str | None = None
    problems: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    remotes: list[Remote] = field(default_factory=list, repr=False)

    @property
    def errors(self) -> list[Finding]:
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> list[Finding]:
        return [problem for problem in self.problems if problem.severity is Severity.WARNING]

    def raise_if_errors(self) -> None:
        """Raise one error that holds all problems but the warnings; its kind is theirs if they are of one."""
        errors = self.errors
        if not errors:
            return
        text = "\n".join(map(str, errors))
        for kind in (ConfigError, DataError):
            if all(problem.status == kind.exit_status for problem in errors):
                raise kind(text)
        one = errors[0]
        if len(errors) == 1 and len(one.hosts) == 1:
            raise HostError(one.host, one.what, remedy=one.remedy)
        names = ", ".join(unique(name for problem in errors for name in problem.hosts))
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise HostError(names, f"{count}:\n" + "\n".join(map(str, errors)))

    @property
    def machine_workers(self) -> tuple[int, ...]:
        """Count for each host the workers on its machine."""
        machines = [facts.machine for facts in self.hosts]
        return tuple(machines.count(machine) if machine else 1 for machine in machines)

    @property
    def measured(self) -> Measured:
        """Return what limits a run: the slowest link, and the host with the least memory."""
        rates = [pair.mbit for pair in self.pairs if pair.mbit]
        spare = [facts.spare_memory for facts in self.hosts if facts.spare_memory is not None]
        return Measured(bytes_s=min(rates) * 125_000 if rates else None, spare_bytes=min(spare, default=None))

    def summary(self) -> str:
        """Sum up in one line, for a run that goes on."""
        measured = [pair for pair in self.pairs if pair.mbit]
        text = f"{len(self.hosts)} hosts checked in {self.seconds:.1f} s"
        if measured:
            slowest = min(measured, key=lambda pair: pair.mbit)
            speed = f"{slowest.mbit:.0f} Mbit/s, {slowest.latency_s * 1000:.1f} ms"
            text += f"; slowest link {slowest.source} -> {slowest.target}: {speed}"
        return text


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
