"""Collects the error messages of the source with `ast`: text, remedy, exit status. Nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# What an expression inside a message stands for, where its own name would tell a reader nothing.
NAMES = {
    **dict.fromkeys(("strerror", "error", "exc", "reason", "why", "errors"), "reason"),
    **dict.fromkeys(("lineno", "number"), "line"),
    **dict.fromkeys(("source", "place", "where"), "place"),
    **dict.fromkeys(("said", "rest", "stderr", "stdout", "last", "listed", "lines"), "output"),
    **{"run_dir": "run folder", "other": "other host", "target": "user@host", "text": "value", "colno": "column"},
    **{"metadata": "what the key means", "meta": "choices", "msg": "reason", "hello": "system", "nearest": "name"},
    **{"parser": "sections", "stated": "value", "bad": "line", "there": "address"},
}
WARNING = "a warning"
LOADING = "loading"  # a context that makes a ModelError of whatever is raised inside
EITHER = "\x00"  # between alternatives, until the text is whole
# The same for whole expressions.
EXPRESSIONS = {
    "where[0]": "name",
    "where[1]": "port",
    "', '.join(map(str, folders))": "runs folder",
    "error.args[0]": "reason",
}


@dataclass(frozen=True, order=True)
class Message:
    module: str
    text: str
    remedy: str
    kind: str


def collect(paths: list[Path], root: Path, kinds: set[str]) -> list[Message]:
    """Every construction of an error of these `kinds`, sorted; once where two are alike."""
    found: set[Message] = set()
    for path in paths:
        found |= set(_Module(path, root, kinds).messages())
    return sorted(found)


class _Module:
    def __init__(self, path: Path, root: Path, kinds: set[str]):
        self.name = path.relative_to(root).as_posix()
        self.kinds = kinds
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        self.functions = {function.name: function for function in functions}
        # Functions that make an error of the message that they are given.
        self.makers = {f.name: f for f in functions if f.returns and ast.unparse(f.returns) in kinds}
        # Functions that take down what is wrong with a host (the preflight's).
        self.tellers = {f.name: f for f in functions if {"what", "remedy"} <= {a.arg for a in f.args.args}}

    def messages(self) -> Iterator[Message]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := _called(node)):
                if name == LOADING:
                    message = self._message(node, "ModelError", {})
                    found = [replace(message, text=f"{message.text}: <reason>")]
                elif name in self.kinds and self._made_of_parameters(node) is None:
                    found = [self._message(node, name, {})]
                else:
                    found = self._through(node, self.makers[name]) if name in self.makers else self._told(node, name)
                # Without a word of its own it only passes another message on.
                yield from (message for message in found if re.search(r"\w", re.sub(r"<[^>]*>|HOST", "", message.text)))

    def _through(self, call: ast.Call, maker: ast.FunctionDef) -> Iterator[Message]:
        """The messages of a call of a function that makes errors."""
        given = self._arguments(call, maker)
        for node in ast.walk(maker):
            if isinstance(node, ast.Call) and _called(node) in self.kinds and self._made_of_parameters(node) is maker:
                yield self._message(node, _called(node), given)

    def _told(self, call: ast.Call, name: str) -> Iterator[Message]:
        if name in self.tellers and not any(isinstance(argument, ast.Starred) for argument in call.args):
            given = self._arguments(call, self.tellers[name])
            yield Message(self.name, _tidy(f"HOST: {given['what']}"), _tidy(given["remedy"]), _severity(call))

    def _made_of_parameters(self, call: ast.Call) -> ast.FunctionDef | None:
        """The function around, if it makes errors and this one's message is among its parameters."""
        function = self._around(call)
        if function is None or self.makers.get(function.name) is not function:
            return None
        parameters = {argument.arg for argument in function.args.args + function.args.kwonlyargs}
        message = self._first_text(call)
        used = {node.id for node in ast.walk(message) if isinstance(node, ast.Name)} if message else set()
        return function if used & parameters & {"message", "text", "problem"} else None

    def _arguments(self, call: ast.Call, function: ast.FunctionDef) -> dict[str, str]:
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
        keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        defaults |= {argument.arg: default for argument, default in keywords if default}
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        return {name: self.text(value, {}) for name, value in (defaults | given).items()}

    def _message(self, call: ast.Call, kind: str, given: Mapping[str, str]) -> Message:
        text = self._first_text(call)
        host = f"{self.text(call.args[0], given)}: " if kind.startswith("Host") and len(call.args) > 1 else ""
        host = "" if host == "<reason>: " else "HOST: " if host else ""
        remedy = next((keyword.value for keyword in call.keywords if keyword.arg == "remedy"), None)
        words = self.text(text, given) if text else ""
        return Message(self.name, _tidy(host + words), _tidy(self.text(remedy, given)) if remedy else "", kind)

    def _first_text(self, call: ast.Call) -> ast.expr | None:
        if not call.args:
            return None
        second = _called(call).startswith(("Host", "_BadRow")) and len(call.args) > 1
        return call.args[1] if second else call.args[0]

    def text(self, node: ast.expr, given: Mapping[str, str], depth: int = 0) -> str:
        """`node` as a reader would meet it, with <names> for what only a run knows."""
        if depth > 6:
            return f"<{_name(node)}>"
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, given, depth + 1) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._field(node.value, given, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, given, depth + 1) + self.text(node.right, given, depth + 1)
        if isinstance(node, ast.IfExp):
            either = [self.text(part, given, depth + 1) for part in (node.body, node.orelse)]
            return EITHER.join(dict.fromkeys(filter(None, either)))
        if isinstance(node, ast.Name):
            return self._variable(node, given, depth)
        if isinstance(node, ast.Call) and (function := self.functions.get(_called(node))) and _gives_text(function):
            return self._returned(function, depth)
        if isinstance(node, ast.BoolOp):
            return self.text(node.values[0], given, depth + 1)
        return f"<{_name(node)}>"

    def _field(self, node: ast.expr, given: Mapping[str, str], depth: int) -> str:
        if isinstance(node, ast.Call) and _called(node) == "nearest":
            return "[, did you mean <name>?]"
        if isinstance(node, (ast.IfExp, ast.Constant)) or (isinstance(node, ast.Name) and node.id in given):
            return _grouped(self.text(node, given, depth + 1))
        if isinstance(node, ast.Name) and (values := self._assigned(node)) and all(map(_is_text, values)):
            return _grouped(self._variable(node, given, depth + 1))
        if isinstance(node, ast.Call) and (function := self.functions.get(_called(node))) and _gives_text(function):
            return self._returned(function, depth)
        if isinstance(node, ast.Name) and (fixed := self._constant(node.id)) is not None:
            return fixed
        return f"<{_name(node)}>"

    def _variable(self, node: ast.Name, given: Mapping[str, str], depth: int) -> str:
        if node.id in given:
            return given[node.id]
        if (fixed := self._constant(node.id)) is not None:
            return fixed
        values = [self.text(value, given, depth + 1) for value in self._assigned(node)]
        return EITHER.join(dict.fromkeys(filter(None, values))) or f"<{_name(node)}>"

    def _assigned(self, node: ast.Name) -> list[ast.expr]:
        """What the function around assigns to a name."""
        function = self._around(node)
        inside = ast.walk(function) if function else ()
        simple = [n for n in inside if isinstance(n, (ast.Assign, ast.AugAssign, ast.NamedExpr))]
        values = []
        for assignment in simple:
            targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                values.append(assignment.value)
        return values

    def _constant(self, name: str) -> str | None:
        """A text that the module itself defines."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return self.text(node.value, {}) if isinstance(node.value, (ast.Constant, ast.BinOp)) else None
        return None

    def _returned(self, function: ast.FunctionDef, depth: int) -> str:
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        texts = [self.text(value, {}, depth + 1) for value in returns]
        return EITHER.join(dict.fromkeys(filter(None, texts)))

    def _around(self, node: ast.AST) -> ast.FunctionDef | None:
        while (node := self.parents.get(node)) is not None:
            if isinstance(node, ast.FunctionDef):
                return node
        return None


def _called(call: ast.Call) -> str:
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _severity(call: ast.Call) -> str:
    return WARNING if any(keyword.arg == "severity" for keyword in call.keywords) else "HostError"


def _is_text(node: ast.expr) -> bool:
    """Whether all of it stands in the source."""
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _grouped(text: str) -> str:
    return f"({text})" if EITHER in text and not text.startswith("(") else text


def _gives_text(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns) == "str"


def _name(node: ast.expr) -> str:
    """A word or two for an expression."""
    if (known := EXPRESSIONS.get(ast.unparse(node))) is not None:
        return known
    if isinstance(node, ast.Call) and _called(node) == "len":
        return "count"
    if isinstance(node, ast.Name):
        word = node.id
    elif isinstance(node, ast.Attribute):
        word = _name(node.value) if node.attr in ("name", "args", "__name__") else node.attr
    elif isinstance(node, ast.Call):
        # ', '.join(known), sorted(names), error.args[0].strip(): what it is made of
        inner = node.args[:1] or ([node.func.value] if isinstance(node.func, ast.Attribute) else [node.func])
        word = _name(inner[0])
    elif isinstance(node, (ast.Subscript, ast.Starred, ast.FormattedValue, ast.Await)):
        word = _name(node.value)
    elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        word = _name(node.generators[0].iter)
    elif isinstance(node, ast.BoolOp):
        word = _name(node.values[0])
    elif isinstance(node, ast.BinOp):
        word = _name(node.left)
    elif isinstance(node, ast.IfExp):
        word = _name(node.body)
    else:
        word = "value"
    return NAMES.get(word, word).strip("_").replace("_", " ").lower() or "value"


def _tidy(text: str) -> str:
    text = re.sub(r"\s+", " ", text.replace(EITHER, " / ")).strip()
    return text.replace("<path><line>", "<path>:<line>")
