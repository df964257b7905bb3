"""Models transcribe clips: this machine begins, and hosts help where that would take long.

A clip's text depends on nothing but the clip, so the texts are those of one machine, if all compute on the same kind of
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn
from transformers import WhisperProcessor

from distributed.hosts.code import code_items, folder_items
from distributed.hosts.paths import STORE
from distributed.plan.decode_spec import AFTER, BEFORE, DecodeSpec
from distributed.plan.prepare import audio_items, model_on_hosts
from distributed.ssh.host import Host
from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.eval.evaluation import GREEDY, Transcript, transcribe
from whisper_tuner.export.final import base_of
from whisper_tuner.hub import is_adapter, model_folder

from .dealer import Dealer, in_groups
from .decoding_hosts import WORTH_S, DecodingHosts, HostDecoder

BATCH_SIZE = 8
HERE = "this machine"


class Hearing:
    """The transcripts of `samples` by each of `models`, a name that HostDecoder knows. Left, it ends what hosts do.

    name: of this machine; at_once: the most clips of a group; helpers: asked once more than `worth_s` seconds are left
    to do for this machine alone; warn(host, what): told once of a host that cannot go on.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        models: Sequence[str],
        helpers: Sequence[HostDecoder],
        *,
        name: str,
        at_once: int,
        is_cpu: bool,
        warn: Callable[[str, str], None],
        worth_s: float = WORTH_S,
    ):
        self._samples, self._helpers, self._warn, self._name, self._worth_s = samples, helpers, warn, name, worth_s
        longest_first = sorted(range(len(samples)), key=lambda place: -samples[place].duration_s)
        groups = [*in_groups(longest_first, at_once, 1 + len(helpers), one_by_one=is_cpu)]
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
        self, model: str, listen: Callable[..., list[Transcript]], progress: Callable[[int, int], None]
    ) -> list[Transcript]:
        """Return one Transcript for each sample, in their order.

        listen(paths, progress=...): what this machine does with a group, see `transcribe`. progress(done, total).
        """
        dealer, began, total = self._dealers[model], time.monotonic(), len(self._samples)
        while (group := dealer.take_here()) is not None:
            group_began = time.monotonic()
            heard = listen(
                [self._samples[place].audio for place in group],
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
    model = AFTER if is_adapter(listening.name) else BEFORE
    with Hearing(
        [sample for manifest in manifests.values() for sample in manifest.samples],
        [model],
        _decoders(listening, model, manifests, hosts) if hosts else [],
        name=HERE,
        at_once=BATCH_SIZE,
        is_cpu=next(listening.model.parameters()).device.type == "cpu",
        warn=warn,
        worth_s=worth_s,
    ) as hearing:
        listen = partial(
            transcribe,
            listening.model,
            listening.processor,
            language=listening.language,
            task=listening.task,
            temperatures=GREEDY,
            batch_size=BATCH_SIZE,
        )
        in_order = iter(hearing.transcripts(model, listen, progress))
        transcripts = {kind: [next(in_order) for _ in manifest.samples] for kind, manifest in manifests.items()}
    return HeardTogether(transcripts=transcripts, devices=hearing.devices, counts=dict(hearing.counts(model)))


def _decoders(
    listening: Listening, model: str, manifests: Mapping[str, Manifest], hosts: Sequence[Host]
) -> list[HostDecoder]:
    """Describe what each host is to do. Base models stay there, as they do for training; an adapter is removed."""
    adapter = Path(listening.name) if model == AFTER else None
    base = model_folder(str(base_of(adapter)) if adapter else listening.name)
    before, after = model_on_hosts(base), ""
    items = folder_items(base, before)
    if adapter:
        after = f"{STORE}/evaluated/{Path(model_on_hosts(adapter.absolute())).name}"
        items += folder_items(adapter, after)
    clips = [item for kind, manifest in manifests.items() for item in audio_items(kind, manifest)]
    return [
        HostDecoder(
            name=host.address,
            host=host,
            spec=DecodeSpec(
                before=before,
                after=after,
                device=None if host.device == "auto" else host.device,
                language=listening.language,
                task=listening.task,
                greedy=True,
                batch_size=BATCH_SIZE,
            ),
            clips=clips,
            code=code_items(),
            models={model: lambda: items},
            temporary=[after] if adapter else [],
        )
        for host in hosts
    ]
