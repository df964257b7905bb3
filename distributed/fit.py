"""NetworkTrainer: fits a model of your own on all machines of a hosts file.

Model and data travel as one file, the only thing that is unpickled after a journey: over SSH with mode 0600. A worker
opens it only if its SHA-256 is the one in the RunSpec, which comes over the launcher's own SSH session.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from safetensors.torch import load_model
from torch import nn

from distributed.checkup.preflight import preflight
from distributed.hosts.keep_awake import awake, hosts_awake
from distributed.hosts.paths import PACKAGES, PRUNED, STORE, SyncItem, code_items
from distributed.hosts.sync import sync
from distributed.launcher.follow import PlainScreen, follow, start_launcher
from distributed.plan.hosts_file import load_hosts, meeting_address
from distributed.plan.launch import Launch, Rank
from distributed.plan.run_spec import RESULT, WEIGHTS, Bundle, RunSpec
from distributed.run_dir.folder import new_run
from distributed.ssh.host import Hosts
from exogym.errors import SettingError
from exogym.flat import check_model
from exogym.nodes import pickled
from exogym.settings import FitSettings, fit_settings
from exogym.strategy.strategy import Strategy
from exogym.train_node import TrainResult
from exogym.trainer import DataSource
from whisper_tuner.errors import RunError
from whisper_tuner.files import atomic_path


class NetworkTrainer:
    """Fits a model of your own on all machines of a hosts file, as exogym's LocalTrainer does on one.

    The model's `forward(batch)` returns a loss. Model and data sets must be picklable; what their classes import must
    be installed on the hosts, which `hosts setup` prepares. result: rank 0's figures of the last `fit`; None before it,
    and if it failed.
    """

    result: TrainResult | None = None

    def __init__(
        self,
        hosts_config: str | Path | Hosts,
        model: nn.Module,
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
    ):
        self.hosts = hosts_config if isinstance(hosts_config, Hosts) else load_hosts(hosts_config)
        self.model, self.train_dataset, self.val_dataset = model, train_dataset, val_dataset

    def fit(self, strategy: Strategy, **settings: Any) -> nn.Module:
        """Train the model, and return it: the very one that was given, where it was, with new weights.

        `settings` are the fields of exogym's FitSettings, with `autocast` for its `precision`, and without `num_nodes`
        and `devices`. A second `fit` goes on from the trained model. After an exception the model is as it was.
        Raises RunError, HostError, ConfigError, SettingError.
        """
        if "num_nodes" in settings:
            raise SettingError("num_nodes is the number of hosts in the hosts file: leave it out")
        if "devices" in settings:
            raise SettingError("the hosts file names each host's device: leave devices out")
        self.result = None
        check_model(self.model)
        parsed = fit_settings({"strategy": strategy, "num_nodes": len(self.hosts.all), **settings})
        with new_run(Path("runs").absolute(), type(self.model).__name__) as run_dir:
            self._send(parsed, run_dir)
        follow(run_dir, lambda: start_launcher(run_dir), PlainScreen())
        final = run_dir / "final"
        if not (final / RESULT).is_file():
            raise RunError(f"{run_dir}: the run ended before there was a model")
        load_model(self.model, str(final / WEIGHTS))
        self.result = TrainResult(**json.loads((final / RESULT).read_text()))
        return self.model

    @awake()
    def _send(self, settings: FitSettings, run_dir: Path) -> None:
        """Send the bundle to all hosts, and write run.json. Raises HostError, ConfigError."""
        data, file = self._pickled(settings), run_dir / "bundle.pickle"
        with atomic_path(file) as part:
            part.write_bytes(data)
        here = Bundle(path=str(file), sha256=hashlib.sha256(data).hexdigest())
        there = Bundle(path=f"{STORE}/bundles/{here.sha256}.pickle", sha256=here.sha256)
        with preflight(None, self.hosts) as report:
            report.raise_if_errors()
            if report.network:
                PlainScreen().print(report.network)
            address = report.meeting or meeting_address(self.hosts, report.remotes)
            items = [*code_items(), SyncItem(local=file, remote=there.path)]
            with hosts_awake(report.remotes):
                sync(report.remotes, {host.address: items for host in self.hosts.workers}, prune=PRUNED)
        ranks = []
        for number, host in enumerate(self.hosts.all):
            spec = RunSpec(
                run_id=run_dir.name,
                run_dir=f"runs/{run_dir.name}" if number else str(run_dir),
                cache_dir=f"{STORE}/cache",
                rank=number,
                world_size=len(self.hosts.all),
                hosts=tuple(host.address for host in self.hosts.all),
                bundle=there if number else here,
                interface=host.interface or "",
                device=host.device or "",
            )
            ranks.append(Rank(label=host.address, spec=spec, host=host if number else None))
        Launch(
            run_id=run_dir.name, name="own model", ranks=tuple(ranks), address=address, timeout_s=settings.timeout
        ).save(run_dir)

    def _pickled(self, settings: FitSettings) -> bytes:
        with _own_modules_by_value():
            return pickled((self.model, self.train_dataset, self.val_dataset, settings))


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Pickle the code of the user's own modules along, inside: it is not installed on the hosts."""
    own = [module for name, module in list(sys.modules.items()) if _is_own(name, module)]
    new = [module for module in own if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: ModuleType | None) -> bool:
    """Tell what is neither Python's, nor installed, nor sent to the hosts as it is."""
    origin = getattr(module, "__file__", None)
    is_script = name in ("__main__", "__mp_main__")  # which cloudpickle knows
    if not module or not origin or is_script or module.__name__ != name:
        return False
    is_known = name.split(".")[0] in {*PACKAGES, *sys.stdlib_module_names}
    return not is_known and not {"site-packages", "dist-packages"} & {*Path(origin).parts}
