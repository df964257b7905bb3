"""How ranks that meet come to one state: what each can begin from, and how the newest gets to those who lack it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError, PeerLost, RanksDiverged, SettingError
from exogym.flat import digest
from exogym.membership import DRIFT_CHECK
from exogym.samplers.elastic import Sampler
from exogym.state.checkpoint import Checkpoints, from_tree, to_tree
from exogym.state.node_state import NOT_BEGUN, NodeState, Version
from exogym.strategy.strategy import Strategy

RESCUE_S = 5.0  # that a rescue waits for the end of a change
MOST = 16  # checkpoints that a rank can offer to the others
NONE = -1  # in place of one
FIRST_TERM = 1
PIECE = 64 * 1024 * 1024  # bytes sent at once
_SENT = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
DTYPES = {str(dtype): dtype for dtype in _SENT}


class Offer(NamedTuple):
    """A checkpoint that a rank could begin from. number: twice its agreements, plus 1 if it lies inside a round."""

    version: Version
    fingerprint: int
    number: int

    @property
    def state(self) -> tuple[Version, int]:
        """The part that ranks must share to go on from it together."""
        return self.version, self.fingerprint


class SavedStates:
    """Offers checkpoints when ranks meet, and writes them in the background; nothing at all without `checkpoints`.

    What there is to tell goes to `emit(type, **values)`.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, state: NodeState, comm: Comm, *, resume: bool, emit: Callable[..., None]
    ):
        self.checkpoints, self.state, self.comm = checkpoints, state, comm
        self._resume, self._emit = resume, emit
        self._kept: list[Offer] | None = None
        self._writing: tuple[int, float, Future[int]] | None = None
        self._disk_trouble = False

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return fixed_settings(self.state.strategy, self.state.sampler)

    def look_at_data(self) -> None:
        """Read once what `settings` needs: nothing else should read the data while they are trained on."""
        if self.checkpoints:
            _ = self.settings

    # What ranks can begin from.

    def offers(self) -> tuple[list[Offer], bool]:
        """Return the good checkpoints, and whether there are some of which none is good.

        A rank that has begun remembers more than is on the disk. Raises CheckpointError for those of another run, or of
        another version of this program.
        """
        if not self.checkpoints or not self._resume or self.state.version() != NOT_BEGUN:
            return [], False
        if self._kept is None:  # read once: each look hashes gigabytes
            self._kept = self._undamaged(self.checkpoints)
        return self._kept, not self._kept and bool(self.checkpoints.numbers())

    def load(self, offer: Offer, *, exactly: bool, inside: bool) -> bool:
        """Begin from it. exactly: all ranks begin from the same one; inside: some of them inside a round.

        False if it has nothing of this rank's own.
        """
        assert self.checkpoints is not None  # it has offered one
        saved = self.checkpoints.load(offer.number)
        try:
            self.state.load_whole(saved, exactly=exactly, inside=inside, members=self.comm.members)
        except ValueError as error:
            what = f"the checkpoint is of another optimizer ({error}): a default, as weight decay, has changed since"
            raise CheckpointError(f"{what}. Start a new run in another folder") from error
        return saved["own"] is not None and exactly and (self.state.is_mid_round or offer.number % 2 == 0)

    def _undamaged(self, checkpoints: Checkpoints) -> list[Offer]:
        found, settings, strategy = [], self.settings, self.state.strategy
        # Of settings that an older version did not have yet: it did what their defaults do.
        known = [f for f in dataclasses.fields(strategy.config) if f.default is not dataclasses.MISSING]
        defaults = {f.name: _plain(f.default) for f in known}
        for number in checkpoints.numbers():
            self.comm.alive()
            with contextlib.suppress(CheckpointError):
                saved = checkpoints.load(number)
                agreed, settings = saved["agreed"], saved["settings"]
                if settings["strategy"] == type(strategy).__name__:
                    settings = defaults | settings
                found.append(Offer(Version(*agreed["version"]), self.state.fingerprint_of(agreed), number))
        check_settings(settings, self.settings, checkpoints.folder)
        if not found and (formats := checkpoints.other_formats()):
            what = f"checkpoints of another version of this program (format {formats[0]})"
            raise CheckpointError(f"{checkpoints.folder} has {what}: resume with it, or start a new run")
        return found

    # What it keeps.

    def _number(self, *, inside: bool) -> int:
        """Number a state; one inside a round is later than the agreement before it, and earlier than the next."""
        return 2 * self.state.strategy.agreements + inside

    def save(self, *, at_once: bool = False) -> None:
        """Save all of the state, in the background unless at_once, or weights have few bits, or moments are divided.

        Then memory is short, and a copy for the background may be the largest of all that there is.
        """
        if not self.checkpoints:
            return
        self.note_written(at_once=True)
        whole = {"settings": self.settings, **self.state.whole()}
        number = self._number(inside=self.state.is_ahead or self.state.strategy.cut_short)
        strategy = self.state.strategy
        waits = (
            at_once or bool(strategy.sharded) or any(p.dtype != torch.float32 for p in strategy.parameters.parameters)
        )
        writing = self.checkpoints.save_in_background(number, whole, copy=not waits)
        self._writing = (self.state.strategy.agreements, time.perf_counter(), writing)
        self.note_written(at_once=waits)

    def note_written(self, *, at_once: bool = False) -> None:
        """Tell of the checkpoint that was being written, once it is."""
        if self._writing is None or not (at_once or self._writing[2].done()):
            return
        (agreements, started, writing), self._writing = self._writing, None
        try:
            written = writing.result()
        except CheckpointError as error:
            if not self._disk_trouble:
                self._emit("warning", what=f"no checkpoints are kept here until this is mended: {error}")
            self._disk_trouble = True
            return
        self._disk_trouble = False
        self._emit("checkpoint", round=agreements, bytes=written, seconds=time.perf_counter() - started)

    def save_agreed(self, patience_s: float = RESCUE_S) -> bool:
        """Save, from another thread as this process must end, what ranks last agreed on.

        False if what they have in common was changing all the time that it waited.
        """
        state, checkpoints = self.state, self.checkpoints
        if not checkpoints or not state.has_synced:
            return True

        def is_kept(number: int) -> bool:
            """Say whether this term's is: it also has what is this rank's own, which a later count is not worth."""
            kept = checkpoints.glance(number)
            return kept is not None and kept["agreed"]["version"][0] == state.version().term

        if writing := self._writing:
            wait([writing[2]])
        with state.unchanging(patience_s) as is_whole:
            if not is_whole:
                return False
            inside = state.strategy.cut_short
            number = self._number(inside=inside)
            if is_kept(number) or (not inside and is_kept(number + 1)):
                return True
            saved = state.whole() if inside else {"agreed": state.agreed_state(), "own": None}
            saved = copy.deepcopy({"settings": self.settings, **saved})
        checkpoints.save(number, saved, unless=lambda: is_kept(number))
        return True


# What must stay as it was when a run is resumed. Epochs, hosts and devices may change.


def fixed_settings(strategy: Strategy, sampler: Sampler) -> dict[str, Any]:
    """Return the settings by name, as a checkpoint gives them back. Looks at the data."""
    parameters = strategy.parameters
    values = {f.name: _plain(getattr(strategy.config, f.name)) for f in dataclasses.fields(strategy.config)}
    model = {"trained parameters": parameters.layout(), "frozen weights": parameters.frozen_digest()}
    settings = {"strategy": type(strategy).__name__, **values, **model, **sampler.fixed_settings()}
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def check_settings(were: dict[str, Any], are: dict[str, Any], where: object) -> None:
    """Raise CheckpointError that names the differences."""

    def change(name: str, was: Any, now: Any) -> str:
        if name == "version":
            return "another version of this program planned its steps"
        if isinstance(was, int) and isinstance(now, int) and max(abs(was), abs(now)) > 2**31:  # hashes
            return f"its {name} differ"
        return f"{name} was {was}, and is {now}"

    other = [name for name in {**were, **are} if json.dumps(were.get(name)) != json.dumps(are.get(name))]
    if other:
        told = "; ".join(change(name, were.get(name), are.get(name)) for name in other)
        raise CheckpointError(
            f"{where} belongs to a run with other settings: {told}. Set them back, or start a new run in another folder"
        )


def _plain(value: Any) -> Any:
    """Return a setting as JSON can hold it: of a class or function its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "settings"):  # a module of a composition
            settings = value.settings()
        else:
            settings = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **{name: _plain(each) for name, each in settings.items()}}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, functools.partial):
        return [_plain(value.func), repr(value.args), repr(sorted(value.keywords.items()))]
    if callable(value):
        named = hasattr(value, "__qualname__")
        return f"{value.__module__}.{value.__qualname__}" if named else type(value).__qualname__
    return value


@dataclass(frozen=True, kw_only=True)
class Synced:
    """received: this rank was given the state of the others. checkpoint: agreements of the one that they begin from.

    exactly: this rank goes on as if nothing had happened, its inner optimizer included. term: of what comes now.
    fingerprint: of the state that all have now; 0 if it was not asked for.
    """

    term: int
    fingerprint: int
    received: bool = False
    checkpoint: int | None = None
    exactly: bool = False


MUST_MATCH = (
    "the layout of what is trained: all must build the same model and freeze the same parts",
    "the weights that stay as they are: the hosts have other base models",
    "the data, the number of steps or what decides about batches",
)


@dataclass(frozen=True)
class _Report:
    """The report of one rank to the others."""

    fixed_fingerprints: list[int]
    version: Version
    fingerprint: int
    is_damaged: bool
    offers: list[Offer]

    SIZE = len(MUST_MATCH) + 4 + 4 * MOST

    @classmethod
    def of(cls, state: NodeState, saved: SavedStates, *, fingerprint: bool) -> _Report:
        offers, is_damaged = saved.offers()
        value = state.fingerprint_of(state.agreed_state()) if fingerprint else 0
        return cls(state.fixed_fingerprints(), state.version(), value, is_damaged, sorted(offers)[-MOST:])

    def numbers(self) -> list[int]:
        offers = [number for offer in self.offers for number in (*offer.version, offer.fingerprint, offer.number)]
        head = [*self.fixed_fingerprints, *self.version, self.fingerprint, int(self.is_damaged)]
        return [*head, *offers, *[NONE] * (self.SIZE - len(head) - len(offers))]

    @classmethod
    def read(cls, numbers: list[int]) -> _Report:
        count = len(MUST_MATCH)
        term, changes, fingerprint, is_damaged, *rest = numbers[count:]
        quads = [rest[at : at + 4] for at in range(0, len(rest), 4)]
        offers = [Offer(Version(a, b), value, number) for a, b, value, number in quads if number != NONE]
        return cls(numbers[:count], Version(term, changes), fingerprint, bool(is_damaged), offers)


def sync_state(comm: Comm, state: NodeState, saved: SavedStates) -> Synced:
    """Bring all ranks of a new group to one state; each calls this. Raises PeerLost, RanksDiverged, CheckpointError."""
    mine = _Report.of(state, saved, fingerprint=comm.world_size > 1 and not comm.continues_round)
    reports = [_Report.read(numbers.tolist()) for numbers in comm.all_gather(torch.tensor(mine.numbers()))]
    for name, report in zip(comm.members, reports, strict=True):
        ours = reports[comm.rank].fixed_fingerprints
        for what, number, theirs in zip(MUST_MATCH, ours, report.fixed_fingerprints, strict=True):
            if number != theirs:
                raise RanksDiverged(f"{name} and {comm.members[comm.rank]} do not share {what}")
    newest = max(report.version for report in reports)
    offered = max((offer.version for report in reports for offer in report.offers), default=NOT_BEGUN)
    if offered > newest:
        return _begin_from_checkpoints(comm, state, saved, reports, offered)
    damaged = [name for name, report in zip(comm.members, reports, strict=True) if report.is_damaged]
    if newest == NOT_BEGUN and damaged:
        raise CheckpointError(f"all checkpoints are damaged: {', '.join(damaged)}")
    # At the beginning nobody has a version yet, and rank 0's weights are everybody's.
    states = [(report.version, report.fingerprint) for report in reports]
    source = next(n for n, report in enumerate(reports) if report.version == newest)
    others = [n for n, other in enumerate(states) if other != states[source]]
    received = _hand_over(comm, state, source, others)
    return Synced(received=received, term=max(newest.term, FIRST_TERM), fingerprint=reports[source].fingerprint)


def _begin_from_checkpoints(
    comm: Comm, state: NodeState, saved: SavedStates, reports: list[_Report], newest: Version
) -> Synced:
    """Nobody remembers anything as new as these."""
    term = max(version.term for r in reports for version in (r.version, *(o.version for o in r.offers))) + 1
    best = next(o for report in reports for o in reversed(report.offers) if o.version == newest)
    common = set.intersection(*({offer.state for offer in report.offers} for report in reports))
    if common:
        chosen = [max(o for o in report.offers if o.state == max(common)) for report in reports]
        # For what is each rank's own no more than one agreement is given up.
        if state.strategy.divides_model or best.number // 2 - chosen[0].number // 2 <= 1:
            inside = any(offer.number % 2 for offer in chosen)
            exactly = saved.load(chosen[comm.rank], exactly=True, inside=inside)
            return Synced(
                term=term, fingerprint=chosen[0].fingerprint, checkpoint=chosen[0].number // 2, exactly=exactly
            )
    if state.strategy.divides_model:
        raise CheckpointError("there is no step of which all stages of the model have a checkpoint: start a new run")
    own = [max((o for o in report.offers if o.state == best.state), default=None) for report in reports]
    others = [n for n, offer in enumerate(own) if offer is None]
    if mine := own[comm.rank]:
        saved.load(mine, exactly=False, inside=False)
    source = next(n for n, offer in enumerate(own) if offer)
    received = _hand_over(comm, state, source, others)
    return Synced(received=received, checkpoint=best.number // 2, term=term, fingerprint=best.fingerprint)


def _hand_over(comm: Comm, state: NodeState, source: int, receivers: list[int]) -> bool:
    """Give the agreed state of rank `source` to the others that need it. True on those."""
    if comm.rank in receivers:
        state.load_agreed_state(receive_state(comm, source))
        return True
    if comm.rank == source:
        for receiver in receivers:
            send_state(comm, state.agreed_state(), receiver)
    return False


def share_moments(comm: Comm, state: NodeState) -> None:
    """Hand on what ranks have divided among them of an optimizer's state, once all have come to one state.

    What no rank has is given up. Nobody lets go of anything before all have voted: see ShardedOptimizer.keep_own.
    """
    sharded, received = state.strategy.sharded, {}
    if sharded is None:
        return
    mine = torch.tensor([block in sharded.held for block in range(len(sharded))], dtype=torch.uint8)
    holders = torch.stack(comm.all_gather(mine))  # [ranks, blocks]
    for block in range(len(sharded)):
        owner, having = sharded.owner(block), holders[:, block].nonzero().flatten().tolist()
        if not having or owner in having:
            continue
        if comm.rank == having[0]:
            send_state(comm, {"of_block": sharded.block_state(block)}, owner)
        elif comm.rank == owner:
            received[block] = receive_state(comm, having[0])["of_block"]
    with state.changing():
        for block, kept in received.items():
            sharded.load_block(block, kept)
        sharded.lost = (1 - holders.amax(0).float()).mean().item() if state.strategy.steps else 0.0


def remove_drift(comm: Comm, state: NodeState) -> float | None:
    """Take on the same weights on all ranks, right after an agreement.

    They are rank 0's where weights differ by rounding, the mean where the strategy lets them differ. Returns how
    far apart this rank's were, None if all are equal.
    """
    own = state.strategy.agreed_weights()
    taken = common_weights(comm, state, own)
    if taken is None:
        return None
    apart = (taken - own).abs().max().item()
    state.take_weights(taken)
    return apart


def common_weights(comm: Comm, state: NodeState, own: torch.Tensor) -> torch.Tensor | None:
    """Return the weights [numel] that ranks with weights `own` should have in common; None if all are equal."""

    def compare() -> torch.Tensor | None:
        digests = [int(value) for value in comm.all_gather(torch.tensor([digest(own)]))]
        if all(value == digests[0] for value in digests):
            return None
        if state.strategy.differs:
            return state.strategy.consensus()
        taken = own.clone()
        comm.broadcast_(taken)
        return taken

    alone = comm.world_size == 1 or state.strategy.divides_model
    return None if alone else comm.commit_together(DRIFT_CHECK, compare)


def send_state(comm: Comm, state: dict[str, Any], to: int) -> None:
    """Send a `state` as for Checkpoints.save. Nothing on the way is pickled."""
    tensors: dict[str, torch.Tensor] = {}
    tree = to_tree(state, tensors)
    if unknown := {str(tensor.dtype) for tensor in tensors.values()} - {*DTYPES}:
        raise SettingError(f"an optimizer's state of {', '.join(sorted(unknown))} cannot be sent to another rank")
    listing = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    record = {"state": tree, "tensors": listing, "hash": _hash([_text(tree), *flats])}
    text = _text(record)
    comm.send(torch.tensor([text.numel(), sum(flat.numel() for flat in flats)]), to)
    for flat in (text, *flats):
        for piece in _pieces(flat):
            comm.send(piece.contiguous(), to)
            comm.alive()


def receive_state(comm: Comm, source: int) -> dict[str, Any]:
    """Receive a state. Raises PeerLost if what arrives is not what was sent; checks sizes before it takes memory."""

    def receive(count: int) -> torch.Tensor:
        flat = torch.empty(count, dtype=torch.uint8)
        for piece in _pieces(flat):
            comm.recv(piece, source)
            comm.alive()
        return flat

    sizes = torch.zeros(2, dtype=torch.int64)
    comm.recv(sizes, source)
    text_size, total = sizes.tolist()
    if not (0 < text_size < PIECE and 0 <= total < 2**40):
        raise PeerLost(f"rank {source} sent a state of an impossible size ({text_size} and {total} bytes)")
    try:
        record = json.loads(bytes(receive(text_size).numpy()))
        tensors: dict[str, torch.Tensor] = {}
        flats: list[torch.Tensor] = []
        for name, dtype, shape in record["tensors"]:
            count = torch.Size(shape).numel() * DTYPES[dtype].itemsize
            if count > total - sum(flat.numel() for flat in flats):
                raise ValueError("larger than announced")
            flats.append(receive(count))
            tensors[name] = flats[-1].view(DTYPES[dtype]).reshape(shape)
        if _hash([_text(record["state"]), *flats]) != record["hash"]:
            raise ValueError("another hash")
        state: dict[str, Any] = from_tree(record["state"], tensors)
        return state
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise PeerLost(f"the state that rank {source} sent arrived damaged: {error}") from error


def _pieces(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(PIECE) if flat.numel() else ()


def _text(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _hash(flats: list[torch.Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for flat in flats:
        hasher.update(flat.contiguous().numpy().data)
    return hasher.hexdigest()
