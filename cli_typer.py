"""The command line: collect the commands, call one, turn the outcome into an exit code. `--help` answers at once."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
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

from multimac.commands import options
from whisper_tuner.errors import ExitStatus, TunerError
from whisper_tuner.files import refusal
from whisper_tuner.interrupts import as_ctrl_c

PROJECT = Path(__file__).resolve().parent
if str(PROJECT / "gym") not in sys.path:
    sys.path.insert(0, str(PROJECT / "gym"))  # exogym lives there; see docs/architecture.md

# The words of a command; its function, without other decorators, to the end of the docstring; the function's name.
HEAD = re.compile(r'^@command\("([^"]+)"\)\n(?:@[^\n]*\n)*(def (\w+).*?\n    """.*?"""\n)', re.MULTILINE | re.DOTALL)
# In the order of --help; files that are not named follow.
ORDER = ["train", "evaluate", "transcribe", "export", "report", "doctor", "selftest", "flow", "data", "data_check"]
ORDER += ["hosts", "config", "runs", "attach_stop", "recover", "clean", "engines"]

app = typer.Typer(
    help="Fine-tune OpenAI's Whisper on your own speech, on one Mac or on all the Macs you own.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time that --help takes
)
GROUPS = {
    "data": typer.Typer(help="Bring in recordings of any usual layout, and check them.", no_args_is_help=True),
    "hosts": typer.Typer(help="Prepare and check the machines of a hosts file.", no_args_is_help=True),
    "config": typer.Typer(help="Show the settings of config.ini.", no_args_is_help=True),
    "runs": typer.Typer(help="List, compare, follow and stop runs; free disk space.", no_args_is_help=True),
}


def collect() -> None:
    """Add all functions that are marked `@command`, known by their heads alone: signature and docstring.

    Importing a command's file may take seconds, such as for torch. It is imported when the command is called.
    """
    files = [*(PROJECT / "multimac" / "commands").glob("*.py"), PROJECT / "multimac" / "wizard" / "flow.py"]
    for file in sorted(files, key=lambda file: ([*ORDER, file.stem].index(file.stem), file.stem)):
        module = ".".join(file.relative_to(PROJECT).with_suffix("").parts)
        for words, head, name in HEAD.findall(file.read_text(encoding="utf-8")):
            defined = {**vars(options), "typer": typer, "ExitStatus": ExitStatus, "__name__": module}
            exec(compile(head, file, "exec", dont_inherit=True), defined)  # else typer evaluates each type
            *group, last = words.split()
            whole = loaded_when_called(defined[name])
            summary = inspect.cleandoc(whole.__doc__ or "").split("\n\n")[0]
            # In the list of commands it is wrapped then, not cut.
            (GROUPS[group[0]] if group else app).command(last, short_help=summary)(whole)


def loaded_when_called(head: Callable) -> Callable:
    """Return a function with the signature and docstring of `head`, which calls the whole function."""

    @functools.wraps(head)
    def call(**arguments):
        return getattr(importlib.import_module(head.__module__), head.__name__)(**arguments)

    return call


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


for group, commands in GROUPS.items():
    app.add_typer(commands, name=group, short_help=commands.info.help)
collect()


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
        return show(error)
    except (KeyboardInterrupt, typer.Abort):
        return ExitStatus.INTERRUPTED
    except OSError as error:
        if not (refused := refusal(error)):
            raise
        return show(refused)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            as_setting(error)
            error.show()
            return ExitStatus.USAGE
        raise


def as_setting(error: Exception) -> None:
    """Suggest --set, or a profile, where an option that does not exist is one of a profile's settings."""
    key = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    if context := hasattr(error, "possibilities") and getattr(error, "ctx", None):
        from whisper_tuner.config import Profile

        if key in Profile.__dataclass_fields__:
            takes_some = any("--set" in each.opts for each in context.command.params)
            error.possibilities = [f"--set {key}=VALUE" if takes_some else f"a profile's {key} in config.ini"]


def show(error: TunerError) -> ExitStatus:
    from multimac.view.terminal import Console  # not needed for --help

    Console(stderr=True).print(f"error: {error.told}", style="red", soft_wrap=True)
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
