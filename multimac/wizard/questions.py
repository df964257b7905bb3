"""Asks questions on the terminal, or answers them from a file. Esc and Ctrl-C both raise KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import questionary
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

from whisper_tuner.errors import ConfigError, TunerError
from whisper_tuner.settings import FALSE, TRUE, nearest

from .answers import IF_NEEDED, KEYS, load_answers

OTHER = "\0other"
Check = Callable[[str], object]  # raises ValueError or TunerError for an impossible answer; `str` accepts all


@dataclass(frozen=True, kw_only=True)
class Option:
    """`short` stays on the screen once the option is chosen; `unfit` says why it cannot be chosen."""

    value: str
    title: str
    short: str = ""
    unfit: str = ""


class Questions:
    """Asks a person, or takes what the file at `path` says, and else the default.

    `taken` holds each answer by its key, in the order of the questions.
    """

    def __init__(self, path: Path | None = None):
        self.path, self.interactive = path, path is None
        self.answers = load_answers(path) if path else {}
        self.taken: dict[str, str] = {}

    def select(
        self,
        key: str,
        message: str,
        options: Sequence[Option],
        default: str,
        *,
        other: str = "",
        check: Check = str,
    ) -> str:
        """The value of one of the options or, with `other` (its title), a text that passes `check`."""
        if not self.interactive:
            return self._read(key, default, lambda answer: _check_option(answer, options, check if other else None))
        extra = [Option(value=OTHER, title=other)] if other else []
        answer = _pick(message, [*options, *extra], default)
        if answer == OTHER:
            return self.text(key, f"{other}:", "", check)
        self.taken[key] = answer
        return answer

    def text(self, key: str, message: str, default: str, check: Check = str) -> str:
        if not self.interactive:
            return self._read(key, default, check)

        def valid(answer: str) -> bool | str:
            try:
                check(answer.strip())
            except (ValueError, TunerError) as error:
                return " ".join(str(error).split())
            return True

        self.taken[key] = _ask(questionary.text(message, default=default, validate=valid)).strip()
        return self.taken[key]

    def confirm(self, key: str, message: str, default: bool) -> bool:
        if self.interactive:
            self.taken[key] = "yes" if _ask(questionary.confirm(message, default=default)) else "no"
        else:
            self._read(key, "yes" if default else "no", _check_yes_or_no)
        return self.taken[key].lower() in TRUE

    def again(self, message: str, options: Sequence[Option], error: TunerError) -> str:
        """Ask what to do after `error`, which is on the screen; without a person it is raised."""
        if not self.interactive:
            raise error
        return _pick(message, options, options[0].value)

    def finish(self) -> None:
        """Raises ConfigError for an answer to a question that was never asked."""
        for key in self.answers:
            if key not in self.taken and key not in IF_NEEDED:
                what = f"{self.path}: {key} was answered, but with the other answers it is not asked"
                raise ConfigError(what, remedy=f"Leave it out. It means: {KEYS[key]}.")

    def _read(self, key: str, default: str, check: Check) -> str:
        answer = self.taken[key] = self.answers.get(key, default).strip()
        try:
            check(answer)
        except (ValueError, TunerError) as error:
            what = f"{key} = {answer}" if answer else f"{key} is missing, and it has no default"
            raise ConfigError(f"{self.path}: {what}: {error}", remedy=f"{key}: {KEYS[key]}.") from None
        return answer


def _check_option(answer: str, options: Sequence[Option], check_other: Check | None) -> None:
    chosen = next((option for option in options if option.value == answer), None)
    if chosen and chosen.unfit:
        raise ValueError(chosen.unfit)
    if not chosen and check_other:
        check_other(answer)
    elif not chosen:
        known = [option.value for option in options]
        raise ValueError(f"expected one of {', '.join(known)}{nearest(answer, known)}")


def _check_yes_or_no(answer: str) -> None:
    if answer.lower() not in TRUE | FALSE:
        raise ValueError("expected yes or no")


def _pick(message: str, options: Sequence[Option], default: str) -> str:
    fit = [option.value for option in options if not option.unfit]
    choices = [questionary.Choice(o.title, value=o.value, disabled=o.unfit or None) for o in options]
    chosen = default if default in fit else fit[0]
    question = questionary.select(message, choices=choices, default=chosen, instruction=" ")
    question.application.erase_when_done = True
    answer = _ask(question)
    short = next(o.short or o.title for o in options if o.value == answer)
    questionary.print(f"? {message} ", style="bold", end="")
    questionary.print(short, style="fg:#FF9D00 bold")
    return answer


def _ask(question: questionary.Question) -> str | bool:
    """Bind Esc like Ctrl-C. Not eagerly: on a Mac, Option and an arrow key begin with an Esc, too."""
    bindings = KeyBindings()

    @bindings.add("escape")
    def _(event) -> None:
        event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    application = question.application
    application.key_bindings = merge_key_bindings([application.key_bindings, bindings])
    application.ttimeoutlen, application.timeoutlen = 0.1, 0.3
    return question.unsafe_ask()
