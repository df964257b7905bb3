"""What one model writes for the clips of several manifests: this machine begins, and hosts help where that is long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import WhisperProcessor

from distributed.hosts.code import code_items, folder_items
from distributed.hosts.paths import STORE
from distributed.plan.decode_spec import AFTER, BEFORE, DecodeSpec
from distributed.plan.prepare import audio_items, model_on_hosts
from distributed.ssh.host import Host
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.eval.evaluation import GREEDY, Transcript, transcribe
from whisper_tuner.export.final import base_of
from whisper_tuner.hub import is_adapter, model_folder

from .dealer import Dealer, in_groups
from .decoding_hosts import WORTH_S, DecodingHosts, HostDecoder

BATCH_SIZE = 8
HERE = "this machine"


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
    """Greedily. What a host cannot do is done here, and told once by warn(host, what).

    hosts: asked once more than worth_s is left to do for this machine alone.
    """
    samples = [sample for manifest in manifests.values() for sample in manifest.samples]
    longest_first = sorted(range(len(samples)), key=lambda place: -samples[place].duration_s)
    is_cpu = next(listening.model.parameters()).device.type == "cpu"
    dealer = Dealer([*in_groups(longest_first, BATCH_SIZE, 1 + len(hosts), one_by_one=is_cpu)])
    about = {"language": listening.language, "task": listening.task, "temperatures": GREEDY}
    began, helping = time.monotonic(), None
    try:
        while (group := dealer.take_here()) is not None:
            group_began = time.monotonic()
            heard = transcribe(
                listening.model,
                listening.processor,
                [samples[place].audio for place in group],
                batch_size=BATCH_SIZE,
                progress=lambda done, _: progress(min(dealer.done + done, len(samples)), len(samples)),
                **about,
            )
            dealer.heard_here(group, heard, HERE, group_began)
            left_s = (time.monotonic() - began) / dealer.done * (len(samples) - dealer.done)
            if hosts and helping is None and left_s > worth_s:
                helping = DecodingHosts(_decoders(listening, manifests, hosts), warn)
                helping.deal(_asked(listening), dealer)
    finally:
        if helping:
            helping.close()
    progress(len(samples), len(samples))
    in_order = iter([dealer.transcripts[place] for place in range(len(samples))])
    transcripts = {kind: [next(in_order) for _ in manifest.samples] for kind, manifest in manifests.items()}
    return HeardTogether(
        transcripts=transcripts, devices=helping.devices if helping else set(), counts=dict(dealer.counts)
    )


def _asked(listening: Listening) -> str:
    return AFTER if is_adapter(listening.name) else BEFORE


def _decoders(listening: Listening, manifests: Mapping[str, Manifest], hosts: Sequence[Host]) -> list[HostDecoder]:
    """Base models stay on the hosts, as they do for training. An adapter is removed afterwards."""
    adapter = Path(listening.name) if is_adapter(listening.name) else None
    base = model_folder(str(base_of(adapter)) if adapter else listening.name)
    before = model_on_hosts(base)
    models, temporary = folder_items(base, before), []
    if adapter:
        temporary = [f"{STORE}/evaluated/{Path(model_on_hosts(adapter.absolute())).name}"]
        models += folder_items(adapter, temporary[0])
    clips = [item for kind, manifest in manifests.items() for item in audio_items(kind, manifest)]
    return [
        HostDecoder(
            name=host.address,
            host=host,
            spec=DecodeSpec(
                before=before,
                after=temporary[0] if adapter else "",
                device=None if host.device == "auto" else host.device,
                language=listening.language,
                task=listening.task,
                greedy=True,
                batch_size=BATCH_SIZE,
            ),
            clips=clips,
            code=code_items(),
            models={_asked(listening): lambda: models},
            temporary=temporary,
        )
        for host in hosts
    ]
