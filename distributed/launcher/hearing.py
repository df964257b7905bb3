"""Machines transcribe clips together: this one begins, and hosts help where that would take long.

Each takes the next group of clips when it has finished one; a host does so through a process of its own, over SSH.
A clip's text depends on nothing but the clip, so the texts are those of one machine, if all compute on the same kind of
device.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import WhisperProcessor

from distributed.hosts.host_process import HostProcess
from distributed.hosts.paths import SyncItem
from distributed.hosts.sync import sync
from distributed.plan.forecast import WORTH_S
from distributed.plan.run_spec import DecodeSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import HostError, TunerError
from whisper_tuner.eval.evaluation import Transcript

from .background import side_by_side

DECODER = "distributed.worker.decode"
BEAT_S = 5.0  # an empty line so often: a decoder ends itself after launcher_silence_s without one
LEAVE_S = 4.0  # for the end of all hosts' decoders
LATE = 2.0  # of this machine's own time for as many clips: after that it no longer waits for another's group
SMALLEST = 4  # the part of a whole group below which it is no smaller, where a single clip takes as long as several


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


class Hearing:
    """The transcripts of `samples` by each of `models`, a name that HostDecoder knows. Left, it ends what hosts do.

    spec: how this machine, called `name`, transcribes; a group has at most its batch_size clips. helpers: asked once
    more than `worth_s` seconds are left to do for this machine alone. warn(host, what): told once of a host that cannot
    go on. leaves(host): asked before each group whether it is to transcribe no more; once if so.
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
        leaves: Callable[[str], bool] = lambda host: False,
    ):
        self._samples, self._spec, self._helpers = samples, spec, helpers
        self._name, self._warn, self._worth_s, self._leaves = name, warn, worth_s, leaves
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
    ) -> list[Transcript]:
        """Return one Transcript for each sample, in their order. name: that of the model. progress(done, total)."""
        dealer, began, total = self._dealers[name], time.monotonic(), len(self._samples)
        while (group := dealer.take_here()) is not None:
            group_began = time.monotonic()
            heard = self._spec.transcribe(
                model,
                processor,
                [self._samples[place].audio for place in group],
                progress=lambda done, _: progress(min(dealer.done + done, total), total),
            )
            dealer.heard(group, heard, self._name, began=group_began)
            if self._helpers and not self._hosts:  # they begin where this machine would take long by itself
                clip_s = (time.monotonic() - began) / dealer.done
                if clip_s * sum(total - each.done for each in self._dealers.values()) > self._worth_s:
                    self._hosts = DecodingHosts(self._helpers, self._dealers, self._warn, self._leaves)
        progress(total, total)
        return [dealer.transcripts[place] for place in range(total)]


def in_groups(places: Sequence[int], most: int, machines: int, *, one_by_one: bool) -> Iterator[Sequence[int]]:
    """Make large groups first, small ones at the end, so that no machine waits long for another's last (guided
    self-scheduling: Polychronopoulos and Kuck, 1987).

    one_by_one: clips that are computed together take as long as one after the other, as on a CPU.
    """
    least, start = 1 if one_by_one else max(1, most // SMALLEST), 0
    while start < len(places):
        left = len(places) - start
        size = left if machines == 1 else min(most, max(least, -(-left // (2 * machines))))
        yield places[start : start + size]
        start += size


class Dealer:
    """Groups of a test set's clips, by their places in it. Called from several threads.

    A group that is given back, and one that a host takes too long for, is decoded by another machine; what comes first
    counts. `transcripts` holds each clip's, once all is done; `counts`, how many each machine has transcribed.
    """

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._waiting = [tuple(group) for group in groups]
        self._dealt: dict[tuple[int, ...], float] = {}  # when each group was
        self._changed = threading.Condition()
        self._for_this_machine: list[int] = []  # clips that a host cannot read
        self._clips = sum(map(len, groups))
        self._own_s, self._own_clips = 0.0, 0  # that this machine has taken, and for how many clips
        self._closed = False
        self.transcripts: dict[int, Transcript] = {}
        self.counts: dict[str, int] = {}

    @property
    def done(self) -> int:
        return len(self.transcripts)

    @property
    def is_done(self) -> bool:
        return self.done == self._clips

    @property
    def has_waiting(self) -> bool:
        """True while a group is dealt to nobody."""
        return bool(self._waiting)

    def take(self) -> tuple[int, ...] | None:
        """Give a host the next group, as soon as there is one; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_done or self._closed)
            return None if self.is_done or self._closed else self._deal()

    def take_here(self) -> tuple[int, ...] | None:
        """Give this machine the next group, also what hosts cannot read and take too long for; None at the end."""
        with self._changed:
            while not self.is_done:
                if self._for_this_machine:
                    group, self._for_this_machine = tuple(self._for_this_machine), []
                    return group
                if self._waiting:
                    return self._deal()
                oldest = min(self._dealt, key=lambda group: self._dealt[group])
                own_s = len(oldest) * self._own_s / max(1, self._own_clips)
                left = self._dealt[oldest] + LATE * own_s - time.monotonic()
                if left <= 0:
                    self._dealt[oldest] = time.monotonic()
                    return oldest
                self._changed.wait(left)
            return None

    def _deal(self) -> tuple[int, ...]:
        group = self._waiting.pop(0)
        self._dealt[group] = time.monotonic()
        return group

    def give_back(self, group: tuple[int, ...]) -> None:
        """Let another machine have a group that its own does not transcribe."""
        with self._changed:
            if self._dealt.pop(group, None) is not None:
                self._waiting.insert(0, group)
                self._changed.notify_all()

    def heard(
        self,
        group: tuple[int, ...],
        transcripts: Sequence[Transcript],
        machine: str,
        *,
        began: float | None = None,
    ) -> None:
        """Keep what a machine has heard. began: when, if it is this machine that has.

        What a host could not read is tried here, or told with a path that the user knows.
        """
        with self._changed:
            self._dealt.pop(group, None)
            if began is not None:
                self._own_s, self._own_clips = self._own_s + time.monotonic() - began, self._own_clips + len(group)
            for clip, one in zip(group, transcripts, strict=True):
                if clip in self.transcripts:
                    continue
                if one.problem and began is None:
                    self._for_this_machine.append(clip)
                    continue
                self.transcripts[clip] = one
                self.counts[machine] = self.counts.get(machine, 0) + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Give hosts no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class DecodingHosts:
    """A thread for each host, which takes groups from one dealer after the other, until `close`.

    dealers: by the model's name. A host that fails is told once, by `warn`, and left out from then on: others
    transcribe its clips. devices: the kinds of those that have transcribed anything. leaves: see Hearing.
    """

    def __init__(
        self,
        hosts: Sequence[HostDecoder],
        dealers: Mapping[str, Dealer],
        warn: Callable[[str, str], None],
        leaves: Callable[[str], bool] = lambda host: False,
    ):
        self.devices: set[str] = set()
        self._warn, self._leaves, self._dealers, self._closed = warn, leaves, dealers, False
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
                if dealer.has_waiting:
                    host.hears(model, ())  # it loads the model, for which no clips need wait
                while group := dealer.take():
                    if self._leaves(host.name):
                        dealer.give_back(group)
                        return
                    try:
                        transcripts = host.hears(model, group)
                    except BaseException:
                        dealer.give_back(group)
                        raise
                    self.devices.add(host.device)
                    dealer.heard(group, transcripts, host.name)
        except TunerError as error:
            if not self._closed:
                self._warn(host.name, f"transcribes no more clips: {error}")
        finally:
            host.close()


class _Host:
    """The decoder on one host. Raises HostError; `close` may come from any thread, and ends whatever it is doing."""

    def __init__(self, decoding: HostDecoder):
        self.name, self.device = decoding.name, ""
        self._decoding, self._to_send = decoding, dict(decoding.models)
        self._remote: Remote | None = None
        self._decoder: HostProcess | None = None
        self._closed, self._ending, self._has_ended = threading.Event(), threading.Lock(), False

    def start(self) -> None:
        """Connect, and start the decoder. To be called first."""
        self._remote = Remote.connect(self._decoding.host)
        if self._closed.is_set():
            self._remote.close()
        self._send(self._decoding.code)
        self._decoder = decoder = HostProcess(self._remote, DECODER)
        with contextlib.suppress(HostError):  # it has ended already: what it said tells why
            decoder.write(self._decoding.spec.to_json())

        def beat() -> None:
            with contextlib.suppress(HostError):
                while not self._closed.wait(BEAT_S):
                    decoder.write("")

        threading.Thread(target=beat, daemon=True).start()
        self.device = str(self._next("ready").get("device"))

    def hears(self, model: str, group: Sequence[int]) -> list[Transcript]:
        if model in self._to_send:
            self._send(self._to_send.pop(model)())
        items = [self._decoding.clips[clip] for clip in group]
        names = [item.remote for item in items]
        self._send(items, may_lack=names)  # of a clip that cannot be read here, the host says that it lacks it
        assert self._decoder
        self._decoder.write(json.dumps({"model": model, "clips": names}))
        texts = self._next("texts").get("texts")
        if not isinstance(texts, list) or len(texts) != len(group):
            raise HostError(self.name, f"its decoder answers with no texts for {len(group)} clips")
        return [_transcript(text, self.name) for text in texts]

    def _next(self, kind: str) -> dict:
        assert self._decoder
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

        assert self._remote
        if items:
            sync([self._remote], {self._remote.name: items}, go_on, may_lack=may_lack)

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
