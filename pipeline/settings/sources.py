"""Where settings come from: a TOML file, the environment, flags; laid over one another as one tree.

Who calls it: `pipeline.settings.load.load`.
What must stay true: reads nothing but its arguments and the one file; a leaf remembers its origin;
every problem is collected, none raised; what a person typed is never echoed unredacted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.settings.records import Origin

ENVIRONMENT_PREFIX = "EMBEDSTREAM_"

# Names with our prefix that are no settings: test servers, the file itself, the folder of fetched
# models (`pipeline.demo.fetch` reads it).
_NOT_SETTINGS = re.compile(r"^EMBEDSTREAM_(TEST_.*|CONFIG|MODELS)$")
# What Kubernetes injects into every pod of a namespace that has a Service called "embedstream" or
# "embedstream-something".
_KUBERNETES = re.compile(
    r"^EMBEDSTREAM_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)$"
)
_KUBERNETES_ADDRESS = re.compile(r"^(tcp|udp|sctp)://")

MAX_FILE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the settings."""

    setting: str
    message: str
    remedy: str
    origin: Origin | None = None

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin is not None and self.origin.where else ""
        return f"{self.setting}{where}: {self.message}; {self.remedy}"


class SettingsError(OperatorError):
    """All that is wrong with the settings, one `Problem` each; nothing was started."""

    exit_status = ExitStatus.USAGE

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as its source gave it."""

    value: Any
    origin: Origin
    is_text: bool = False  # environment and flags: text that the setting's type parses


Tree: TypeAlias = "dict[str, Tree | Leaf]"


@dataclass(slots=True)
class Sources:
    """The merged tree and what went wrong while it was read."""

    tree: Tree = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_sources(
    overrides: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> Sources:
    """File, then environment, then flags: later ones win, leaf by leaf."""
    sources = Sources()
    if file is not None:
        _read_file(sources, file)
    for name in sorted(environ):
        if _is_setting(name, environ[name]):
            path = [p.lower() for p in name[len(ENVIRONMENT_PREFIX) :].split("__")]
            leaf = Leaf(environ[name], Origin("environment", name), is_text=True)
            _place(sources, path, leaf, fold_case=True)
    for key, value in overrides.items():
        leaf = Leaf(value, Origin("flag", f"--set {key}"), is_text=isinstance(value, str))
        _place(sources, key.split("."), leaf, fold_case=False)
    return sources


def _is_setting(name: str, value: str) -> bool:
    if not name.startswith(ENVIRONMENT_PREFIX) or _NOT_SETTINGS.match(name):
        return False
    if "__" in name:
        return True
    injected = name.endswith("_PORT") and _KUBERNETES_ADDRESS.match(value)
    return not (injected or _KUBERNETES.match(name))


def _read_file(sources: Sources, file: Path) -> None:
    def refuse(message: str, remedy: str, line: int | None = None) -> None:
        where = f"{file}:{line}" if line is not None else str(file)
        sources.problems.append(Problem("settings file", message, remedy, Origin("file", where)))

    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        refuse(
            f"cannot be read ({error.strerror or type(error).__name__})",
            "pass an existing file with --config",
        )
        return
    if len(raw) > MAX_FILE_BYTES:
        refuse(f"is larger than {MAX_FILE_BYTES} bytes", "pass a settings file with --config")
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 at byte {error.start}", "save it as UTF-8")
        return
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = _line_of_error(error)
        refuse(f"is not TOML ({_reason(error)})", "correct that line", line)
        return
    lines = _line_index(text)
    sources.tree = _tree_of(table, file, lines, ())


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # tomllib quotes keys and characters of the file, never whole values
    return re.sub(r" \(at .*\)$", "", str(error))[:120]


def _line_of_error(error: Exception) -> int | None:
    match = re.search(r"\(at line (\d+), column \d+\)$", str(error))
    return int(match.group(1)) if match else None


def _tree_of(
    table: Mapping[str, Any], file: Path, lines: Mapping[str, int], path: tuple[str, ...]
) -> Tree:
    """TOML tables -> `Tree`; an array of tables becomes a table with the keys "0", "1", ..."""
    tree: Tree = {}
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            value = {str(i): entry for i, entry in enumerate(value)}
        if isinstance(value, dict):
            tree[key] = _tree_of(value, file, lines, here)
        else:
            line = lines.get(".".join(here))
            where = f"{file}:{line}" if line is not None else str(file)
            tree[key] = Leaf(value, Origin("file", where))
    return tree


_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-\"' ]+?)\s*=")


def _line_index(text: str) -> dict[str, int]:
    """Dotted name -> line number, for messages only: a line inside a multi-line string may mislead."""
    index: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            name = _plain(header.group(2))
            if header.group(1) == "[[":
                position = counts[name] = counts.get(name, -1) + 1
                prefix = f"{name}.{position}."
            else:
                head, _, rest = name.partition(".")
                if rest and head in counts:  # [routes.limits] after [[routes]]
                    name = f"{head}.{counts[head]}.{rest}"
                prefix = f"{name}."
        elif key := _KEY.match(line):
            index.setdefault(prefix + _plain(key.group(1)), number)
    return index


def _plain(name: str) -> str:
    return re.sub(r"""["'\s]""", "", name)


def _place(sources: Sources, path: list[str], leaf: Leaf, *, fold_case: bool) -> None:
    """Put one leaf into the tree at `path`, over what is there."""
    if not all(path):
        sources.problems.append(
            Problem(
                ".".join(path) or "(empty)",
                "is no setting name",
                "write table.key, as in batching.linger_ms",
                leaf.origin,
            )
        )
        return
    node = sources.tree
    for depth, part in enumerate(path[:-1]):
        key = _existing_key(node, part, fold_case, in_routes=depth == 1 and path[0] == "routes")
        child = node.setdefault(key, {})
        if isinstance(child, Leaf):
            sources.problems.append(
                Problem(
                    ".".join(path),
                    f"{'.'.join(path[: depth + 1])} is a value, not a table",
                    "remove one of the two",
                    leaf.origin,
                )
            )
            return
        node = child
    last = _existing_key(node, path[-1], fold_case, in_routes=False)
    if isinstance(node.get(last), dict):
        sources.problems.append(
            Problem(".".join(path), "is a table, not a value", "set one of its keys", leaf.origin)
        )
        return
    node[last] = leaf


def _existing_key(node: Tree, part: str, fold_case: bool, *, in_routes: bool) -> str:
    """The key of `node` that `part` means: routes also go by name; environment names have no
    lower case and no dash."""
    if part in node:
        return part
    if fold_case:
        for key in node:
            if key.lower().replace("-", "_") == part.replace("-", "_"):
                return key
    if in_routes:
        for key, route in node.items():
            name = route.get("name") if isinstance(route, dict) else None
            if isinstance(name, Leaf) and isinstance(name.value, str):
                same = name.value == part or (
                    fold_case and name.value.lower().replace("-", "_") == part
                )
                if same:
                    return key
    return part
