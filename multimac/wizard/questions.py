"""Asks questions on the terminal, or answers them from a file. Esc and Ctrl-C both raise KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from whisper_tuner.errors import ConfigError, TunerError
from whisper_tuner.settings import FALSE, TRUE, nearest

from .answers import IF_NEEDED, KEYS

OTHER = "\0other"
Check = Callable[[str], object]  # raises ValueError or TunerError for an impossible answer


@dataclass(frozen=True, kw_only=True)
class Option:
    """`short` stays on the screen once the option is chosen; `unfit` says why it cannot be chosen."""

    value: str
    title: str
    short: str = ""
    unfit: str = ""


def anything(text: str) -> None:
    """The check that accepts every answer."""


class Questions(Protocol):
    """`taken` holds each answer by its key, in the order of the questions."""

    taken: dict[str, str]
    interactive: bool

    def select(
        self,
        key: str,
        message: str,
        options: Sequence[Option],
        default: str,
        *,
        other: str = "",
        check: Check = anything,
    ) -> str:
        """The value of one of the options or, with `other` (its title), a text that passes `check`."""

    def text(self, key: str, message: str, default: str, check: Check = anything) -> str: ...

    def confirm(self, key: str, message: str, default: bool) -> bool: ...

    def again(self, message: str, options: Sequence[Option], error: TunerError) -> str:
        """Ask what to do after `error`, which is on the screen; without a person it is raised."""

    def finish(self) -> None:
        """Raises ConfigError for an answer to a question that was never asked."""


class FromFile:
    interactive = False

    def __init__(self, path: Path, answers: Mapping[str, str]):
        self.path, self.answers = path, answers
        self.taken: dict[str, str] = {}

    def select(self, key, message, options, default, *, other="", check=anything) -> str:
        known = {option.value: option for option in options}
        answer = self._take(key, default)
        if answer in known:
            if known[answer].unfit:
                raise self._impossible(key, known[answer].unfit)
        elif other:
            self._check(key, answer, check)
        else:
            raise self._impossible(key, f"expected one of {', '.join(known)}{nearest(answer, known)}")
        return answer

    def text(self, key, message, default, check=anything) -> str:
        answer = self._take(key, default)
        self._check(key, answer, check)
        return answer

    def confirm(self, key, message, default) -> bool:
        answer = self._take(key, "yes" if default else "no").lower()
        if answer not in TRUE | FALSE:
            raise self._impossible(key, "expected yes or no")
        return answer in TRUE

    def again(self, message, options, error) -> str:
        raise error

    def finish(self) -> None:
        for key in self.answers:
            if key not in self.taken and key not in IF_NEEDED:
                raise ConfigError(
                    f"{self.path}: {key} was answered, but with the other answers it is not asked",
                    remedy=f"Leave it out. It means: {KEYS[key]}.",
                )

    def _take(self, key: str, default: str) -> str:
        self.taken[key] = str(self.answers.get(key, default)).strip()
        return self.taken[key]

    def _check(self, key: str, answer: str, check: Check) -> None:
        try:
            check(answer)
        except ValueError as error:
            raise self._impossible(key, str(error)) from None
        except TunerError as error:
            raise self._impossible(key, str(error), error.exit_status) from None

    def _impossible(self, key: str, reason: str, status=None) -> ConfigError:
        given = key in self.answers
        what = f"{key} = {self.taken[key]}" if given else f"{key} is missing, and it has no default"
        error = ConfigError(f"{self.path}: {what}: {reason}", remedy=f"{key}: {KEYS[key]}.")
        error.exit_status = status or error.exit_status
        return error


class OnTerminal:
    interactive = True

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}

    def select(self, key, message, options, default, *, other="", check=anything) -> str:
        extra = [Option(value=OTHER, title=other)] if other else []
        answer = self._pick(message, [*options, *extra], default)
        if answer == OTHER:
            return self.text(key, f"{other}:", "", check)
        self.taken[key] = answer
        return answer

    def text(self, key, message, default, check=anything) -> str:
        import questionary

        def valid(answer: str) -> bool | str:
            try:
                check(answer.strip())
            except (ValueError, TunerError) as error:
                return " ".join(str(error).split())
            return True

        answer = _ask(questionary.text(message, default=default, validate=valid, qmark="?")).strip()
        self.taken[key] = answer
        return answer

    def confirm(self, key, message, default) -> bool:
        import questionary

        answer = _ask(questionary.confirm(message, default=default))
        self.taken[key] = "yes" if answer else "no"
        return answer

    def again(self, message, options, error) -> str:
        return self._pick(message, options, options[0].value)

    def finish(self) -> None:
        pass

    def _pick(self, message: str, options: Sequence[Option], default: str) -> str:
        import questionary

        choices = [questionary.Choice(o.title, value=o.value, disabled=o.unfit or None) for o in options]
        fit = [choice for choice in choices if not choice.disabled]
        chosen = next((choice for choice in fit if choice.value == default), fit[0])
        question = questionary.select(message, choices=choices, default=chosen, instruction=" ")
        question.application.erase_when_done = True
        answer = _ask(question)
        short = next(o.short or o.title for o in options if o.value == answer)
        questionary.print(f"? {message} ", style="bold", end="")
        questionary.print(short, style="fg:#FF9D00 bold")
        return answer


def _ask(question):
    """Bind Esc like Ctrl-C. Not eagerly: on a Mac, Option and an arrow key begin with an Esc, too."""
    from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

    bindings = KeyBindings()

    @bindings.add("escape")
    def _(event) -> None:
        event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    application = question.application
    application.key_bindings = merge_key_bindings([application.key_bindings, bindings])
    application.ttimeoutlen, application.timeoutlen = 0.1, 0.3
    return question.unsafe_ask()
