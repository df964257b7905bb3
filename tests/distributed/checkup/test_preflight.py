import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from loopback_sshd import SshServer
from rich.console import Console
from small_run import folder, job, run_dir
from waiting import wait_until

from distributed.checkup import judge
from distributed.checkup import look as looking
from distributed.checkup.doctor import machine
from distributed.checkup.judge import read_own_files
from distributed.checkup.look import Look, Session
from distributed.checkup.preflight import Report, preflight
from distributed.plan.job import resolve
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import LocalMachine
from multimac.view.preflight_view import CHECKS, COLUMN, show
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, HostError

__all__ = ["folder", "job", "run_dir"]
PROJECT = Path(__file__).parents[3]
MASTER = Host(address="localhost")
CONFIG = """
[profile:tiny]
base_model = {model}
train = {project}/bundled/data/train.csv
epochs = 1
batch_size = 4
"""


@pytest.fixture
def worker(ssh_server: SshServer) -> Host:
    return replace(ssh_server.host, python_env=sys.executable)


def tiny(folder: Path, text: str = "", *, base_model: Path = PROJECT / "bundled/model"):
    path = folder / "config.ini"
    path.write_text(CONFIG.format(project=PROJECT, model=base_model) + text)
    return resolve(ConfigFile(path), "tiny")


def look(*workers: Host, master: Host = MASTER, job=None, sync: bool = True) -> Report:
    with preflight(job, Hosts(master=master, workers=workers), sync=sync) as report:
        assert report.seconds < 15
        return report


def wrong(report: Report, check: str = "") -> list[str]:
    return [str(problem) for problem in report.errors if check in ("", problem.check)]


def shown(report: Report) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    show(console, report)
    return console.export_text()


def agents() -> list[str]:
    """Agents of this test, and the processes in which they import torch."""
    test = os.environ["PYTEST_CURRENT_TEST"]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if ("-X utf8 -c" in line and "multimac agent" in line) or "torch.backends.mps" in line:
            with contextlib.suppress(psutil.Error):
                values = process.environ()
                by_ssh = test.split("::")[-1].split(" ")[0][:25] in values.get("HOME", "")
                found += [line] if by_ssh or values.get("PYTEST_CURRENT_TEST") == test else []
    return found


def wait_until_no_agent_is_left(seconds: float = 3.0) -> None:
    wait_until(lambda: not agents(), seconds, tell=agents)


def test_a_healthy_host(worker, tmp_path):
    with preflight(tiny(tmp_path), Hosts(master=MASTER, workers=(worker,))) as report:
        report.raise_if_errors()
        assert [remote.name for remote in report.remotes] == [worker.address]
        assert report.remotes[0].run(["echo", "still open"]).stdout == "still open\n"
        wait_until_no_agent_is_left()
    there = report.hosts[1]
    assert there.facts["python"] == list(sys.version_info[:3])
    assert there.device == "cpu" or there.torch == {"late": True}  # on a machine that is busy with other things
    assert abs(there.clock_ahead_s) < 0.5 and len(there.differ) > 50 and there.space["free"] > 0
    names = ("localhost", "127.0.0.1")
    assert [(pair.source, pair.target) for pair in report.pairs] == [names, names[::-1]]
    assert all(pair.mbit > 1 and pair.latency_s < 0.1 for pair in report.pairs)
    assert report.machine_workers == (2, 2)  # the same machine by another name
    assert "2 hosts checked" in report.summary()
    assert not (Path(worker.project_path)).exists()  # it only looks


def test_each_host_is_wrong_in_another_way(no_torch, ssh_server, worker, tmp_path):
    stranger = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    ssh_server.configure(
        f"Host refused\n  HostName 127.0.0.1\n  Port 1\nHost locked\n  HostName 127.0.0.1\n  Port {ssh_server.port}\n"
        "  IdentitiesOnly yes\n"
    )
    refused = Host(address="refused")
    locked = Host(address="locked", key_path=stranger)
    own = f"{worker.project_path}-of-another"
    bare = replace(worker, address="127.0.0.1", python_env="/no/such/environment", project_path=own)
    report = look(worker, refused, locked, Host(address="no-such-host.invalid"), bare)
    assert report.hosts[1].facts and len(report.pairs) == 2  # the good one is checked to the end
    said = "\n".join(wrong(report))
    assert "refused: port 1: Connection refused" in said
    assert f"locked: no key was accepted for user {worker.user or ''}".rstrip() in said
    assert "no-such-host.invalid: the name no-such-host.invalid is not known" in said
    assert (
        "there is no usable Python at 127.0.0.1:/no/such/environment/bin/python\n"
        "  Is python_env right in the hosts file? Run" in said
    )
    assert report.hosts[5].space and report.hosts[5].clock_ahead_s is not None  # another Python could tell
    with pytest.raises(HostError) as raised:
        report.raise_if_errors()
    assert raised.value.exit_status == ExitStatus.HOST and "4 problems" in str(raised.value)
    assert max(map(len, shown(report).splitlines())) <= 80 and "✗" in shown(report)


@pytest.fixture
def bare_venv(tmp_path) -> Path:
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def test_packages_and_rivals(no_torch, worker, bare_venv):
    site = next(bare_venv.glob("lib/python*/site-packages"))
    (site / "exogym").mkdir()
    (site / "exogym" / "__init__.py").touch()
    elsewhere = bare_venv / "elsewhere"
    (elsewhere / "distributed").mkdir(parents=True)
    (elsewhere / "distributed" / "__init__.py").touch()
    (site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n")
    report = look(replace(worker, python_env=str(bare_venv)))
    [missing], [rival] = wrong(report, "packages"), wrong(report, "rivals")
    assert "packages differ from the master's" in missing and "is missing (here" in missing
    assert missing.endswith("Run: multimac hosts setup")
    assert f"another distributed would be loaded: {elsewhere}" in rival and "pip uninstall distributed" in rival
    assert any(f"another exogym is installed in {site}" in problem.what for problem in report.warnings)
    assert report.pairs == [] and len(report.errors) == 2  # no links without psutil, which is said already


@pytest.mark.slow
def test_a_torch_that_takes_too_long_to_import_is_told_in_time(worker, bare_venv, tmp_path):
    """As the first import on a Mac, which the system scans."""
    site = next(bare_venv.glob("lib/python*/site-packages"))
    (site / "real.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    report = look(replace(worker, python_env=str(bare_venv)), job=tiny(tmp_path, "device = cpu\n"))
    assert wrong(report) == [] and len(report.pairs) == 2
    [what] = [problem.what for problem in report.warnings if problem.check == "links"]
    assert what == "whether gloo connects was not tried: importing torch took too long (the next time is quicker)"
    wait_until_no_agent_is_left()


def test_an_interface_that_is_not_there_is_an_error_of_the_hosts_file(no_torch, worker):
    report = look(replace(worker, interface="nope0"))
    (said,) = wrong(report)
    assert "nope0 is not an interface of this machine" in said and "Its interfaces: " in said
    with pytest.raises(ConfigError):
        report.raise_if_errors()


def test_a_master_that_is_another_machine(no_torch, worker):
    report = look(worker, master=Host(address="192.0.2.1"))
    assert "192.0.2.1 is not this machine" in wrong(report)[0]
    assert report.hosts[1].facts and len(report.pairs) == 2
    with pytest.raises(ConfigError) as raised:
        report.raise_if_errors()
    assert raised.value.exit_status == ExitStatus.CONFIG


def test_files_of_the_master_that_cannot_be_read_and_the_disk_of_its_runs(no_torch, worker, tmp_path):
    broken, runs = tmp_path / "model", tmp_path / "runs"
    shutil.copytree(PROJECT / "bundled/model", broken)
    with (broken / "model.safetensors").open("r+b") as weights:
        weights.truncate(100_000)
    (tmp_path / "one.csv").write_text("audio,text\nclip.wav,hello\n")
    (tmp_path / "clip.wav").symlink_to(tmp_path / "gone.wav")
    more = f"validation = {tmp_path}/none.csv\ntest = {tmp_path}/one.csv\nruns_dir = {runs}\n"
    report = look(worker, job=tiny(tmp_path, more, base_model=broken))
    model, validation, test = wrong(report, "files")
    assert "model.safetensors is damaged, or was not copied whole" in model
    assert "no such manifest" in validation and "one.csv: no usable row" in test
    assert report.hosts[0].space["root"] == str(runs) and not runs.exists()
    assert report.hosts[1].space["root"] == worker.project_path
    with pytest.raises(DataError):
        report.raise_if_errors()


def test_audio_that_is_closed_to_us_is_named_although_its_header_is_known(job, run_dir, folder, monkeypatch):
    """As on a Mac, where a file can be seen in a folder from which an SSH session must not read."""
    read_own_files(job, "here", threading.Event())
    real = Path.open

    def refuses(path, *arguments, **named):
        if path.suffix == ".ogg":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuses)
    manifests, problems = read_own_files(job, "here", threading.Event())
    assert not manifests and [problem.status for problem in problems] == [ExitStatus.DATA] * 3
    assert "000.ogg cannot be read: Permission denied" in problems[0].what and "check who owns" in problems[0].remedy


def test_a_defect_of_ours_is_no_healthy_host(no_torch, worker, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("distributed.checkup.preflight.Remote.connect", broken)
    with pytest.raises(ZeroDivisionError):
        look(worker)


def test_a_folder_of_this_machine_that_cannot_be_used_has_its_own_remedy(tmp_path):
    (tmp_path / "file").touch()  # not even root can write below a file
    unusable = f"{tmp_path}/file/x"
    for folders, remedy in (([unusable], f"chown -R $USER {unusable}"), ([str(tmp_path), unusable], "runs_dir")):
        look = Look(0, MASTER)
        look.session = Session(LocalMachine(), sys.executable, 60)
        look.gather(time.monotonic() + 60, names=[], project=folders[0], folders=folders, torch=False)
        look.close()
        [found] = look.problems
        assert found.check == "folder" and remedy in found.remedy


@pytest.mark.slow
@pytest.mark.parametrize("is_in_use", [True, False])
def test_a_connection_that_comes_too_late_is_closed(no_torch, monkeypatch, is_in_use):
    """While the report is in use, or when nobody waits any more."""
    answered, may_answer, closed = threading.Event(), threading.Event(), threading.Event()

    class Late:
        name, home = "late", "/"

        def expand(self, path: str) -> str:
            return path

        def start(self, *_, **__):
            answered.set()
            raise HostError("late", "the connection was lost")

        def close(self) -> None:
            closed.set()

    def connect(host: Host, timeout: float) -> Late:
        may_answer.wait(10)
        return Late()

    monkeypatch.setattr("distributed.checkup.preflight.Remote.connect", connect)
    monkeypatch.setattr("distributed.checkup.preflight.FACTS_BY", 2.0)
    with preflight(None, Hosts(master=MASTER, workers=(Host(address="late"),))) as report:
        assert any("late: not finished after 2 s: connecting" in text for text in wrong(report, "ssh"))
        if is_in_use:
            may_answer.set()
            assert answered.wait(5) and not closed.is_set()
    may_answer.set()
    assert closed.wait(5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(ssh_server, tmp_path, number):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps({"master": "localhost", "workers": [ssh_server.worker]}))
    command = [sys.executable, "cli_typer.py", "hosts", "check", "--hosts", str(hosts)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: len(agents()) >= 2 or process.poll() is not None, 20)
    assert process.poll() is None, process.communicate()
    process.send_signal(number)
    assert process.wait(10) == ExitStatus.INTERRUPTED
    wait_until_no_agent_is_left()


def test_an_agent_ends_by_itself(monkeypatch):
    monkeypatch.setattr(looking, "LIFE_S", 1)
    session = Session(LocalMachine("here"), sys.executable)
    assert session.call("clock", time.monotonic() + 10)["clock"] == pytest.approx(time.time(), abs=5)
    assert session.ended(5)
    with pytest.raises(HostError, match="gave no answer"):
        session.call("clock", time.monotonic() + 1)
    wait_until_no_agent_is_left()


def test_everything_that_is_judged_has_a_column_of_the_table_and_a_row_of_the_doctor():
    """A finding under a name that these do not know would be left out without a word."""
    judged = set(re.findall(r'self\.problem\(\s*"(\w+)"', inspect.getsource(judge)))
    rows = set(re.findall(r'row\("[^"]+", "(\w+)"', inspect.getsource(machine)))
    assert len(judged) > 8 and judged <= {*CHECKS, *COLUMN}
    assert judged <= rows | {"packages", "system"} | {"clock", "code"}  # checks of their own; of hosts only
