"""Judges the facts of one host: what is wrong with it, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distributed.hosts.agent_call import INSTALL_PYTHON
from distributed.hosts.environment import Pins, unlike
from whisper_tuner.text import size

from .facts import HostFacts
from .findings import Finding, Severity
from .needs import Needs

SKEW_S = 2.0
SHOWN = 3
NAMES = {"Darwin": "macOS"}
MIXED = "gloo cannot join Macs and other systems in one group: train on hosts of one kind."
MEMORY_SHARE = 0.8  # of what a host has: other programs take some
LESS_MEMORY = "Train with method = lora, a smaller max_duration_s, or a smaller model."
OWN = 'Leave "python_env" out of the hosts file: then `hosts setup` makes an environment.'
GONE = ": does not run"
# Nothing that is documented tells how much of it can be had (eclecticlight.co, 2023: what Finder says is often wrong).
MACS_SPACE = (
    " Finder may show more: it counts what macOS has not removed yet, mostly Time Machine's local snapshots."
    " To remove as much of these now: tmutil thinlocalsnapshots / {missing} 4"
)
IN_PARTS = "Batches that do not fit are computed in smaller parts; the result is the same."


@dataclass(frozen=True)
class Judge:
    """Finds what is wrong with one host, as far as its facts are known.

    setup: the command that mends a worker's environment. sharing: workers that its machine has.
    """

    host: HostFacts
    master: HostFacts
    pins: Pins
    needs: Needs
    setup: str = ""
    sharing: int = 1
    sync: bool = True

    @property
    def is_worker(self) -> bool:
        return self.host is not self.master

    @property
    def mend(self) -> str:
        return self.setup if self.is_worker else "make setup"

    def all(self) -> Iterator[Finding]:
        """Yield all findings; fill in the device on which the host would train, and the memory that it has left."""
        if self.host.facts:
            yield from self.python()
            yield from self.rivals()
            yield from self.system()
        yield from self.clock()
        yield from self.code()
        yield from self.disk()
        yield from self.device()
        yield from self.memory()

    def python(self) -> Iterator[Finding]:
        facts = self.host.facts
        version = ".".join(map(str, facts["python"]))
        is_foreign = self.is_worker and not facts["venv"]
        if not facts["training"]:
            passed = facts["passed"][: 1 if facts["fitting"] else None]
            what = f"there is no usable Python at {'; '.join(passed)}".removesuffix(GONE)
            yield self.problem("python", what, self._new_python(is_gone="".join(passed[:1]).endswith(GONE)))
            return
        if why := self.pins.unfit(facts["python"]):
            what = f"Python {version} at {facts['executable']}; {why}"
            folder = f"{self.host.host.environment} there" if self.is_worker else ".venv in the project folder"
            yield self.problem("python", what, OWN if is_foreign else f"Remove {folder}, and run: {self.mend}")
        if wrong := unlike(self.pins, facts["versions"]):
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            what = f"packages differ from the master's: {', '.join(wrong[:SHOWN])}{more}"
            yield self.problem("packages", what, OWN if is_foreign else f"Run: {self.mend}")

    def _new_python(self, *, is_gone: bool) -> str:
        if not self.host.facts["fitting"]:
            return INSTALL_PYTHON
        if self.host.host.python_env and not is_gone:  # `hosts setup` clears no folder of the user's
            return f"Remove {self.host.host.environment} there, and run: {self.mend}"
        return f"Run: {self.mend}"

    def rivals(self) -> Iterator[Finding]:
        for name, place, wins in self.host.facts["rivals"]:
            where = "there" if self.is_worker else "here"
            remedy = f"Run {where}: {self.host.facts['executable']} -m pip uninstall {name}"
            if wins:
                yield self.problem("rivals", f"another {name} would be loaded: {place}", remedy)
            else:
                what = f"another {name} is installed in {place}; the project's own comes first"
                yield self.problem("rivals", what, remedy, severity=Severity.WARNING)

    def system(self) -> Iterator[Finding]:
        here, there = (NAMES.get(of.facts.get("system"), of.facts.get("system")) for of in (self.master, self.host))
        if here and there != here and "macOS" in (here, there):
            yield self.problem("system", f"runs {there}, the master {here}", MIXED)

    def clock(self) -> Iterator[Finding]:
        ahead = self.host.clock_ahead_s
        if ahead is not None and abs(ahead) > SKEW_S:
            what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the master's"
            remedy = "Let it set its clock: System Settings > General > Date & Time, or `timedatectl set-ntp true`."
            yield self.problem("clock", what, remedy, severity=Severity.WARNING)

    def code(self) -> Iterator[Finding]:
        if (differ := self.host.differ) and not self.sync:
            names = ", ".join(differ[:SHOWN]) + (", ..." if len(differ) > SHOWN else "")
            what = f"{len(differ)} files of the code are missing or differ from the master's: {names}"
            yield self.problem("code", what, "Start without --no-sync, or run: multimac hosts sync PROFILE")

    def disk(self) -> Iterator[Finding]:
        space = self.host.space
        if space is None:
            return
        sent = max(0, self.needs.sent - space["held"]) if self.is_worker else 0
        need = sent + self.needs.kept
        if need > space["free"]:
            what = f"{size(space['free'])} free for {space['root']}, but {size(need)} needed"
            parts = f" ({size(sent)} to send, {size(self.needs.kept)} for checkpoints)" if sent else ""
            setting = '"project_path"' if self.is_worker else "runs_dir"
            remedy = f"Free some space, or set {setting} to a folder on another disk."
            if self.host.facts.get("system") == "Darwin":
                remedy += MACS_SPACE.format(missing=need - space["free"])
            yield self.problem("disk", what + parts, remedy)

    def device(self) -> Iterator[Finding]:
        torch = self.host.torch
        wanted = self.host.host.device or self.needs.device
        kind, _, index = wanted.partition(":")
        if torch is None:
            self.host.device = "cpu" if wanted == "cpu" else None
        elif torch.get("late") and wanted == "cpu":
            self.host.device = "cpu"
        elif torch.get("late"):
            late = "importing torch took too long: its devices were not checked in time"
            remedy = "The run itself will wait for it. The first time, a Mac scans torch for up to a minute."
            yield self.problem("device", late, remedy, severity=Severity.WARNING)
        elif "failed" in torch:
            yield self.problem("device", f"torch does not load: {torch['failed']}", f"Run: {self.mend}")
        elif kind == "auto":
            self.host.device = "mps" if torch["mps"] else "cuda" if torch["cuda"] else "cpu"
        else:
            self.host.device = wanted
            if kind == "mps" and not torch["mps"]:
                what = "device mps is set, but its torch sees no Apple GPU"
                yield self.problem("device", what, "Set device to auto or cpu; on a Mac, is the Python an arm64 one?")
            if kind == "cuda" and int(index or 0) >= torch["cuda"]:
                what = f"device {wanted} is set, but its torch sees {torch['cuda'] or 'no'} CUDA cards"
                yield self.problem("device", what, "Set device to auto or cpu, or look at its driver: nvidia-smi.")

    def memory(self) -> Iterator[Finding]:
        facts, torch = self.host.facts, self.host.torch
        if not self.needs.memory or not facts:
            return
        on_card = (self.host.device or "").startswith("cuda") and torch["cuda_memory"]
        on_mps = self.host.device == "mps" and torch["mps"] and torch["mps_memory"]
        total = on_card or on_mps or facts["memory"]["total"]
        free = None if on_card else facts["memory"]["available"]
        workers = -(-self.sharing // torch["cuda"]) if on_card else self.sharing
        needs = self.needs
        whole, least = needs.on_cuda if on_card else needs.on_mps if on_mps else (needs.memory, needs.least)
        whole, least = whole * workers, (least or whole) * workers
        in_ram = needs.memory * self.sharing  # strategies keep what is theirs there, also where a card trains
        ram_spare = (MEMORY_SHARE * facts["memory"]["total"] - in_ram) / self.sharing
        self.host.spare_memory = ram_spare if on_card else (MEMORY_SHARE * total - whole) / workers
        has = f"{'its GPU' if on_card or on_mps else 'it'} has {size(total)}"
        if workers > 1:
            has += f" for {workers} workers"
        if least > total:
            yield self.problem("memory", f"training needs about {size(least)} of memory, {has}", LESS_MEMORY)
        elif whole > total:
            parts = f"whole batches would take about {size(whole)} of memory, {has}"
            yield self.problem("memory", parts, IN_PARTS, severity=Severity.WARNING)
        elif free is not None and whole > free:
            what = f"training needs about {size(whole)} of memory; of {size(total)} only {size(free)} are free now"
            yield self.problem("memory", what, f"Close other programs. {IN_PARTS}", severity=Severity.WARNING)

    def problem(self, check: str, what: str, remedy: str = "", **more: str) -> Finding:
        return Finding(hosts=(self.host.name,), what=what, remedy=remedy, check=check, **more)
