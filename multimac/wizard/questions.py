"""Asks questions on the terminal, or answers them from a file. Esc and Ctrl-C raise KeyboardInterrupt, Shift-Tab Back.

To go back a question, the wizard starts again and takes all before it from the Journal of what was asked and done.
A file of answers is JSON (one object) or INI (one section [answers]).
"""

from __future__ import annotations

import configparser
import json
import re
import signal
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import questionary
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

from exogym.config import FALSE, TRUE, nearest
from multimac.view.terminal import Console
from whisper_tuner.config import IniParser
from whisper_tuner.errors import ConfigError, TunerError
from whisper_tuner.files import write_atomically
from whisper_tuner.interrupts import calling
from whisper_tuner.text import is_unicode, parse_json

T = TypeVar("T")
E = TypeVar("E", "Asked", "Done")
FAILURES = (TunerError, OSError, ValueError)  # outcomes of what is done once
SECTION = "answers"
EXAMPLE = "The wizard's --save-answers FILE writes a correct one."
# Every question that can be answered from a file. A missing answer takes the default that the question shows.
KEYS = {
    "model": "name of a [model:NAME], a published size by hub id (openai/whisper-small), or a folder",
    "data": "name of a [dataset:NAME], or the path of a manifest or folder (validation and test are found beside it)",
    "audio_column": "column of the names of recordings, where several may be it; without a header, its number",
    "text_column": "column of the texts, likewise",
    "import": "folder for the clips, where audio has to be cut, as with subtitles",
    "outside": "yes or no: use files that lie outside of what is imported",
    "split": "yes or no: split off validation and test clips where there are none",
    "language": "language of the speech, for multilingual models: a code, a locale or an English name",
    "english_only": "yes or no: train an English-only model on another language; asked of a person alone",
    "method": "full, lora or decoder",
    "epochs": "passes over the training clips",
    "learning_rate": "peak learning rate",
    "batch_size": "clips per step, of all hosts together",
    "keep_best": "yes or no: the model of the best epoch by validation; stop after three that are no better",
    "where": "alone (this machine), hosts (those of distributed_hosts.json), or new (others, or there is no such file)",
    "workers": "addresses of the other machines, with commas between them",
    "ssh_user": "user name on the other machines; empty: ssh decides",
    "ssh_key_path": "private key for them; empty: ssh decides",
    "master": "this machine's address, as the others see it",
    "setup": "yes or no: run `hosts setup` where an environment is missing or differs",
    "probe": "yes or no: measure each machine with a few training steps",
    "together": "yes or no: train on all of them, after the preflight",
    "strategy": "diloco or allreduce",
    "communication_interval": "steps in a round (diloco)",
    "name": "name of the profile to save",
    "overwrite": "yes or no: replace sections of that name",
    "start": "now, or later (only save)",
}
# Whether these are asked depends on the machines, so an answer that was not needed is no mistake.
IF_NEEDED = {
    "audio_column",
    "text_column",
    "import",
    "outside",
    "language",
    "english_only",
    "keep_best",
    "setup",
    "overwrite",
    "master",
    "together",
}
JSON = re.compile(r'\s*(\{|\[\s*["\[{\]])')  # an object or a list; an INI file may begin with [answers]
OTHER = "\0other"
Check = Callable[[str], object]  # raises OSError, ValueError or TunerError for an impossible answer; `str` accepts all


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
    value: Any = None
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

    def _next(self, kind: type[E], what: object) -> E | None:
        """Return the entry that comes next in this pass, if it is this one."""
        if self._at == len(self._entries):
            return None
        entry = self._entries[self._at]
        if isinstance(entry, kind) and entry.what == what:
            self._at += 1
            return entry
        self._undone += self._entries[self._at :]  # something else has changed since, such as a file
        del self._entries[self._at :]
        return None

    def _fitting(self, kind: type[E], what: object) -> list[E]:
        return [entry for entry in self._undone if isinstance(entry, kind) and entry.what == what]

    def _add(self, entry: Asked | Done) -> None:
        """Add an entry; a question that is asked once more in this pass, or what is tried again, begins afresh."""
        self._undone = [one for one in self._undone if type(one) is not type(entry) or one.what != entry.what]
        self._entries.append(entry)
        self._at = len(self._entries)

    def _tried(self, what: tuple[str, object], do: Callable[[], T], *, for_good: bool) -> Done:
        try:
            return Done(what=what, value=do(), for_good=for_good)
        except FAILURES as error:
            return Done(what=what, error=error, for_good=for_good)


@dataclass(frozen=True, kw_only=True)
class Option:
    """`short` stays on the screen once the option is chosen; `unfit` says why it cannot be chosen."""

    value: str
    title: str
    short: str = ""
    unfit: str = ""


class Back(Exception):
    """The user wants the question before this one."""


class Questions(Journal):
    """Asks a person, or takes what `answers` or the file at `path` says, and else the default.

    place: what stands before a key in messages. earlier: answers of a person who left, which are suggested again.
    taken: each answer by its key, in the order of the questions. cut: folders into which clips were written meanwhile.
    The console is quiet while answers are taken from the journal: all that would be printed is on the screen already.
    """

    def __init__(
        self,
        path: Path | None = None,
        console: Console | None = None,
        *,
        answers: Mapping[str, str] | None = None,
        earlier: Mapping[str, str] | None = None,
        place: str = "",
    ):
        super().__init__()
        self.path, self.interactive = path, path is None and answers is None
        self.place = f"{path}: " if path else place
        self.answers = load_answers(path) if path else dict(answers or {})
        self.earlier = dict(earlier or {})
        self.taken: dict[str, str] = {}
        self.cut: list[Path] = []
        self._console = console or Console()

    @property
    def asks_nobody(self) -> bool:
        """Tell whether all answers were given with the command, so that nobody has looked at them."""
        return not self.interactive and self.path is None

    def go_back(self) -> None:
        """Answer the same questions as before from here on, up to the one before the last."""
        super().go_back()
        self.taken.clear()
        self._console.quiet = True

    def _tried(self, what: tuple[str, object], do: Callable[[], Any], *, for_good: bool) -> Done:
        self._console.quiet = False
        return super()._tried(what, do, for_good=for_good)

    def select(
        self, key: str, message: str, options: Sequence[Option], default: str, other: str = "", check: Check = str
    ) -> str:
        """Return the value of one of the options or, with `other` (its title), a text that passes `check`."""
        if not self.interactive:
            return self._read(key, default, lambda answer: _check_option(answer, options, check if other else None))
        extra = [Option(value=OTHER, title=other)] if other else []
        if (earlier := self.earlier.get(key, "")) in [option.value for option in options]:
            default = earlier
        elif earlier and other and not _refused(check, earlier):
            default = OTHER
        answer = self._pick(message, [*options, *extra], default)
        if answer == OTHER:
            return self.text(key, f"{other}:", "", check)
        self.taken[key] = answer
        return answer

    def text(self, key: str, message: str, default: str, check: Check = str) -> str:
        if not self.interactive:
            return self._read(key, default, check)

        def valid(answer: str) -> bool | str:
            return _refused(check, answer.strip()) or True

        def ask(suggested: str) -> str:
            return self._ask(questionary.text(message, default=suggested, validate=valid)).strip()

        self.taken[key] = self.answer(message, self.earlier.get(key, default), ask)
        return self.taken[key]

    def confirm(self, key: str, message: str, default: bool) -> bool:
        def check(answer: str) -> None:
            if answer.lower() not in TRUE | FALSE:
                raise ValueError("expected yes or no")

        def ask(suggested: str) -> str:
            asked = questionary.confirm(message, default=suggested == "yes", auto_enter=False)
            return "yes" if self._ask(asked) else "no"

        usual = "yes" if default else "no"
        if self.interactive:
            self.taken[key] = self.answer(message, self.earlier.get(key, usual), ask)
        else:
            self._read(key, usual, check)
        return self.taken[key].lower() in TRUE

    def again(self, message: str, options: Sequence[Option], error: TunerError) -> str:
        """Show an error, and ask what to do; without a person it is raised."""
        if not self.interactive:
            raise error
        self._console.print(error.told, style="red", soft_wrap=True)
        return self._pick(message, options, options[0].value, lasting=False)

    def finish(self) -> None:
        """Raise ConfigError for an answer to a question that was never asked."""
        for key in self.answers:
            if key not in self.taken and key not in IF_NEEDED:
                what = f"{self.place}{key} was answered, but with the other answers it is not asked"
                raise ConfigError(what, remedy=f"Leave it out. It means: {KEYS[key]}.")

    def _read(self, key: str, default: str, check: Check) -> str:
        answer = self.taken[key] = self.answers.get(key, default).strip()
        try:
            check(answer)
        except (OSError, ValueError, TunerError) as error:
            what = f"{key} = {answer}" if answer else f"{key} is missing, and it has no default"
            wrong = ConfigError(f"{self.place}{what}: {error}", remedy=f"{key}: {KEYS[key]}.")
            wrong.exit_status = getattr(error, "exit_status", wrong.exit_status)
            raise wrong from None
        return answer

    def _pick(self, message: str, options: Sequence[Option], default: str, *, lasting: bool = True) -> str:
        def ask(suggested: str) -> str:
            fit = [option.value for option in options if not option.unfit]
            choices = [questionary.Choice(o.title, value=o.value, disabled=o.unfit or None) for o in options]
            chosen = next(value for value in (suggested, default, fit[0]) if value in fit)
            question = questionary.select(message, choices=choices, default=chosen, instruction=" ")
            question.application.erase_when_done = True
            answer = self._ask(question)
            short = next(o.short or o.title for o in options if o.value == answer)
            questionary.print(f"? {message} ", style="bold", end="")
            questionary.print(short, style="fg:#FF9D00 bold")
            return answer

        return self.answer(message, default, ask, lasting=lasting)

    def _ask(self, question: questionary.Question) -> Any:
        self._console.quiet = False
        return _answer(question, can_go_back=self.can_go_back)


def drop_typed() -> None:
    """Forget keys that were typed during a wait: they were not meant for the question after it."""
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _refused(check: Check, answer: str) -> str:
    """Return why an answer is impossible, without the remedy, since there is one line for it; "" if it is not."""
    try:
        check(answer)
    except (OSError, ValueError, TunerError) as error:
        return str(error).partition("\n")[0]
    return ""


def _check_option(answer: str, options: Sequence[Option], check_other: Check | None) -> None:
    chosen = next((option for option in options if option.value == answer), None)
    if chosen and chosen.unfit:
        raise ValueError(chosen.unfit)
    if not chosen and check_other:
        check_other(answer)
    elif not chosen:
        known = [option.value for option in options]
        raise ValueError(f"expected one of {', '.join(known)}{nearest(answer, known)}")


def _answer(question: questionary.Question, *, can_go_back: bool) -> Any:
    bindings = KeyBindings()

    # Not bound eagerly: on a Mac, Option and an arrow key begin with an Esc, too.
    @bindings.add("escape")
    def _(event) -> None:
        event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @bindings.add("s-tab")
    def _(event) -> None:
        if can_go_back:
            event.app.erase_when_done = True
            event.app.exit(exception=Back)

    application = question.application
    assert application.key_bindings is not None  # questionary's own
    application.key_bindings = merge_key_bindings([application.key_bindings, bindings])
    application.ttimeoutlen, application.timeoutlen = 0.1, 0.3

    was_ended = False

    def end() -> None:
        nonlocal was_ended
        was_ended = True
        if not (application.is_running and application.loop):
            raise KeyboardInterrupt
        # An exception that is raised here within its event loop may be lost.
        application.loop.call_soon_threadsafe(
            lambda: None if application.is_done else application.exit(exception=KeyboardInterrupt)
        )

    with calling(end, signal.SIGHUP, signal.SIGTERM):
        answer = question.unsafe_ask()
    if was_ended:  # just after the answer
        raise KeyboardInterrupt
    return answer


def load_answers(path: Path) -> dict[str, str]:
    """Read a file of answers. Raises ConfigError for one that cannot be read, and for an unknown key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = parse_json(text) if JSON.match(text) else _from_ini(path, text)
    except json.JSONDecodeError as error:
        what = f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})"
        raise ConfigError(what, remedy=f"Look for a comma, quote or bracket there. {EXAMPLE}") from None
    except (OSError, ValueError, configparser.Error) as error:
        reason = " ".join(str(getattr(error, "strerror", error)).split())
        remedy = f"--answers names a file of UTF-8 text. {EXAMPLE}"
        raise ConfigError(f"{path}: cannot be read: {reason}", remedy=remedy) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the file must hold one object: {{...}}", remedy=EXAMPLE)
    for key in values:
        if key not in KEYS:
            what = f"{path}: unknown key {key!r}{nearest(key, KEYS)}"
            raise ConfigError(what, remedy=f"Known keys: {', '.join(KEYS)}.")
    texts = {}
    for key, value in values.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = ", ".join(value)
        if not isinstance(value, str | int | float) or not is_unicode(str(value)):
            raise ConfigError(f"{path}: {key}: expected a text or a number", remedy=f"{key}: {KEYS[key]}.")
        texts[key] = str(value)
    return texts


def write_answers(path: Path, answers: Mapping[str, str]) -> None:
    """Write JSON where the name ends in .json, else INI."""
    if path.suffix.lower() == ".json":
        text = json.dumps(dict(answers), indent=2, ensure_ascii=False) + "\n"
    else:
        text = f"[{SECTION}]\n" + "".join(f"{key} = {value}\n" for key, value in answers.items())
    write_atomically(path, text)


def _from_ini(path: Path, text: str) -> dict[str, str]:
    parser = IniParser(interpolation=None, default_section="")
    parser.read_string(text, source=path.name)
    if parser.sections() != [SECTION]:
        raise ValueError(f"expected one section [{SECTION}], found: {', '.join(parser.sections()) or 'none'}")
    return dict(parser.items(SECTION))
