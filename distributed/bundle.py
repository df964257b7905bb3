"""A user's own model and data sets on their way to the hosts, and the trained weights on their way back.

The one thing that is unpickled after a journey. It travels over SFTP with mode 0600, and a worker looks into it only
if its SHA-256 is the one in the RunSpec, which came over the launcher's own SSH session.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
from rich.console import Console
from safetensors.torch import load_model, save_model

from exogym.train_node import TrainResult
from exogym.trainer import Fit, FitSettings
from whisper_tuner.errors import RunError
from whisper_tuner.runs import new_run, write_atomically

from .console import follow
from .launcher import Launch
from .lifeline import Lifeline
from .post import Rank
from .preflight import preflight
from .shipment import STORE
from .source_hash import PACKAGES
from .spec import Bundle, RunSpec
from .start import meeting_address, start_launcher
from .sync import SyncItem, code_folders, code_items, sync

if TYPE_CHECKING:
    from .network_trainer import NetworkTrainer

RESULT, WEIGHTS = "result.json", "model.safetensors"


def fit_on_hosts(trainer: NetworkTrainer, settings: FitSettings) -> Fit:
    """Send, train, load the weights into a copy of the model. Raises RunError, HostError, ConfigError."""
    with new_run(Path("runs").absolute(), type(trainer.model).__name__) as run_dir:
        _prepare(trainer, settings, run_dir)
    follow(run_dir, start_launcher(run_dir), Console(highlight=False, markup=False))
    return _trained(trainer, run_dir)


def _prepare(trainer: NetworkTrainer, settings: FitSettings, run_dir: Path) -> None:
    """Send the bundle to all hosts, and write run.json."""
    hosts = trainer.hosts
    data, file = _pickled(trainer, settings), run_dir / "bundle.pickle"
    file.touch(mode=0o600)
    file.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    name = f"{STORE}/bundles/{sha256}.pickle"
    with preflight(None, hosts) as report:
        report.raise_if_errors()
        address = meeting_address(hosts, report.remotes)
        items = [*code_items(), SyncItem(local=file, remote=name)]
        sync(report.remotes, {host.address: items for host in hosts.workers}, prune=code_folders())
    base = RunSpec(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=f"{STORE}/cache",
        world_size=len(hosts.all),
        hosts=tuple(host.address for host in hosts.all),
        bundle=Bundle(path=str(file), sha256=sha256),
        interface=hosts.master.interface or "",
    )
    ranks = [Rank(label=hosts.master.address, spec=base)]
    for number, host in enumerate(hosts.workers, 1):
        spec = dataclasses.replace(
            base,
            rank=number,
            run_dir=f"runs/{run_dir.name}",
            bundle=Bundle(path=name, sha256=sha256),
            interface=host.interface or "",
        )
        ranks.append(Rank(label=host.address, spec=spec, host=host))
    timeout = settings.timeout
    Launch(run_id=run_dir.name, name="own model", ranks=tuple(ranks), address=address, timeout_s=timeout).save(run_dir)


def run_bundle(spec: RunSpec, *, events: Callable[[dict], None], lifeline: Lifeline) -> Callable[[Path], None]:
    """Be one rank of a user's own model, see run.run. Raises RunError if the file is not the one that was sent."""
    from .network_trainer import NetworkTrainer

    model, train, validation, settings = _unpickled(spec.bundle)
    trainer = NetworkTrainer.for_rank(spec, lifeline, model, train, validation)
    events({"type": "ready"})
    result = trainer.run_rank(spec.rank, settings, events=events, should_stop=lifeline.stopping.is_set)
    events({"type": "done", "steps": result.steps, "seconds": result.seconds, "stopped": result.stopped})

    def save(run_dir: Path) -> None:
        final = run_dir / "final"
        final.mkdir(parents=True, exist_ok=True)
        save_model(model.cpu(), str(final / WEIGHTS))
        write_atomically(final / RESULT, json.dumps(dataclasses.asdict(result)))

    return save


def _pickled(trainer: NetworkTrainer, settings: FitSettings) -> bytes:
    parts = (trainer.model, trainer.train_dataset, trainer.val_dataset)
    for part in (*parts, settings.strategy):
        module = sys.modules.get(type(part).__module__)
        origin = getattr(module, "__file__", None)
        # Classes of a script beside the user's own are not installed on the hosts: send their code along.
        if origin and "site-packages" not in origin and module.__name__.split(".")[0] not in PACKAGES:
            cloudpickle.register_pickle_by_value(module)
    return cloudpickle.dumps((*parts, settings))


def _unpickled(bundle: Bundle) -> tuple:
    data = Path(bundle.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != bundle.sha256:
        raise RunError(f"{bundle.path} is not the file that was sent", remedy="Start the run again.")
    return pickle.loads(data)


def _trained(trainer: NetworkTrainer, run_dir: Path) -> Fit:
    final = run_dir / "final"
    if not (final / RESULT).is_file():
        raise RunError(f"{run_dir}: the run ended before there was a model")
    model = copy.deepcopy(trainer.model)
    load_model(model, str(final / WEIGHTS))
    return Fit(model=model, result=TrainResult(**json.loads((final / RESULT).read_text())))
