"""The command line: parse, build the config, make one call, turn the outcome into an exit code.

Everything heavy is imported inside the commands: `--help` must answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from whisper_tuner.errors import ExitStatus, TunerError

PROJECT = Path(__file__).resolve().parent
if str(PROJECT / "gym") not in sys.path:
    sys.path.insert(0, str(PROJECT / "gym"))  # exogym lives there; see docs/architecture.md

app = typer.Typer(
    help="Fine-tune OpenAI's Whisper on your own speech, on one Mac or on all the Macs you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time that --help takes
)
hosts_app = typer.Typer(help="Prepare and check the machines of a hosts file.", no_args_is_help=True)
config_app = typer.Typer(help="Look at config.ini.", no_args_is_help=True)
app.add_typer(hosts_app, name="hosts")
app.add_typer(config_app, name="config")

Config = Annotated[Path, typer.Option("--config", help="Configuration file.")]
HostsFile = Annotated[Path, typer.Option("--hosts", help="Hosts file.")]
CONFIG, HOSTS = Path("config.ini"), Path("distributed_hosts.json")


@app.command()
def finetune(profile: Annotated[str, typer.Argument(help="A [profile:NAME].")], config: Config = CONFIG) -> int:
    """Train a profile on this machine."""
    from distributed.commands.train import finetune

    return finetune(config, profile)


@app.command()
def demo() -> int:
    """Train the bundled model on the bundled speech: two ranks on this machine, about two minutes."""
    from distributed.commands.train import finetune

    return finetune(PROJECT / "config.ini", "demo-diloco", ranks=2)


@app.command("distributed-train")
def distributed_train(
    profile: Annotated[str, typer.Argument(help="A [distributed:NAME], or a [profile:NAME] trained with DiLoCo.")],
    hosts: Annotated[Path | None, typer.Option("--hosts", help="Hosts file; wins over hosts_config.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    no_sync: Annotated[bool, typer.Option("--no-sync", help="Trust that every host has the files it needs.")] = False,
    config: Config = CONFIG,
) -> int:
    """Train a profile on all machines of a hosts file."""
    from distributed.commands.train import distributed_train

    return distributed_train(config, profile, hosts, dry_run=dry_run, no_sync=no_sync)


@app.command()
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Model folders (or hub ids), for example runs/ID/final.")],
    data: Annotated[Path | None, typer.Option(help="Manifest to evaluate on.")] = None,
    profile: Annotated[str, typer.Option(help="Take test set and language from this [profile:NAME].")] = "",
    language: Annotated[str, typer.Option(help="Language of the speech, for multilingual models.")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Clips at a time.")] = 8,
    config: Config = CONFIG,
) -> int:
    """Measure WER and CER of models on a test set."""
    from distributed.commands.evaluate import evaluate

    return evaluate(config, models, data=data, profile=profile, language=language, batch_size=batch_size)


@app.command()
def transcribe(
    audio: Annotated[list[Path], typer.Argument(help="Audio files: WAV, FLAC, MP3, OGG or M4A.")],
    model: Annotated[str, typer.Option("--model", help="Model folder (or hub id).")],
    language: Annotated[str, typer.Option(help="Language of the speech, for multilingual models.")] = "",
) -> int:
    """Print what is said in audio files."""
    from distributed.commands.transcribe import transcribe

    return transcribe(audio, model, language)


@hosts_app.command("setup")
def hosts_setup(hosts: HostsFile = HOSTS) -> int:
    """Make the Python environment on each host: project folder, venv, dependencies."""
    from distributed.commands.hosts import hosts_setup

    return hosts_setup(hosts)


@hosts_app.command("sync")
def hosts_sync(
    profile: Annotated[str, typer.Argument(help="A [distributed:NAME] or [profile:NAME].")],
    hosts: HostsFile = HOSTS,
    config: Config = CONFIG,
) -> int:
    """Bring code, base model and each host's share of the audio up to date."""
    from distributed.commands.hosts import hosts_sync

    return hosts_sync(config, profile, hosts)


@hosts_app.command("check")
def hosts_check(hosts: HostsFile = HOSTS) -> int:
    """Reach each host and show what it is and has."""
    from distributed.commands.hosts import hosts_check

    return hosts_check(hosts)


@config_app.command("show")
def config_show(
    name: Annotated[str, typer.Argument(help="A [profile:NAME] or [distributed:NAME]; nothing lists them.")] = "",
    config: Config = CONFIG,
) -> int:
    """Print every setting of a profile: its value, where it came from, what it means."""
    from distributed.commands.config import config_show

    return config_show(config, name)


def main(arguments: list[str] | None = None) -> int:
    """The one place where an error becomes a message and an exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        status = app(arguments, standalone_mode=False)
        return int(status or ExitStatus.OK)
    except TunerError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return error.exit_status
    except (KeyboardInterrupt, typer.Abort):
        return ExitStatus.INTERRUPTED
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            error.show()
            return ExitStatus.USAGE
        raise


if __name__ == "__main__":
    sys.exit(main())
