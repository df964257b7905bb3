"""A user's own model and data sets on their way to the hosts, and the trained weights on their way back.

This file is the only thing that is unpickled after a journey. It travels over SSH with mode 0600. A worker opens it
only if its SHA-256 is the one in the RunSpec, which comes over the launcher's own SSH session.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import cloudpickle
from safetensors.torch import load_model
from torch import nn

from distributed.hosts.code import PACKAGES, PRUNED, SyncItem, code_items
from distributed.hosts.paths import STORE
from distributed.hosts.sync import sync
from distributed.plan.launch import Launch, Rank
from distributed.plan.rendezvous import meeting_address
from distributed.plan.run_spec import RESULT, WEIGHTS, Bundle, RunSpec
from distributed.preflight.run import preflight
from distributed.ssh.host import Hosts
from exogym.train_node import TrainResult
from exogym.trainer import DataSource, Fit, FitSettings
from whisper_tuner.errors import RunError
from whisper_tuner.files import atomic_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModel:
    """A model with `forward(batch) -> loss`, and what it is trained and validated on; all of it can be pickled."""

    model: nn.Module
    train: DataSource
    validation: DataSource | None = None


def send(mine: UserModel, hosts: Hosts, settings: FitSettings, run_dir: Path) -> None:
    """Send the bundle to all hosts, and write run.json. Raises HostError, ConfigError."""
    data, file = _pickled(mine, settings), run_dir / "bundle.pickle"
    with atomic_path(file) as part:
        part.write_bytes(data)
    here = Bundle(path=str(file), sha256=hashlib.sha256(data).hexdigest())
    there = Bundle(path=f"{STORE}/bundles/{here.sha256}.pickle", sha256=here.sha256)
    with preflight(None, hosts) as report:
        report.raise_if_errors()
        address = meeting_address(hosts, report.remotes)
        items = [*code_items(), SyncItem(local=file, remote=there.path)]
        sync(report.remotes, {host.address: items for host in hosts.workers}, prune=PRUNED)
    Launch(
        run_id=run_dir.name,
        name="own model",
        ranks=tuple(_rank(number, hosts, run_dir, there if number else here) for number in range(len(hosts.all))),
        address=address,
        timeout_s=settings.timeout,
    ).save(run_dir)


def _rank(number: int, hosts: Hosts, run_dir: Path, bundle: Bundle) -> Rank:
    host = hosts.all[number]
    spec = RunSpec(
        run_id=run_dir.name,
        run_dir=f"runs/{run_dir.name}" if number else str(run_dir),
        cache_dir=f"{STORE}/cache",
        rank=number,
        world_size=len(hosts.all),
        hosts=tuple(host.address for host in hosts.all),
        bundle=bundle,
        interface=host.interface or "",
        device=host.device or "",
    )
    return Rank(label=host.address, spec=spec, host=host if number else None)


def _pickled(mine: UserModel, settings: FitSettings) -> bytes:
    parts = (mine.model, mine.train, mine.validation)
    for part in (*parts, settings.strategy):
        module = sys.modules.get(type(part).__module__)
        origin = getattr(module, "__file__", None)
        # Classes of a script beside the user's own are not installed on the hosts: send their code along.
        if origin and "site-packages" not in origin and module.__name__.split(".")[0] not in PACKAGES:
            cloudpickle.register_pickle_by_value(module)
    return cloudpickle.dumps((*parts, settings))


def trained(model: nn.Module, run_dir: Path) -> Fit:
    """A copy of `model` with the weights of the run. Raises RunError if it has none."""
    final = run_dir / "final"
    if not (final / RESULT).is_file():
        raise RunError(f"{run_dir}: the run ended before there was a model")
    model = copy.deepcopy(model)
    load_model(model, str(final / WEIGHTS))
    return Fit(model=model, result=TrainResult(**json.loads((final / RESULT).read_text())))
