"""Hosts transcribe clips beside this machine, each through a process of its own over SSH."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distributed.hosts.code import SyncItem
from distributed.hosts.host_process import HostProcess
from distributed.hosts.sync import sync
from distributed.plan.run_spec import DecodeSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from whisper_tuner.errors import HostError, TunerError
from whisper_tuner.eval.evaluation import Transcript

from .background import side_by_side
from .dealer import Dealer

DECODER = "distributed.worker.decode"
BEAT_S = 5.0  # an empty line so often: a decoder ends itself after launcher_silence_s without one
WORTH_S = 20.0  # of this machine alone, still to come: on a host, torch and the model take half as long to load
LEAVE_S = 4.0  # for the end of all hosts' decoders


@dataclass(frozen=True, kw_only=True)
class HostDecoder:
    """The task of one host. clips: those of the dealers, by place.

    code: sent before its process starts. models: by name, what is sent before it is used first. temporary: folders
    that are removed at the end.
    """

    name: str
    host: Host
    spec: DecodeSpec
    clips: Sequence[SyncItem]
    code: Sequence[SyncItem] = ()
    models: Mapping[str, Callable[[], list[SyncItem]]] = field(default_factory=dict)
    temporary: Sequence[str] = ()


class DecodingHosts:
    """A thread for each host, which takes groups from one dealer after the other, until `close`.

    dealers: by the model's name. A host that fails is told once, by `warn`, and left out from then on: others
    transcribe its clips. devices: the kinds of those that have transcribed anything.
    """

    def __init__(self, hosts: Sequence[HostDecoder], dealers: Mapping[str, Dealer], warn: Callable[[str, str], None]):
        self.devices: set[str] = set()
        self._warn, self._dealers, self._closed = warn, dealers, False
        self._hosts = [_Host(decoding) for decoding in hosts]
        for host in self._hosts:
            threading.Thread(target=self._work, args=(host,), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for dealer in self._dealers.values():
            dealer.close()
        side_by_side([host.close for host in self._hosts], LEAVE_S)

    def _work(self, host: _Host) -> None:
        try:
            host.start()
            for model, dealer in self._dealers.items():
                if self._closed:
                    break
                self._transcribe(host, model, dealer)
        except TunerError as error:
            if not self._closed:
                self._warn(host.name, f"transcribes no more clips: {error}")
        finally:
            host.close()

    def _transcribe(self, host: _Host, model: str, dealer: Dealer) -> None:
        if dealer.has_waiting:
            host.hears(model, ())  # it loads the model, for which no clips need wait
        while group := dealer.take():
            try:
                transcripts = host.hears(model, group)
            except BaseException:
                dealer.give_back(group)
                raise
            self.devices.add(host.device)
            dealer.heard(group, transcripts, host.name)


class _Host:
    """The decoder on one host. Raises HostError; `close` may come from any thread, and ends whatever it is doing."""

    def __init__(self, decoding: HostDecoder):
        self.name, self.device = decoding.name, ""
        self._decoding, self._to_send = decoding, dict(decoding.models)
        self._remote: Remote | None = None
        self._decoder: HostProcess | None = None
        self._closed, self._ending, self._has_ended = threading.Event(), threading.Lock(), False

    def start(self) -> None:
        self._remote = Remote.connect(self._decoding.host)
        if self._closed.is_set():
            self._remote.close()
        self._send(self._decoding.code)
        self._decoder = HostProcess(self._remote, DECODER)
        with contextlib.suppress(HostError):  # it has ended already: what it said tells why
            self._decoder.write(self._decoding.spec.to_json())
        threading.Thread(target=self._beat, daemon=True).start()
        self.device = str(self._next("ready").get("device"))

    def hears(self, model: str, group: Sequence[int]) -> list[Transcript]:
        if model in self._to_send:
            self._send(self._to_send.pop(model)())
        items = [self._decoding.clips[clip] for clip in group]
        names = [item.remote for item in items]
        self._send(items, may_lack=names)  # of a clip that cannot be read here, the host says that it lacks it
        self._decoder.write(json.dumps({"model": model, "clips": names}))
        texts = self._next("texts").get("texts")
        if not isinstance(texts, list) or len(texts) != len(group):
            raise HostError(self.name, f"its decoder answers with no texts for {len(group)} clips")
        return [_transcript(text, self.name) for text in texts]

    def _next(self, kind: str) -> dict:
        for event in self._decoder.events():
            if event["type"] == "failed":
                raise HostError(self.name, str(event.get("message")))
            if event["type"] == kind:
                return event
        said = self._decoder.last_words[-300:]
        raise HostError(self.name, f"its decoder has ended{f': {said}' if said else ''}")

    def _send(self, items: Sequence[SyncItem], may_lack: Sequence[str] = ()) -> None:
        def go_on(*_progress) -> None:
            if self._closed.is_set():
                raise HostError(self.name, "nobody waits for its texts any more")

        if items:
            sync([self._remote], {self._remote.name: items}, go_on, may_lack=may_lack)

    def _beat(self) -> None:
        with contextlib.suppress(HostError):
            while not self._closed.wait(BEAT_S):
                self._decoder.write("")

    def close(self) -> None:
        """End the decoder and remove what is temporary there, if the host can be reached; a second caller waits."""
        self._closed.set()
        with self._ending:
            if self._remote is None or self._has_ended:
                return
            self._has_ended = True
            with contextlib.suppress(TunerError):
                if self._decoder:
                    self._decoder.process.kill()
                if self._decoding.temporary and not self._to_send:  # they have been sent, or a part of them
                    sync([self._remote], {self._remote.name: []}, prune=self._decoding.temporary)
            self._remote.close()


def _transcript(text: object, host: str) -> Transcript:
    match text:
        case [str() as written, str() as problem, float() | int() as temperature, greedy, logprob] if isinstance(
            greedy, str | None
        ) and isinstance(logprob, float | int | None):
            return Transcript(written, problem, float(temperature), greedy, logprob)
    raise HostError(host, f"no transcript: {str(text)[:80]}")
