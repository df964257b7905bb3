"""The command line: parse, make one call, turn the outcome into an exit code. `--help` must answer at once."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    sys.exit(
        f"error: {sys.executable} has no typer: it is not the Python that `make setup` prepares\n"
        "  Run `make setup` in this folder once. Then use .venv/bin/python, or first `source .venv/bin/activate`."
    )

from multimac import commands
from whisper_tuner.errors import ConfigError, ExitStatus, TunerError
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.text import harmless

PROJECT = Path(__file__).resolve().parent
if str(PROJECT / "gym") not in sys.path:
    sys.path.insert(0, str(PROJECT / "gym"))  # exogym lives there; see docs/architecture.md

app = typer.Typer(
    help="Fine-tune OpenAI's Whisper on your own speech, on one Mac or on all the Macs you own.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time that --help takes
)
hosts_app = typer.Typer(help="Prepare and check the machines of a hosts file.", no_args_is_help=True)
config_app = typer.Typer(help="Show the settings of config.ini.", no_args_is_help=True)
runs_app = typer.Typer(help="List, compare, follow and stop runs; free disk space.", no_args_is_help=True)
data_app = typer.Typer(help="Bring in recordings of any usual layout, and check them.", no_args_is_help=True)
for name, group in {"data": data_app, "hosts": hosts_app, "config": config_app, "runs": runs_app}.items():
    app.add_typer(group, name=name)

# readable=False: a file that may not be read is told of by those who read it, with a remedy, not by the parser.
Config = Annotated[Path, typer.Option("--config", help="Configuration file.", readable=False)]
HostsFile = Annotated[Path, typer.Option("--hosts", help="Hosts file.", readable=False)]
RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Folder of the runs. [default: as config.ini says]")]
Run = Annotated[str, typer.Argument(help="A run's id or the beginning of one, its folder, or `last`.")]
Resume = Annotated[str, typer.Option("--resume", metavar="RUN", help="Resume a run that was stopped or broke off.")]
Language = Annotated[str, typer.Option(help="Language of the speech, for multilingual models.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting for this run, as in config.ini; several times."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the run has begun: see `runs attach`.")]
MODEL = "A run's id, the beginning of one, its folder, or `last`; a model's folder; or a hub id."
CONFIG, HOSTS = Path("config.ini"), Path("distributed_hosts.json")


def print_version(asked: bool) -> None:
    if asked:
        print(f"multimac {version('multimac-whisper')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def common(
    asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def named(profile: str) -> str:
    if not profile:
        raise typer.BadParameter("name a profile, or a run with --resume", param_hint="PROFILE")
    return profile


def only_new(settings: list[str] | None) -> None:
    if settings:
        raise ConfigError("--set is for a new run; --resume keeps its settings", remedy="Leave one of them out.")


@app.command()
def finetune(
    profile: Annotated[str, typer.Argument(help="A [profile:NAME].")] = "",
    settings: Set = None,
    resume: Resume = "",
    detach: Detach = False,
    config: Config = CONFIG,
) -> int:
    """Train a profile on this machine."""
    if resume:
        only_new(settings)
        return commands.resume.resume(config, resume, name=profile, detach=detach)
    return commands.train.finetune(config, named(profile), settings=settings or (), detach=detach)


@app.command()
def demo() -> int:
    """Train the bundled model on the bundled speech: two ranks on this machine, about two minutes."""
    return commands.train.finetune(PROJECT / "config.ini", "demo-diloco", ranks=2)


@app.command("distributed-train")
def distributed_train(
    profile: Annotated[str, typer.Argument(help="A [distributed:NAME], or a [profile:NAME] trained with DiLoCo.")] = "",
    hosts: Annotated[
        Path | None, typer.Option("--hosts", help="Hosts file. [default: hosts_config, or distributed_hosts.json]")
    ] = None,
    settings: Set = None,
    resume: Resume = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and do nothing.")] = False,
    no_sync: Annotated[bool, typer.Option("--no-sync", help="Trust that every host has the files it needs.")] = False,
    detach: Detach = False,
    config: Config = CONFIG,
) -> int:
    """Train a profile on all machines of a hosts file."""
    if resume:
        only_new(settings)
        if dry_run:
            raise ConfigError("--dry-run shows a new run, --resume continues one", remedy="Leave one of them out.")
        return commands.resume.resume(config, resume, name=profile, hosts_file=hosts, no_sync=no_sync, detach=detach)
    return commands.train.distributed_train(
        config, named(profile), hosts, settings=settings or (), dry_run=dry_run, no_sync=no_sync, detach=detach
    )


@app.command()
def evaluate(
    models: Annotated[list[str], typer.Argument(help=MODEL)],
    data: Annotated[
        list[Path] | None, typer.Option(help="Manifest to evaluate on; may be given several times.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Take test set, language and task from this [profile:NAME].")] = "",
    language: Language = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Clips at a time.")] = 8,
    audio_context: Annotated[
        str,
        typer.Option(help="full: pad to 30 s, as other programs do; cropped: to compare."),
    ] = "full",
    fallback: Annotated[
        bool, typer.Option(help="Decode again what repeats itself or is improbable, as OpenAI's program does.")
    ] = True,
    base: Annotated[bool, typer.Option(help="Also evaluate the untouched base of a trained model.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions. [default: the run's, or ./evaluation]")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst clips to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the figures, as JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Measure WER and CER of models on test sets, and save what they heard."""
    return commands.evaluate.evaluate(
        config,
        models,
        data or (),
        profile,
        language,
        batch_size=batch_size,
        audio_context=audio_context,
        fallback=fallback,
        base=base,
        out=out,
        worst_rows=worst,
        as_json=as_json,
    )


@app.command()
def transcribe(
    audio: Annotated[list[Path], typer.Argument(help="Recordings of any length, folders of them, or - for stdin.")],
    model: Annotated[str, typer.Option("--model", help=MODEL)],
    form: Annotated[str, typer.Option("--format", help="text, srt, vtt or json.")] = "text",
    words: Annotated[
        bool, typer.Option("--words", help="When each word is said: in JSON, and for the times of subtitles.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the files. [default: beside each recording]")] = None,
    language: Language = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    config: Config = CONFIG,
) -> int:
    """Transcribe recordings: text on the terminal, or files with times. What came from stdin goes to stdout."""
    return commands.transcribe.transcribe(
        config, audio, model, form=form, words=words, out=out, language=language, force=force
    )


@app.command()
def export(
    model: Annotated[str, typer.Argument(help=MODEL)],
    to: Annotated[
        list[str], typer.Option("--to", help="transformers, faster-whisper, whisper.cpp, mlx, onnx or openai.")
    ],
    precision: Annotated[
        str,
        typer.Option(help="float32 or float16; int8, q8_0 or q5_0. [default: float16; of transformers float32]"),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write to. [default: RUN/export]")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Decode test clips with each runtime, and compare.")] = False,
    data: Annotated[Path | None, typer.Option(help="Manifest to verify with. [default: the run's test set]")] = None,
    language: Language = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only folders and figures, as JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Write a trained model, adapters merged, as other programs load it."""
    return commands.export.export(
        config,
        model,
        to,
        precision=precision,
        out=out,
        verify=verify,
        data=data,
        language=language,
        as_json=as_json,
    )


@app.command()
def report(
    run: Run = "last",
    out: Annotated[Path | None, typer.Option("--out", help="Where to write it. [default: RUN/report.html]")] = None,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """Write a run as one HTML file: curves, WER, the worst clips to listen to, hosts and faults."""
    return commands.report.report(commands.runs.folders_of(config, runs_dir), run, out)


@app.command()
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also run the GPU, copies, ranks and audio: a minute.")] = False,
    profile: Annotated[str, typer.Option(help="Check what this profile needs, at its batch shapes.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only the findings, as JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Check whether this machine can train; exit status 5 if not."""
    return commands.doctor.doctor(config, profile, deep=deep, as_json=as_json)


@app.command()
def selftest(
    hosts: Annotated[Path | None, typer.Option("--hosts", help="Hosts file. [default: this machine alone]")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("report.json"),
    lid: Annotated[bool, typer.Option("--lid", help="Then watch for a minute in which you close a lid.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> int:
    """Check what this program assumes of your machines: about 5 minutes, with a report to send us."""
    return commands.selftest.selftest(hosts, out, lid=lid, as_json=as_json)


@app.command()
def wizard(
    answers: Annotated[Path | None, typer.Option(help="Take the answers from this file (JSON or INI).")] = None,
    save_answers: Annotated[Path | None, typer.Option(help="Write the answers to this file, for --answers.")] = None,
    config: Config = CONFIG,
) -> int:
    """Ask what to train and where, save it as a profile, and start it."""
    from multimac.wizard import flow

    return flow.wizard(config, answers, save_answers)


@hosts_app.command("setup")
def hosts_setup(hosts: HostsFile = HOSTS) -> int:
    """Create the Python environment on each host: project folder, venv, dependencies."""
    return commands.hosts.hosts_setup(hosts)


@hosts_app.command("sync")
def hosts_sync(
    profile: Annotated[str, typer.Argument(help="A [distributed:NAME] or [profile:NAME].")],
    hosts: HostsFile = HOSTS,
    config: Config = CONFIG,
) -> int:
    """Update the code, the base model and each host's share of the audio."""
    return commands.hosts.hosts_sync(config, profile, hosts)


@hosts_app.command("check")
def hosts_check(
    hosts: HostsFile = HOSTS,
    profile: Annotated[str, typer.Option(help="Also check what this [distributed:NAME] or [profile:NAME] needs.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only what was found, as JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Check all hosts and the links between them, and report everything that would stop a run."""
    return commands.hosts.hosts_check(hosts, config, profile, as_json=as_json)


@hosts_app.command("remove")
def hosts_remove(
    host: Annotated[str, typer.Argument(help="One worker's address. [default: all workers]")] = "",
    only_audio: Annotated[
        bool, typer.Option("--only-audio", help="Only recordings, their texts, and what was computed from them.")
    ] = False,
    really: Annotated[bool, typer.Option("--yes", help="Remove it; without this it is only shown.")] = False,
    hosts: HostsFile = HOSTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print only what was found, as JSON.")] = False,
) -> int:
    """Show what the hosts hold of ours, with sizes, and with --yes remove it."""
    return commands.hosts.hosts_remove(hosts, host, only_audio=only_audio, really=really, as_json=as_json)


@data_app.command("import")
def data_import(
    source: Annotated[
        str, typer.Argument(help="A file, a folder, or the id of a data set on the Hugging Face hub (owner/name).")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write: manifests, and clips where audio is cut.")],
    layout: Annotated[str, typer.Option(help="Layout, where files fit several; docs/data.md lists them.")] = "",
    audio_column: Annotated[str, typer.Option(help="Column of the audio's names; without a header, its number.")] = "",
    text_column: Annotated[str, typer.Option(help="Column of the text; without a header, its number.")] = "",
    encoding: Annotated[str, typer.Option(help="Encoding of texts that are not UTF-8, e.g. cp1251.")] = "",
    delimiter: Annotated[str, typer.Option(help="Between columns: comma, semicolon, tab or bar.")] = "",
    language: Annotated[str, typer.Option(help="Language of the speech, for the lines for config.ini.")] = "",
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep rows without text, for no_speech = train.")
    ] = False,
    keep_long: Annotated[
        bool, typer.Option("--keep-long", help="Keep clips over 30 s, for `data check --fix --model` to cut.")
    ] = False,
    split_off: Annotated[
        bool, typer.Option("--split", help="Make the missing ones of validation and test of a tenth of the clips each.")
    ] = False,
    outside: Annotated[
        list[Path] | None, typer.Option("--outside", metavar="FOLDER", help="Its audio may lie there, too; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only what was found, as JSON.")] = False,
) -> int:
    """Read recordings of any usual layout, and write manifests for config.ini. Importing again goes on."""
    return commands.data.data_import(
        source,
        out,
        layout=layout,
        audio_column=audio_column,
        text_column=text_column,
        encoding=encoding,
        delimiter=delimiter,
        language=language,
        keep_empty=keep_empty,
        keep_long=keep_long,
        split_off=split_off,
        outside=outside or (),
        as_json=as_json,
    )


@data_app.command("check")
def data_check(
    what: Annotated[
        list[str],
        typer.Argument(metavar="PROFILE|MANIFEST...", help="A [profile:NAME] with all its manifests, or manifests."),
    ],
    model: Annotated[str, typer.Option("--model", help=f"Show what it hears otherwise, and cut by it. {MODEL}")] = "",
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="Hosts that hear clips too, with --model.")
    ] = None,
    fix: Annotated[
        Path | None, typer.Option("--fix", metavar="NAME", help="Folder for new manifests without what was found.")
    ] = None,
    language: Language = "",
    settings: Set = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report. [default: .multimac/checks/NAME]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only what was found, as JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Find what spoils training: bad audio, wrong texts, leaks between parts; exit status 4 if there are errors."""
    return commands.data_check.data_check(
        config,
        what,
        settings=settings or (),
        language=language,
        model=model,
        hosts=hosts,
        fix_into=fix,
        out=out,
        as_json=as_json,
    )


@config_app.command("show")
def config_show(
    name: Annotated[
        str, typer.Argument(help="A [profile:NAME] or [distributed:NAME]; without it, all are listed.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    config: Config = CONFIG,
) -> int:
    """Print every setting of a profile: its value, where it comes from, what it means."""
    return commands.config.config_show(config, name, as_json=as_json)


@runs_app.command("list")
def runs_list(
    everything: Annotated[bool, typer.Option("--all", help="All runs, not only the newest 20.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with all figures.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """List runs, newest first: state, hosts, WER before and after, training time, speed-up.

    Speed-up is the run's clips per second divided by those of the fastest finished run on one host alone, in the same
    folder, with the same model, method, batch size, precision and training clips. Empty if there is no such run.
    """
    return commands.runs.runs_list(commands.runs.folders_of(config, runs_dir), everything=everything, as_json=as_json)


@runs_app.command("show")
def runs_show(
    run: Run = "last",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with curves and settings.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """Show a run: figures, hosts, problems, curves of loss and learning rate, and what to do next."""
    return commands.runs.runs_show(commands.runs.folders_of(config, runs_dir), run, as_json=as_json)


@runs_app.command("compare")
def runs_compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with curves and settings.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """Put runs side by side: figures, settings that differ, losses."""
    return commands.runs.runs_compare(commands.runs.folders_of(config, runs_dir), runs, as_json=as_json)


@runs_app.command("attach")
def runs_attach(run: Run = "last", runs_dir: RunsDir = None, config: Config = CONFIG) -> int:
    """Follow a running run from its first line to its end; Ctrl-C stops the run, as in its own terminal."""
    return commands.attach_stop.runs_attach(commands.runs.folders_of(config, runs_dir), run)


@runs_app.command("stop")
def runs_stop(
    run: Run = "last",
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without finishing the step or saving.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """Stop a run once it has finished its step, agreed and saved; it can be resumed."""
    return commands.attach_stop.runs_stop(commands.runs.folders_of(config, runs_dir), run, now=now)


@runs_app.command("recover")
def runs_recover(run: Run = "last", hosts: HostsFile = HOSTS) -> int:
    """Build a model from what the hosts of a run have kept, if the master or its disk is gone."""
    return commands.recover.runs_recover(run, hosts)


@runs_app.command("clean")
def runs_clean(
    runs: Annotated[list[str] | None, typer.Argument(help="Remove these runs, their models included.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    keep: Annotated[int, typer.Option(min=0, help="Keep this many of the newest runs.")] = 0,
    older_than: Annotated[str, typer.Option(help="Only runs that ended longer ago than this: 12h, 7d, 2w.")] = "",
    cache: Annotated[bool, typer.Option("--cache", help="Only what can be computed anew, .multimac/cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the list, as JSON.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> int:
    """List what can be removed and how much disk it takes: runs without a model, checkpoints of finished runs.

    Runs that can be resumed are kept, unless they are named or --older-than is given.
    """
    folders = commands.runs.folders_of(config, runs_dir)
    if cache:
        if runs or keep or older_than:
            raise ConfigError("--cache removes no runs", remedy="Leave their names, --keep and --older-than out.")
        return commands.runs.cache_clean(folders, really=yes, as_json=as_json)
    return commands.runs.runs_clean(folders, runs or [], really=yes, keep=keep, older_than=older_than, as_json=as_json)


def main(arguments: list[str] | None = None) -> int:
    """The one place where an error becomes a message and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # half a character in a name must not end what is printed
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")  # what is computed here, as environment() of a run
    try:
        with as_ctrl_c(signal.SIGTERM), warnings.catch_warnings():
            if not sys.warnoptions:  # `python -W default` shows what libraries warn of
                warnings.simplefilter("ignore")
            status = app(arguments, prog_name="multimac", standalone_mode=False)
        return int(status or ExitStatus.OK)
    except TunerError as error:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        typer.secho(harmless(f"error: {error}"), err=True, fg="red", color=False if plain else None)
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
