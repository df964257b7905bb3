"""A rank's checkpoints as its training loop uses them: what it can begin from, and what it keeps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError
from exogym.samplers.elastic import Sampler
from exogym.state.checkpoint import Checkpoints
from exogym.state.node_state import NodeState
from exogym.state.position import NOT_BEGUN, Offer, Version
from exogym.strategy.strategy import Strategy

RESCUE_S = 5.0  # that a rescue waits for the end of a change


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

    def offers(self) -> list[Offer]:
        """Read once: each look hashes gigabytes. Raises CheckpointError for those of another run, or of another version
        of this program.
        """
        if not self._may_load():
            return []
        if self._kept is None:
            self._kept = self._undamaged()
        return self._kept

    def is_damaged(self) -> bool:
        """Say whether there are checkpoints of which none is good."""
        return self._may_load() and not self.offers() and bool(self.checkpoints.numbers())

    def load(self, offer: Offer, *, exactly: bool, inside: bool) -> bool:
        """Begin from it. exactly: all ranks begin from the same one; inside: some of them inside a round.

        False if it has nothing of this rank's own.
        """
        saved = self.checkpoints.load(offer.number)
        self.state.load_whole(saved, exactly=exactly, inside=inside, members=self.comm.members)
        return saved["own"] is not None and exactly and (self.state.is_mid_round or offer.number % 2 == 0)

    def _may_load(self) -> bool:
        """Say whether checkpoints may be loaded: a rank that has begun remembers more than is on the disk."""
        return bool(self.checkpoints) and self._resume and self.state.version() == NOT_BEGUN

    def _undamaged(self) -> list[Offer]:
        found, settings = [], self.settings
        for number in self.checkpoints.numbers():
            self.comm.alive()
            with contextlib.suppress(CheckpointError):
                saved = self.checkpoints.load(number)
                agreed, settings = saved["agreed"], _with_defaults(saved["settings"], self.state.strategy)
                found.append(Offer(Version(*agreed["version"]), self.state.fingerprint_of(agreed), number))
        check_settings(settings, self.settings, self.checkpoints.folder)
        if not found and (formats := self.checkpoints.other_formats()):
            what = f"checkpoints of another version of this program (format {formats[0]})"
            raise CheckpointError(f"{self.checkpoints.folder} has {what}: resume with it, or start a new run")
        return found

    # What it keeps.

    def _number(self, *, inside: bool) -> int:
        """Number a state; one inside a round is later than the agreement before it, and earlier than the next."""
        return 2 * self.state.strategy.agreements + inside

    def save(self, *, at_once: bool = False) -> None:
        """Save all of the state, in the background unless at_once."""
        if not self.checkpoints:
            return
        self.note_written(at_once=True)
        whole = {"settings": self.settings, **self.state.whole()}
        number = self._number(inside=self.state.is_ahead or self.state.strategy.cut_short)
        writing = self.checkpoints.save_in_background(number, whole)
        self._writing = (self.state.strategy.agreements, time.perf_counter(), writing)
        self.note_written(at_once=at_once)

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
        state = self.state
        if not self.checkpoints or not state.has_synced:
            return True
        if writing := self._writing:
            wait([writing[2]])
        with state.unchanging(patience_s) as is_whole:
            if not is_whole:
                return False
            inside = state.strategy.cut_short
            number = self._number(inside=inside)
            if self._is_kept(number) or (not inside and self._is_kept(number + 1)):
                return True
            saved = state.whole() if inside else {"agreed": state.agreed_state(), "own": None}
            saved = copy.deepcopy({"settings": self.settings, **saved})
        self.checkpoints.save(number, saved, unless=lambda: self._is_kept(number))
        return True

    def _is_kept(self, number: int) -> bool:
        """Say whether this term's is kept: it also has what is this rank's own, which a later count is not worth."""
        kept = self.checkpoints.glance(number)
        return kept is not None and kept["agreed"]["version"][0] == self.state.version().term


# What must stay as it was when a run is resumed. Epochs, hosts and devices may change.


def fixed_settings(strategy: Strategy, sampler: Sampler) -> dict[str, Any]:
    """Return the settings by name, as a checkpoint gives them back. Looks at the data."""
    parameters = strategy.parameters
    values = {f.name: _plain(getattr(strategy.config, f.name)) for f in dataclasses.fields(strategy.config)}
    model = {"trained parameters": parameters.layout(), "frozen weights": parameters.frozen_digest()}
    settings = {"strategy": type(strategy).__name__, **values, **model, **sampler.fixed_settings()}
    return json.loads(json.dumps(settings, default=str))


def _with_defaults(were: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Add the defaults of settings that an older version did not have yet: it did what they do."""
    if were["strategy"] != type(strategy).__name__:
        return were
    known = [f for f in dataclasses.fields(strategy.config) if f.default is not dataclasses.MISSING]
    return {f.name: _plain(f.default) for f in known} | were


def check_settings(were: dict[str, Any], are: dict[str, Any], where: object) -> None:
    """Raise CheckpointError that names the differences."""
    other = [name for name in {**were, **are} if json.dumps(were.get(name)) != json.dumps(are.get(name))]
    if other:
        told = "; ".join(_change(name, were.get(name), are.get(name)) for name in other)
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


def _change(name: str, was: Any, now: Any) -> str:
    if name == "version":
        return "another version of this program planned its steps"
    if isinstance(was, int) and isinstance(now, int) and max(abs(was), abs(now)) > 2**31:  # hashes
        return f"its {name} differ"
    return f"{name} was {was}, and is {now}"
