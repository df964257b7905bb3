"""Models transcribe clips: this machine begins, and hosts help where that would take long.

A clip's text depends on nothing but the clip, so the texts are those of one machine, if all compute on the same kind of
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from transformers import WhisperProcessor

from distributed.hosts.code import code_items, folder_items
from distributed.hosts.paths import STORE
from distributed.plan.prepare import audio_items, model_on_hosts
from distributed.plan.run_spec import AFTER, BEFORE, DecodeSpec
from distributed.ssh.host import Host
from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.eval.evaluation import Transcript
from whisper_tuner.export.final import base_of
from whisper_tuner.hub import is_adapter, model_folder

from .dealer import Dealer, in_groups
from .decoding_hosts import WORTH_S, DecodingHosts, HostDecoder

BATCH_SIZE = 8
HERE = "this machine"


class Hearing:
    """The transcripts of `samples` by each of `models`, a name that HostDecoder knows. Left, it ends what hosts do.

    spec: how this machine, called `name`, transcribes; a group has at most its batch_size clips. helpers: asked once
    more than `worth_s` seconds are left to do for this machine alone. warn(host, what): told once of a host that cannot
    go on.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        models: Sequence[str],
        spec: DecodeSpec,
        helpers: Sequence[HostDecoder],
        *,
        name: str,
        is_cpu: bool,
        warn: Callable[[str, str], None],
        worth_s: float = WORTH_S,
    ):
        self._samples, self._spec, self._helpers = samples, spec, helpers
        self._name, self._warn, self._worth_s = name, warn, worth_s
        longest_first = sorted(range(len(samples)), key=lambda place: -samples[place].duration_s)
        groups = [*in_groups(longest_first, spec.batch_size, 1 + len(helpers), one_by_one=is_cpu)]
        self._dealers = {model: Dealer(groups) for model in models}
        self._hosts: DecodingHosts | None = None

    def __enter__(self) -> Hearing:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._hosts:
            self._hosts.close()

    @property
    def devices(self) -> set[str]:
        """The kinds of device of the hosts that have transcribed anything."""
        return self._hosts.devices if self._hosts else set()

    def counts(self, model: str) -> dict[str, int]:
        """Return how many clips each machine has transcribed with this model, by its name."""
        return self._dealers[model].counts if model in self._dealers else {}

    def transcripts(
        self,
        name: str,
        model: nn.Module,
        processor: WhisperProcessor,
        progress: Callable[[int, int], None],
        features: FeatureStore | None = None,
    ) -> list[Transcript]:
        """Return one Transcript for each sample, in their order. name: that of the model. progress(done, total)."""
        dealer, began, total = self._dealers[name], time.monotonic(), len(self._samples)
        while (group := dealer.take_here()) is not None:
            group_began = time.monotonic()
            heard = self._spec.transcribe(
                model,
                processor,
                [self._samples[place].audio for place in group],
                features=features,
                progress=lambda done, _: progress(min(dealer.done + done, total), total),
            )
            dealer.heard_here(group, heard, self._name, group_began)
            self._ask_for_help((time.monotonic() - began) / dealer.done)
        progress(total, total)
        return [dealer.transcripts[place] for place in range(total)]

    def _ask_for_help(self, seconds_of_a_clip: float) -> None:
        """Have the hosts begin where this machine would take long by itself, as its first groups tell."""
        if self._hosts or not self._helpers:
            return
        left = sum(len(self._samples) - dealer.done for dealer in self._dealers.values())
        if seconds_of_a_clip * left > self._worth_s:
            self._hosts = DecodingHosts(self._helpers, self._dealers, self._warn)


@dataclass(frozen=True, kw_only=True)
class Listening:
    """name, model: the model's folder or hub id, and it as it is loaded here."""

    name: str
    model: nn.Module
    processor: WhisperProcessor
    language: str | None
    task: str | None


@dataclass(frozen=True, kw_only=True)
class HeardTogether:
    """transcripts: by kind, in the manifest's order. devices, counts: of hosts, and of all machines by name."""

    transcripts: dict[str, list[Transcript]]
    devices: set[str]
    counts: dict[str, int]


def hear_together(
    listening: Listening,
    manifests: Mapping[str, Manifest],
    hosts: Sequence[Host],
    *,
    progress: Callable[[int, int], None],
    warn: Callable[[str, str], None],
    worth_s: float = WORTH_S,
) -> HeardTogether:
    """Transcribe the clips of several manifests with one model, greedily. See Hearing."""
    which = AFTER if is_adapter(listening.name) else BEFORE
    spec = DecodeSpec(
        before=listening.name, language=listening.language, task=listening.task, greedy=True, batch_size=BATCH_SIZE
    )
    with Hearing(
        [sample for manifest in manifests.values() for sample in manifest.samples],
        [which],
        spec,
        _decoders(listening.name, spec, manifests, hosts) if hosts else [],
        name=HERE,
        is_cpu=next(listening.model.parameters()).device.type == "cpu",
        warn=warn,
        worth_s=worth_s,
    ) as hearing:
        in_order = iter(hearing.transcripts(which, listening.model, listening.processor, progress))
        transcripts = {kind: [next(in_order) for _ in manifest.samples] for kind, manifest in manifests.items()}
    return HeardTogether(transcripts=transcripts, devices=hearing.devices, counts=dict(hearing.counts(which)))


def _decoders(
    name: str, spec: DecodeSpec, manifests: Mapping[str, Manifest], hosts: Sequence[Host]
) -> list[HostDecoder]:
    """Describe what each host is to do. Base models stay there, as they do for training; an adapter is removed."""
    adapter = Path(name) if is_adapter(name) else None
    base = model_folder(str(base_of(adapter)) if adapter else name)
    spec = replace(spec, before=model_on_hosts(base))
    items = folder_items(base, spec.before)
    if adapter:
        spec = replace(spec, after=f"{STORE}/evaluated/{Path(model_on_hosts(adapter.absolute())).name}")
        items += folder_items(adapter, spec.after)
    clips = [item for kind, manifest in manifests.items() for item in audio_items(kind, manifest)]
    return [
        HostDecoder(
            name=host.address,
            host=host,
            spec=replace(spec, device=None if host.device == "auto" else host.device),
            clips=clips,
            code=code_items(),
            models={AFTER if adapter else BEFORE: lambda: items},
            temporary=[spec.after] if adapter else [],
        )
        for host in hosts
    ]
