"""What was asked and done so far. To go back a question, the wizard starts again and takes from here all before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from whisper_tuner.errors import TunerError

T = TypeVar("T")
FAILURES = (TunerError, OSError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and its answer. what: the question's words. lasting: whether one may go back to it."""

    what: str
    default: str
    answer: str
    lasting: bool = True


@dataclass(frozen=True, kw_only=True)
class Done:
    """Something that took time. what: its name, and all that decides its outcome. for_good: it cannot be undone."""

    what: tuple[str, object]
    value: object = None
    error: Exception | None = None
    for_good: bool = False


class Journal:
    """The wizard asks and does the same in each pass; what stands here is neither asked nor done again."""

    def __init__(self) -> None:
        self._entries: list[Asked | Done] = []
        self._at = 0  # those before it were gone through in this pass
        self._undone: list[Asked | Done] = []  # by going back; the last one that fits counts

    @property
    def can_go_back(self) -> bool:
        return self._before() is not None

    def go_back(self) -> None:
        """Begin a pass that ends at the question before the one that waits."""
        place = self._before()
        self._undone += self._entries[place:]
        del self._entries[place:]
        self._at = 0

    def answer(self, what: str, default: str, ask: Callable[[str], str], *, lasting: bool = True) -> str:
        """Return the answer. ask: takes the answer to suggest, which is an earlier one if the default is the same."""
        if old := self._next(Asked, what):
            return old.answer
        earlier = self._fitting(Asked, what)
        given = ask(earlier[-1].answer if earlier and earlier[-1].default == default else default)
        self._forget(Asked, what)
        self._add(Asked(what=what, default=default, answer=given, lasting=lasting))
        return given

    def once(
        self,
        name: str,
        inputs: object,
        do: Callable[[], T],
        *,
        may_stay: Callable[[T], bool] = lambda value: True,
        for_good: bool = False,
    ) -> T:
        """Return or raise what `do` does; its outcome must follow from `inputs`, since it is kept.

        may_stay: tells whether an outcome still counts after its question is asked again.
        """
        what = (name, inputs)
        old = self._next(Done, what)
        if old is None:
            earlier = [one for one in self._fitting(Done, what) if not one.error and may_stay(one.value)]
            old = earlier[-1] if earlier else self._tried(what, do, for_good=for_good)
            self._forget(Done, what)
            self._add(old)
        if old.error:
            raise old.error
        return old.value

    def _before(self) -> int | None:
        """Find the question to which one goes back: not one whose answer was carried out for good."""
        carried_out = False
        for place in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[place]
            if isinstance(entry, Done):
                carried_out = carried_out or entry.for_good
            elif carried_out:
                carried_out = False
            elif entry.lasting:
                return place
        return None

    def _next(self, kind: type, what: object) -> Asked | Done | None:
        if self._at == len(self._entries):
            return None
        entry = self._entries[self._at]
        if isinstance(entry, kind) and entry.what == what:
            self._at += 1
            return entry
        self._undone += self._entries[self._at :]  # something else has changed since, such as a file
        del self._entries[self._at :]
        return None

    def _fitting(self, kind: type, what: object) -> list[Asked | Done]:
        return [entry for entry in self._undone if isinstance(entry, kind) and entry.what == what]

    def _forget(self, kind: type, what: object) -> None:
        """A question that is asked once more in this pass, or what is tried again, begins afresh."""
        self._undone = [entry for entry in self._undone if not (isinstance(entry, kind) and entry.what == what)]

    def _add(self, entry: Asked | Done) -> None:
        self._entries.append(entry)
        self._at = len(self._entries)

    def _tried(self, what: tuple[str, object], do: Callable[[], T], *, for_good: bool) -> Done:
        try:
            return Done(what=what, value=do(), for_good=for_good)
        except FAILURES as error:
            return Done(what=what, error=error, for_good=for_good)
