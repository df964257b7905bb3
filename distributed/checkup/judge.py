"""Judges one host: what a job needs of it, what is wrong with it, and what to do about that.

Also tries the job's own files on the master.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed.hosts.agent_call import INSTALL_PYTHON, remedy_for
from distributed.hosts.environment import Pins, unlike
from distributed.hosts.paths import PROJECT, STORE
from distributed.hosts.sync import SPARE_BYTES
from distributed.plan.automatic import CHECKPOINT_BYTES, more_bytes
from distributed.plan.job import Job
from distributed.plan.run_spec import PIPELINE
from whisper_tuner.data.check import check_manifest, check_usable
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import DataError, TunerError
from whisper_tuner.hub import check_model
from whisper_tuner.model.memory import PARTS, Way, best_bytes, fastest, shape_of, trained_parameters, ways_of
from whisper_tuner.text import size

from .findings import Finding, Severity
from .look import HostFacts

CODE_BYTES = 2 << 20
FEATURE_BYTES_PER_S = 16_000  # fp16 log-mel of 80 bands, kept on disk
UNEVEN = 1.2  # the largest share over the mean one
OPENED = 4  # audio files, of each end of a manifest

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


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Counts bytes of one worker. What the host holds already of `sent` counts in its favour.

    memory: the ways to train, the fastest first, by kind of device: a Mac's GPU takes more, and a card has its own.
    """

    memory: Mapping[str, Sequence[Way]] = field(default_factory=dict)
    sent: int = 0
    kept: int = SPARE_BYTES
    device: str = "auto"


def needs_of(job: Job | None, hosts: int, manifests: Sequence[Manifest] = (), *, rank: int = 0) -> Needs:
    """Estimate the needs; the sync counts to the byte. Without manifests their part is left out.

    rank: of the host, which has a part of the model in a pipeline.
    """
    if job is None:
        return Needs()
    profile = job.profile
    samples = [sample for manifest in manifests for sample in manifest.samples]
    data = sum(_size(sample.audio) + sample.duration_s * FEATURE_BYTES_PER_S for sample in samples)
    longest = max((sample.duration_s for sample in samples), default=None)
    folder, shape = Path(profile.base_model), shape_of(profile.base_model)
    model = 4 * shape.parameters if shape else 0
    if folder.is_dir():
        model = sum(_size(path) for path in folder.rglob("*"))
    trained = trained_parameters(shape, profile) if shape else 0
    is_pipeline = job.distribution.strategy == PIPELINE
    part = PARTS[min(rank, 1)] if is_pipeline else ""
    # `doctor` asks for one machine of several: so no less than for two ranks.
    more = more_bytes(job.strategy_config(total_steps=1), max(2, hosts))
    return Needs(
        memory={
            device: ways_of(profile, longest_s=longest, device=device, more_bytes=more, part=part)
            for device in ("cpu", "mps", "cuda")
        },
        sent=CODE_BYTES + model + int(data if is_pipeline else data / hosts * UNEVEN),
        kept=SPARE_BYTES + (profile.keep_checkpoints + 1) * (CHECKPOINT_BYTES + best_bytes(profile)) * trained,
        device=profile.device,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_own_files(job: Job, host: str, stop: threading.Event) -> tuple[list[Manifest], list[Finding]]:
    """Open on the master what the run will open. On a Mac a folder may be there and yet be closed to us.

    Raises Stopped once `stop` is set.
    """
    profile, manifests, problems = job.profile, [], []

    def wrong(error: TunerError) -> None:
        what, status = error.args[0], error.exit_status
        problems.append(Finding(hosts=(host,), what=what, remedy=error.remedy, check="files", status=status))

    try:
        check_model(profile)
    except TunerError as error:
        wrong(error)
    for kind in ("train", "validation", "test"):
        if not (path := getattr(profile, kind)):
            continue
        try:
            manifest = check_manifest(
                path,
                profile.max_duration_s,
                PROJECT / STORE,
                stop,
                no_speech=profile.no_speech == "train",
                reading=Reading.of(profile),
                kind=kind,
            )
            check_usable(manifest)
            audio = [sample.audio for sample in manifest.samples]
            for file in dict.fromkeys([*audio[:OPENED], *audio[-OPENED:]]):
                try:
                    with file.open("rb") as stream:
                        stream.read(1)
                except OSError as error:
                    remedy = remedy_for(error.errno) or "Check the path."
                    raise DataError(f"{file} cannot be read: {error.strerror}", remedy=remedy) from None
        except TunerError as error:
            wrong(error)
            continue
        if kind != "test":
            manifests.append(manifest)
    return manifests, problems


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
        """Say what makes its environment anew."""
        return self.setup if self.is_worker else "Run: make setup"

    def all(self) -> Iterator[Finding]:
        """Yield all findings; fill in the device on which the host would train, and the memory that it has left."""
        if self.host.facts:
            yield from self.python()
            yield from self.system()
        yield from self.clock_and_code()
        yield from self.disk()
        yield from self.device()
        yield from self.memory()

    def python(self) -> Iterator[Finding]:
        facts = self.host.facts
        is_foreign = self.is_worker and not facts["venv"]
        if not facts["training"]:
            passed = facts["passed"][: 1 if facts["fitting"] else None]
            at = f"{self.host.host.address}:" if self.is_worker else ""  # a path there, not one here
            what = f"there is no usable Python at {at}{'; '.join(passed)}".removesuffix(GONE)
            remedy = self.mend
            if not facts["fitting"]:
                remedy = INSTALL_PYTHON
            elif self.host.host.python_env:
                is_gone = "".join(passed[:1]).endswith(GONE)
                # `hosts setup` clears no folder of the user's.
                clear = f"Remove {self.host.host.environment} there."
                first = "Is python_env right in the hosts file?" if is_gone else clear
                remedy = f"{first} {self.mend}"
            yield self.problem("python", what, remedy)
            return
        if why := self.pins.unfit(facts["python"]):
            version = ".".join(map(str, facts["python"]))
            what = f"Python {version} at {facts['executable']}; {why}"
            folder = f"{self.host.host.environment} there" if self.is_worker else ".venv in the project folder"
            yield self.problem("python", what, OWN if is_foreign else f"Remove {folder}. {self.mend}")
        if wrong := unlike(self.pins, facts["versions"]):
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            what = f"packages differ from the master's: {', '.join(wrong[:SHOWN])}{more}"
            yield self.problem("packages", what, OWN if is_foreign else self.mend)

    def system(self) -> Iterator[Finding]:
        for name, place, wins in self.host.facts["rivals"]:
            where = "there" if self.is_worker else "here"
            remedy = f"Run {where}: {self.host.facts['executable']} -m pip uninstall {name}"
            if wins:
                yield self.problem("rivals", f"another {name} would be loaded: {place}", remedy)
            else:
                what = f"another {name} is installed in {place}; the project's own comes first"
                yield self.problem("rivals", what, remedy, severity=Severity.WARNING)
        here, there = (of.facts.get("system", "") for of in (self.master, self.host))
        if here and there != here and "Darwin" in (here, there):
            what = f"runs {NAMES.get(there, there)}, the master {NAMES.get(here, here)}"
            yield self.problem("system", what, MIXED)

    def clock_and_code(self) -> Iterator[Finding]:
        ahead = self.host.clock_ahead_s
        if ahead is not None and abs(ahead) > SKEW_S:
            what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the master's"
            remedy = "Let it set its clock: System Settings > General > Date & Time, or `timedatectl set-ntp true`."
            yield self.problem("clock", what, remedy, severity=Severity.WARNING)
        if (differ := self.host.differ) and not self.sync:
            names = ", ".join(differ[:SHOWN]) + (", ..." if len(differ) > SHOWN else "")
            what = f"files of the code are missing or differ from the master's: {names}"
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
        if torch is None or torch.get("late"):
            self.host.device = "cpu" if wanted == "cpu" else None
            if torch and wanted != "cpu":
                late = "importing torch took too long: its devices were not checked in time"
                remedy = "The run itself will wait for it. The first time, a Mac scans torch for up to a minute."
                yield self.problem("device", late, remedy, severity=Severity.WARNING)
        elif "failed" in torch:
            yield self.problem("device", f"torch does not load: {torch['failed']}", self.mend)
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
        facts, torch, needs = self.host.facts, self.host.torch or {}, self.needs
        if not facts or not needs.memory.get("cpu"):
            return
        on_card = (self.host.device or "").startswith("cuda") and torch["cuda_memory"]
        on_mps = self.host.device == "mps" and torch["mps"] and torch["mps_memory"]
        total = on_card or on_mps or facts["memory"]["total"]
        free = None if on_card else facts["memory"]["available"]
        workers = -(-self.sharing // torch["cuda"]) if on_card else self.sharing
        ways = needs.memory["cuda" if on_card else "mps" if on_mps else "cpu"]
        way = self.host.way = fastest(ways, min(MEMORY_SHARE * total, total if free is None else free) / workers)
        whole, least = way.whole * workers, way.one * workers
        ram = next(each for each in needs.memory["cpu"] if each.frozen_precision == way.frozen_precision)
        in_ram = ram.whole * self.sharing  # strategies keep what is theirs there, also where a card trains
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

    def problem(self, check: str, what: str, remedy: str, *, severity: Severity = Severity.ERROR) -> Finding:
        return Finding(hosts=(self.host.name,), what=what, remedy=remedy, check=check, severity=severity)
