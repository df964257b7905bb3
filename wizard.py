"""Questions instead of flags: `python wizard.py` asks what to train and where, then makes the same call as the CLI."""

from __future__ import annotations

import sys
from pathlib import Path

import cli_typer  # makes exogym importable
from whisper_tuner.errors import ExitStatus, TunerError

HERE = "this machine alone"


def ask(config: Path = Path("config.ini"), hosts: Path = Path("distributed_hosts.json")) -> ExitStatus:
    """Ctrl-C at any question leaves everything as it was. Raises TunerError."""
    import questionary

    from distributed.commands.train import distributed_train, finetune
    from whisper_tuner.config import ConfigFile

    known = ConfigFile(config)
    names = [*known.names("profile"), *known.names("distributed")]
    name = questionary.select("What shall be trained?", choices=names).unsafe_ask()
    where = HERE
    if hosts.exists():
        where = questionary.select("Where?", choices=[HERE, f"the machines in {hosts}"]).unsafe_ask()
    cli_typer.main(["config", "show", name, "--config", str(config)])
    if not questionary.confirm("Start?", default=True).unsafe_ask():
        return ExitStatus.INTERRUPTED
    return finetune(config, name) if where == HERE else distributed_train(config, name, hosts)


def main() -> int:
    try:
        return ask()
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
