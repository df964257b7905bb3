"""NetworkTrainer: fits a model of your own on all machines of a hosts file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from distributed.launcher.follow import PlainScreen, follow, start_launcher
from distributed.plan.hosts_file import load_hosts
from distributed.run_dir.folder import new_run
from distributed.ssh.host import Hosts
from distributed.user_model import UserModel, send, trained
from exogym.errors import SettingError
from exogym.trainer import DataSource, Fit, FitSettings


class NetworkTrainer:
    """Fits a model of your own on all machines of a hosts file, as exogym's LocalTrainer does on one.

    Model and data sets are sent to the hosts as one file, checked by its SHA-256 before it is unpickled; what their
    classes import must be installed there. `hosts setup` prepares the hosts. Whisper profiles go another way: their
    workers build model and data from the RunSpec alone, see worker/train.py.
    """

    def __init__(
        self,
        hosts_config: str | Path | Hosts,
        model: nn.Module,
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
    ):
        self.hosts = hosts_config if isinstance(hosts_config, Hosts) else load_hosts(hosts_config)
        self.mine = UserModel(model=model, train=train_dataset, validation=val_dataset)

    def fit(self, **settings: Any) -> Fit:
        """Train a copy of the model and return it; `settings` are the fields of exogym's FitSettings.

        `num_nodes` is the number of hosts. Raises RunError, HostError, ConfigError, SettingError.
        """
        if "num_nodes" in settings:
            raise SettingError("num_nodes is the number of hosts in the hosts file: leave it out")
        parsed = FitSettings(num_nodes=len(self.hosts.all), **settings)
        with new_run(Path("runs").absolute(), type(self.mine.model).__name__) as run_dir:
            send(self.mine, self.hosts, parsed, run_dir)
        follow(run_dir, lambda: start_launcher(run_dir), PlainScreen())
        return trained(self.mine.model, run_dir)
