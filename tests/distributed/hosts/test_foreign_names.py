"""A host that lies: what it says must not make this machine write anywhere but where it is asked to."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from distributed.hosts import wheelhouse
from distributed.hosts.paths import STORE
from distributed.hosts.wheelhouse import Target
from distributed.launcher import spawner
from distributed.launcher.spawner import fetch_folder
from distributed.plan.run_spec import CHECKPOINTS, RunSpec
from distributed.ssh import process
from distributed.ssh.connection import Remote
from exogym.strategy import DiLoCoConfig
from multimac.commands.recover import recover
from whisper_tuner.config import Profile
from whisper_tuner.errors import HostError, RunError
from whisper_tuner.files import below

NAMES = [
    "../evil",
    "../../evil",
    "/evil",
    "..",
    ".",
    "",
    "a/../../evil",
    "a\0b",
    "a\nb",
    "a\\b",
    "~/evil",
    "~",
    "\x1b]0;x\a",
]
RUN = "20251121-101010-mine"


@pytest.fixture
def lying(ssh_server, tmp_path):
    """Replace a program of the host by a shell script; what it lists lies in the folder `there`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    login = tmp_path / "lying-login"
    sftp = next(filter(Path.exists, map(Path, ("/usr/lib/openssh/sftp-server", "/usr/libexec/sftp-server"))))
    login.write_text(
        f"#!/bin/sh\ncase $SSH_ORIGINAL_COMMAND in *sftp*) exec {sftp};; esac\n"
        f'PATH={programs}:$PATH exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    login.chmod(0o700)
    ssh_server.login = f"ForceCommand {login}\n"
    ssh_server.stop()
    ssh_server.start()

    def lie(program: str, script: str) -> None:
        (programs / program).write_text(f"#!/bin/sh\n{script}\n")
        (programs / program).chmod(0o700)

    return lie


@pytest.fixture
def there(tmp_path) -> Path:
    """Files of the host, also those that a name which leads elsewhere would find."""
    folder = tmp_path / "host" / "runs" / "final"
    folder.mkdir(parents=True)
    for place in (folder / "model", folder.parent / "evil", folder.parent.parent / "evil"):
        place.write_text("from the host")
    return folder


def everything(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


@pytest.mark.parametrize("name", NAMES)
def test_no_path_is_built_from_a_name_that_leads_elsewhere(tmp_path, name):
    with pytest.raises(ValueError, match="is not a name below"):
        below(tmp_path, name)
    assert below(tmp_path, "final/é ü 日本 -x.json") == tmp_path / "final/é ü 日本 -x.json"


@pytest.mark.parametrize("name", ["../evil", "~evil", "a\\134b", "\\033]0;x\\007"])
def test_a_listing_that_lies_writes_nothing_outside_the_folder(ssh_server, lying, there, tmp_path, name):
    lying("ls", f"printf 'model\\n{name}\\n'")
    here = tmp_path / "a" / "b" / "final"
    here.parent.mkdir(parents=True)
    with Remote.connect(ssh_server.host) as remote, pytest.raises(HostError, match="is not a name below"):
        fetch_folder(remote, str(there), here)
    assert everything(tmp_path / "a") == {here.parent}


def test_a_host_that_sends_without_end_is_cut_off(ssh_server, lying, there, tmp_path, monkeypatch):
    monkeypatch.setattr(spawner, "MOST_BYTES", 1 << 20)
    here = tmp_path / "here"
    with Remote.connect(ssh_server.host) as remote:
        fetch_folder(remote, str(there), here)
        assert (here / "model").read_text() == "from the host"
        for name in ("one", "two"):
            (there / name).write_bytes(b"x" * 600_000)  # each of them is small enough
        with pytest.raises(HostError, match=r"two: it is larger than the .* bytes that are taken"):
            fetch_folder(remote, str(there), here)
        (there / "two").unlink()
        (there / "endless").symlink_to("/dev/zero")  # it says that it has 0 bytes
        fetch_folder(remote, str(there), here)
        assert (here / "endless").stat().st_size == 0
        lying("ls", "seq 2000")
        with pytest.raises(HostError, match="2,000 files"):
            fetch_folder(remote, str(there), here)
        monkeypatch.setattr(process, "MOST_OUTPUT", 1 << 20)
        lying("ls", "exec yes model")
        with pytest.raises(HostError, match="prints more than 1 MB"):
            fetch_folder(remote, str(there), here)
    assert {path.name for path in everything(here)} == {"model", "one", "endless"}


@pytest.mark.parametrize(
    ("run", "base", "said"),
    [
        (RUN, "torch", "checkpoint is damaged"),  # into the project folder Python would import it
        (RUN, "/etc/model", "'/etc/model' is not a name below"),
        (RUN, f"{STORE}/models/../../torch", "is not a name below"),
        ("..", f"{STORE}/models/base", "there is no run"),
    ],
)
def test_recover_takes_no_path_from_a_host(ssh_server, lying, tmp_path, run, base, said):
    project = Path(ssh_server.host.project_path)
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    checkpoint = project / "runs" / RUN / CHECKPOINTS / "0000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "mini.json").write_text("{}")
    (project / "torch").mkdir()
    (project / "torch" / "__init__.py").write_text("raise SystemExit")
    profile = Profile(base_model=base, train=Path("clips.csv"))
    spec = RunSpec(run_id=RUN, run_dir="r", cache_dir="c", profile=profile, strategy_settings=DiLoCoConfig())
    (checkpoint.parent / "mini.spec.json").write_text(spec.to_json())
    if run != RUN:
        shutil.copytree(checkpoint.parent, project / CHECKPOINTS)
        lying("find", f"echo {project}/runs/{run}/{CHECKPOINTS}/0000002/mini.json; echo chatter")
    told: list[str] = []
    with Remote.connect(ssh_server.host) as remote, pytest.raises(RunError) as error:
        recover(run, [(remote, str(project))], here, told.append)
    assert said in "\n".join([*told, str(error.value)])
    assert {path.name for path in here.iterdir()} <= {"runs", STORE}
    assert not (tmp_path / "here" / CHECKPOINTS).exists()


def test_no_folder_of_wheels_is_made_by_what_a_host_says_of_its_machine(tmp_path, monkeypatch):
    """Older folders beside it are removed, so this would remove the user's own."""
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(wheelhouse, "download", lambda *_: pytest.fail("nothing is to be fetched"))
    lists = [tmp_path / name for name in ("requirements.txt", "constraints.txt")]
    for path in lists:
        path.write_text("")
    target = Target(python=(3, 11), system="Linux", machine="x/../../../home", release=(2, 36))
    with pytest.raises(HostError, match=r"mini: .*home' is not a name below"):
        wheelhouse.fill("mini", target, *lists)
    with pytest.raises(HostError):
        wheelhouse.fill("mini", dataclasses.replace(target, machine=json.loads('"a\\u0000"')), *lists)
