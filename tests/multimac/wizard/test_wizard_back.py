"""Going back among the questions about hosts: keys are typed into real prompts, the hosts are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from distributed.checkup.findings import Finding
from distributed.checkup.look import HostFacts
from distributed.checkup.preflight import Report
from distributed.hosts.interfaces import Route
from distributed.ssh.host import Hosts
from multimac.wizard import hosts as asking
from multimac.wizard import questions as asking_itself
from multimac.wizard.draft import Data, Draft, Group, Model
from multimac.wizard.model import BUNDLED
from multimac.wizard.questions import Back, Questions
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import ExitStatus
from whisper_tuner.model.memory import Way

ENTER, BACK, DOWN = "\r", "\x1b[Z", "\x1b[B"
ALL_WELL, BARE, DEAF = (), ("python",), ("ssh",)


class Machines:
    """What preflights find, one after the other: each a list of checks that fail on the worker."""

    def __init__(self, *found: tuple[str, ...]):
        self.found, self.set_up = list(found), 0

    @contextlib.contextmanager
    def preflight(self, job: object, hosts: Hosts, *, hosts_file: Path | None, setup: str) -> Iterator[Report]:
        name, remedy = hosts.workers[0].address, setup or f"hosts setup --hosts {hosts_file}"
        problems = [Finding(hosts=(name,), what="wrong", check=check, remedy=remedy) for check in self.found.pop(0)]
        way = Way(frozen_precision="bf16", again=False, whole=1, one=1)
        yield Report(hosts=[HostFacts(host=host, reached=True, way=way) for host in hosts.all], problems=problems)

    def setup(self, hosts_file: Path) -> ExitStatus:
        assert hosts_file.is_file()
        self.set_up += 1
        return ExitStatus.OK


@pytest.fixture
def draft(tmp_path, monkeypatch) -> Draft:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_text("audio,text\n")
    clip = Sample(id="1", audio=tmp_path / "1.wav", text="one", duration_s=1.0)
    data = Data(manifests={"train": tmp_path / "train.csv"}, samples={"train": (clip,)})
    config = tmp_path / "config.ini"
    return Draft(config_path=config, config_text="", model=Model(base_model=str(BUNDLED)), data=data)


def asked(draft: Draft, machines: Machines, monkeypatch, *keys: str) -> tuple[Questions, Group | None, str]:
    """The questions about hosts, and then one more, as the wizard asks them; what was printed. keys: at each prompt."""
    monkeypatch.setattr(asking, "preflight", machines.preflight)
    monkeypatch.setattr(asking, "hosts_setup", machines.setup)
    monkeypatch.setattr(asking, "route_to", lambda worker: Route("10.0.0.9", "en0"))
    console = Console(record=True, width=80)
    questions, scratch = Questions(console=console), draft.config_path.parent / "scratch"
    scratch.mkdir()
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        waiting, answer = list(keys), asking_itself._answer

        def typed(question, **about) -> str | bool:
            pipe.send_text(waiting.pop(0))
            return answer(question, **about)

        monkeypatch.setattr(asking_itself, "_answer", typed)
        while True:
            try:
                group = asking.ask_hosts(questions, draft, scratch, console)
                questions.text("name", "Name:", "mine")
                return questions, group, console.export_text()
            except Back:
                questions.go_back()


NEW = (DOWN + ENTER, "10.0.0.1" + ENTER, ENTER, ENTER)  # where, address, user, key


def test_hosts_setup_is_not_run_again(draft, monkeypatch):
    """At the question after it one goes back to that before it, the key; Enter leads on without another set-up."""
    machines = Machines(BARE, ALL_WELL)
    questions, group, told = asked(draft, machines, monkeypatch, *NEW, "y" + ENTER, BACK, ENTER, ENTER)
    assert machines.set_up == 1 and machines.found == [] and group
    assert questions.taken["workers"] == "10.0.0.1" and questions.taken["name"] == "mine"
    assert group.frozen_precision == "bf16"  # so that steps are measured as the run will make them
    assert told.count("`hosts setup` creates") == 1


def test_no_command_is_advised_that_does_not_know_hosts_that_were_just_typed(draft, monkeypatch):
    _, group, told = asked(draft, Machines(BARE, ALL_WELL), monkeypatch, *NEW, "n" + ENTER, ENTER, ENTER)
    assert group and "Let the wizard set it up" in told and "hosts setup --hosts" not in told


def test_another_address_is_looked_at_and_the_first_ones_answer_is_forgotten(draft, monkeypatch):
    machines = Machines(ALL_WELL, ALL_WELL)
    to_workers = (BACK, BACK, BACK, "\x7f2" + ENTER, ENTER, ENTER)
    questions, group, _ = asked(draft, machines, monkeypatch, *NEW, *to_workers, ENTER)
    assert machines.found == [] and [host.address for host in group.hosts.workers] == ["10.0.0.2"]
    assert questions.taken["workers"] == "10.0.0.2"


def test_saved_answers_say_nothing_of_hosts_that_were_given_up(draft, monkeypatch):
    """At "What next?" the last of three is to train alone."""
    machines = Machines(DEAF, DEAF)
    questions, group, _ = asked(draft, machines, monkeypatch, *NEW, ENTER, DOWN * 2 + ENTER, ENTER)
    assert group is None and machines.found == []
    assert questions.taken == {"where": "alone", "name": "mine"}
