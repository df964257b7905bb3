"""Going back a question: what is asked again, what is not done again, and which answers are suggested."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from multimac.wizard.questions import Journal
from whisper_tuner.errors import ConfigError


class Back(Exception):
    pass


def passes(journal: Journal, flow: Callable[[], object]) -> object:
    """As the wizard does it."""
    while True:
        try:
            return flow()
        except Back:
            journal.go_back()


def person(*answers: str | None) -> tuple[list[tuple[str, str]], Callable]:
    """Gives answers one after the other, None for the key that goes back, "" for what is suggested."""
    waiting, asked = list(answers), []

    def ask(journal: Journal, what: str, default: str, *, lasting: bool = True) -> str:
        def given(suggested: str) -> str:
            asked.append((what, suggested))
            answer = waiting.pop(0)
            if answer is None:
                raise Back
            return answer or suggested

        return journal.answer(what, default, given, lasting=lasting)

    return asked, ask


def test_the_question_before_comes_again_with_its_answer():
    asked, ask = person("1", "2", None, None, "3", "", "")
    journal = Journal()
    assert passes(journal, lambda: [ask(journal, what, "0") for what in "abc"]) == ["3", "2", "0"]
    assert asked == [("a", "0"), ("b", "0"), ("c", "0"), ("b", "2"), ("a", "1"), ("b", "2"), ("c", "0")]


def test_a_suggestion_that_has_changed_counts_more_than_an_earlier_answer():
    asked, ask = person("lora", "9", None, None, "full", "", "")
    journal = Journal()

    def flow() -> tuple[str, str]:
        rate = ask(journal, "rate", {"lora": "5", "full": "1"}[ask(journal, "method", "full")])
        return rate, ask(journal, "epochs", "3")

    assert passes(journal, flow) == ("1", "3")
    assert asked[-3:] == [("method", "lora"), ("rate", "1"), ("epochs", "3")]


@pytest.mark.parametrize(("second", "times"), [("slow.csv", 1), ("other.csv", 2)])
def test_what_took_time_is_done_again_only_for_another_answer(second, times):
    done, (_, ask) = [], person("slow.csv", "a", None, None, second, "", "")
    journal = Journal()

    def flow() -> int:
        path = ask(journal, "data", "")
        count = journal.once("count", path, lambda: done.append(path) or len(path))
        for what in "xy":
            ask(journal, what, "")
        return count

    assert passes(journal, flow) == len(second)
    assert len(done) == times


def preflight(journal: Journal, ask: Callable, outcomes: list[str], setups: list[str]) -> str:
    """A failure leads to "What next?", a host that is not set up to a question, and then to the set-up."""
    where = ask(journal, "where", "hosts")
    while where != "alone":
        try:
            report = journal.once("look", where, lambda: outcomes.pop(0), may_stay=lambda found: found == "well")
            if report == "bare" and ask(journal, "setup", "yes") == "yes":
                journal.once("setup", where, partial(setups.append, where), for_good=True)
                report = journal.once("look", where, lambda: outcomes.pop(0), may_stay=lambda found: found == "well")
            if report != "well":
                raise ConfigError(report)
            break
        except ConfigError:
            where = {"again": where}.get(said := ask(journal, "next?", "again", lasting=False), said)
    return where + ask(journal, "probe", "no")


def test_hosts_that_failed_are_looked_at_again_but_not_by_going_back_alone():
    """After "train alone", going back leads to the question where, not to what was wrong then."""
    outcomes = ["deaf", "deaf", "well"]
    asked, ask = person("hosts", "again", "alone", "5", None, None, "hosts", "no", "")
    journal = Journal()
    passes(journal, lambda: (preflight(journal, ask, outcomes, []), ask(journal, "name", "mine")))
    assert outcomes == []
    names = ["where", "next?", "next?", "probe", "name", "probe", "where", "probe", "name"]
    assert [what for what, _ in asked] == names


def test_a_failure_is_raised_again_where_nothing_has_changed():
    tries, (_, ask) = [], person("other", "1", None, "2", "")
    journal = Journal()

    def look() -> None:
        tries.append(1)
        raise OSError("gone")

    def flow() -> None:
        with pytest.raises(OSError, match="gone"):
            journal.once("look", 1, look)
        ask(journal, "next?", "", lasting=False)
        for what in "ab":
            ask(journal, what, "")

    passes(journal, flow)
    assert len(tries) == 1


def test_at_the_first_question_there_is_nothing_to_go_back_to():
    journal = Journal()
    journal.once("look", 1, lambda: 1)
    assert not journal.can_go_back
    journal.answer("a", "", lambda suggested: "1")
    assert journal.can_go_back
