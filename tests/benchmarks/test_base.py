"""What benchmarks share: what is done is kept, what failed is done again, and RESULTS.md has a section for each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks import base
from benchmarks.base import Done, RunFailed, a_way, config_text, ended, write_section
from benchmarks.plain_wer import against, wer


@dataclass(frozen=True)
class Task:
    name: str
    settings: str = ""

    def __str__(self) -> str:
        return self.name


def test_what_is_done_is_kept_and_what_failed_is_done_again(tmp_path):
    asked, failing = [], ["b"]

    def work(task: Task) -> dict:
        asked.append(task.name)
        if task.name in failing:
            failing.remove(task.name)
            raise RunFailed("much was said\nstatus 3")
        return {"wer": 20.0}

    tasks = [Task("a"), Task("b"), Task("c")]
    done = Done(tmp_path)
    done.run(tasks, work, 2)
    assert asked == ["a", "b"] and done.left(tasks) == tasks[1:]
    assert done.listed(tasks, ["a: slow"]) == ["", "Misses:", "", "- b: the run failed: status 3", "- a: slow"]
    assert Done(tmp_path).listed(tasks, []) == ["", "No misses so far; runs left to do: 2."]
    again = Done(tmp_path)
    again.run(tasks, work)
    assert asked[2:] == ["b", "c"] and again.listed(tasks, []) == ["", "No misses."]
    assert again[Task("a")]["wer"] == 20.0 and len(Done(tmp_path).commits(tasks)) == 3
    assert again.left([Task("a", settings="other")]) == [Task("a", settings="other")]


def test_a_section_takes_the_place_of_the_one_before_with_its_commits(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "RESULTS", tmp_path / "RESULTS.md")
    write_section("one", ["first"], ["abc", "abc", "def"])
    write_section("two", ["second"], ["abc"])
    write_section("one", ["third"], ["def"])
    head, two, one = base.RESULTS.read_text().split("\n## ")
    assert head.startswith("# Results") and two.endswith("second\n") and one.endswith("third\n")
    assert "commit def, " in one and "first" not in base.RESULTS.read_text()


def test_a_config_has_each_section_and_nothing_that_is_none():
    sections = {"profile:a": {"epochs": 2, "seed": None}, "distributed:b": {"base_profile": "a"}}
    assert config_text(sections) == "[profile:a]\nepochs = 2\n[distributed:b]\nbase_profile = a\n"


def test_a_run_that_failed_says_what_it_said_last(tmp_path):
    (tmp_path / "console.txt").write_text("no such model\n")
    with pytest.raises(RunFailed, match="no such model\n\nstatus 2: see"):
        ended(tmp_path, 2)


def test_a_way_has_a_name_and_settings():
    assert a_way("dropout dropout=0.1 seed=3") == ("dropout", {"dropout": "0.1", "seed": "3"})


def test_models_are_compared_on_all_runs_together():
    better, worse = [[1, 10], [0, 10]], [[3, 10], [2, 10]]
    assert wer(better) == 5.0
    assert against([worse, worse], [better, worse]) == ("+10.0 (+10.0 to +10.0)", True)
    assert against([better], [better]) == ("+0.0 (+0.0 to +0.0)", False)
