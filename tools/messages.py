"""docs/messages.md: each error's words and remedy as they stand in the source, read with `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import exogym.errors
from whisper_tuner import errors

FOUND, ROW = "found", "row"
# Exit status, or what else becomes of a message -> heading, in the order of the page.
GROUPS = {
    "3": "Exit status 3: config.ini, a flag, the hosts file, or a program that is not installed",
    "4": "Exit status 4: a manifest, an audio file or a model",
    ROW: "Rows of a manifest that are left out (exit status 4 with bad_rows = refuse)",
    FOUND: "What the start of a run, hosts check and doctor find (exit status 5 if a run cannot begin)",
    "5": "Exit status 5: a host: SSH, its Python, disk or files",
    "6": "Exit status 6: a run that ended early",
}
INTRODUCTION = """\
Search this page for a few words of the message on your screen. `<...>` stands for what differs from case to
case, `(... / ...)` for one of several, `[...]` for what may be missing. A host's address, or a file and its line, may
come before the message. Once the first round is done, an error on one host loses only that host, and the run goes on:
[lost-hosts.md](lost-hosts.md#what-a-run-says-about-its-hosts).

Other exit statuses: 0, all went well; 1, a bug in this program, shown with its traceback; 2, a wrong command
line; 130, stopped with Ctrl-C or SIGTERM."""
NEAREST = "[, did you mean <name>?]"  # what exogym.config.nearest gives
Message = tuple[str, str, str]  # group, text, remedy


def page(paths: Iterable[Path], note: str) -> str:
    found = collect(paths)
    parts = ["# Messages", note, INTRODUCTION]
    for group, heading in GROUPS.items():
        rows = sorted((_fixed(text).lower(), text, remedy) for kind, text, remedy in found if kind == group)
        lines = [f"| {_code(text)} | {_escape(remedy)} |" for _, text, remedy in rows]
        parts += [f"## {heading}", "\n".join(["| message | what to do |", "|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"


def collect(paths: Iterable[Path]) -> set[Message]:
    """What is given to each error class, and to each function that takes a remedy."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    groups = _exit_statuses() | {"BadRow": ROW}
    groups = {c.name: groups[base] for c in classes for base in map(ast.unparse, c.bases) if base in groups} | groups
    imported = {name: taker for tree in trees.values() for name, taker in _takers(tree.body, groups).items()}
    imported["Finding"] = (FOUND, 9)  # a class
    found = set()
    for path, tree in trees.items():
        read_by_users = {"ValueError": "3"} if {path.stem, path.parent.name} & {"settings", "wizard"} else {}
        reader = _Reader(groups | read_by_users, imported | _takers(ast.walk(tree), groups))
        reader.texts |= _imported_constants(tree, trees.values())
        reader.visit(tree)  # learns what functions return
        reader.found.clear()
        reader.visit(tree)
        found |= reader.found
    return found


def _imported_constants(tree: ast.Module, trees: Iterable[ast.Module]) -> dict[str, str]:
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    reader = _Reader({}, {})
    for node in (node for other in trees if other is not tree for node in other.body):
        is_constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {n for n in names if n.isupper()}
        if is_constant or (isinstance(node, ast.FunctionDef) and node.name in names):
            reader.visit(node)
    return reader.texts


def _exit_statuses() -> dict[str, str]:
    """Error class -> exit status; what a worker raises ends the run that it is part of."""
    classes = {name: cls for name, cls in (vars(exogym.errors) | vars(errors)).items() if isinstance(cls, type)}
    settings = {name: "3" for name, cls in classes.items() if issubclass(cls, ValueError)}
    return {name: str(int(getattr(cls, "exit_status", 6))) for name, cls in classes.items()} | settings


def _takers(nodes: Iterable[ast.AST], groups: dict[str, str]) -> dict[str, tuple[str, int]]:
    """Function with a parameter `remedy` -> the group of the error that it makes, and the place of that parameter."""
    takers = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and re.search(r"\bremedy\b", ast.unparse(node.args)):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            made = [groups[call] for call in re.findall(r"(\w+)\(", ast.unparse(node)) if call in groups]
            takers[node.name] = (made[0] if made else FOUND, names.index("remedy") if "remedy" in names else len(names))
    return takers


class _Reader(ast.NodeVisitor):
    """Reads a module from top to bottom; a variable stands for the text that it was given last."""

    def __init__(self, groups: dict[str, str], takers: dict[str, tuple[str, int]]):
        self.takers = {name: (group, 9) for name, group in groups.items()} | takers
        self.texts: dict[str, str] = {}
        self.found: set[Message] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside, self.texts = self.texts, dict(self.texts)
        self.generic_visit(node)
        returned = next((self.text(r.value) for r in ast.walk(node) if isinstance(r, ast.Return) and r.value), "")
        self.texts = outside | {f"{node.name}()": returned}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self.texts[ast.unparse(node.targets[0])] = self.text(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        group, place = self.takers.get(_name(node.func), ("", 0))
        given = [self.text(argument) for argument in node.args]
        given += [self.text(keyword.value) for keyword in node.keywords if keyword.arg == "what"]
        remedy = [self.text(keyword.value) for keyword in node.keywords if keyword.arg == "remedy"]
        message = next(filter(_says_something, given[:place]), "")
        if group and message:
            self.found.add((group, message, "".join(remedy or given[place : place + 1])))

    def text(self, node: ast.expr) -> str:
        """With <name> for what only a run knows, and " / " between alternatives."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.text, node.values))
        if isinstance(node, ast.FormattedValue):
            text = self.text(node.value)
            return f"({text})" if " / " in text else text
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left) + self.text(node.right)
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            either = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
            texts = [text for text in map(self.text, either) if text]
            return " / ".join(texts) if len(texts) > 1 else f"[{''.join(texts)}]"
        source = f"{_name(node.func)}()" if isinstance(node, ast.Call) else ast.unparse(node)
        known = NEAREST if source == "nearest()" else self.texts.get(source, "")
        is_telling = _says_something(known) or (known and source.isupper())
        return known if is_telling else f"<{_name(node).strip('_').replace('_', ' ').lower()}>"


def _name(node: ast.expr) -> str:
    """The last word: `strerror` of `error.strerror`, `known` of `", ".join(sorted(known))`."""
    source = re.sub(r"\[[^]]*:[^]]*\]|\.strip\(\)", "", ast.unparse(node))  # neither says of what
    return (re.findall(r"[^\W\d]\w*", source) or ["..."])[-1]


def _fixed(text: str) -> str:
    """What of `text` is the same in every case."""
    return re.sub(r"<[^<>]*>", "", text).strip(" .,:;'/()")


def _says_something(text: str) -> bool:
    return re.search(r"\w[^\w/]*\s[^\w/]*\w", _fixed(text)) is not None


def _code(text: str) -> str:
    return f"`` {_cell(text)} ``" if "`" in text else f"`{_cell(text)}`"


def _escape(text: str) -> str:
    """Fields and stars as they are, which Markdown would take for its own."""
    return _cell(text).replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
