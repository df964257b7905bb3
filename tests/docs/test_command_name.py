"""What is said calls a command `multimac NAME`, which works from anywhere once the environment is active."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PLACES = ("README.md", "config.ini", "docs", "multimac", "distributed", "whisper_tuner", "gym", "tools", "cli_typer.py")
OTHER = re.compile(r"\bpython3? cli_typer\.py (?!COMMAND\b)")


def test_no_message_and_no_page_calls_a_command_by_its_file():
    files = [path for name in PLACES for path in [PROJECT / name, *(PROJECT / name).rglob("*")]]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in (".py", ".md", ".ini", ".sh")}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if OTHER.search(text)] == []
