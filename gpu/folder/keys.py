"""The allow-list of a model folder: every key of its JSON files is honoured, without effect, or the
reason to refuse.

Who calls it: `gpu.folder.read` and the other readers of folders, for each file that they read;
docs/models.md and `embedstream check` print from it.
What must stay true: a key that is in no row is refused by name, since what it changes in its own
library is not known here; a value that a row does not list is refused too. Plain values, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpu.faults import ModelLoadError
from gpu.folder.config_keys import READ_BY_ALL, READ_BY_TYPE
from gpu.folder.key_rows import HEAD_ONLY, NO_EFFECT, ROPE, ROWS
from gpu.folder.type_rows import FOLDER_CONFIG

Status: TypeAlias = Literal["honoured", "without effect", "refused"]


@dataclass(frozen=True, slots=True)
class Key:
    """One row. file: the name it usually has. library: whose meaning counts. only: the values that are
    computed here, where not all are; "refused" when none is. why: one line for whoever meets it."""

    file: str
    name: str
    library: str
    status: Status
    only: tuple[Any, ...] = ()
    why: str = ""


def table() -> Iterator[Key]:
    """Every row, also those read off transformers' own classes."""
    for file, rows in ROWS.items():
        yield from _rows(file, rows)
    for name in READ_BY_ALL.split():
        status = _read_status(re.fullmatch(NO_EFFECT, name) is not None)
        yield Key("config.json", name, "transformers", status, why="read by every config class")
    for model_type, names in READ_BY_TYPE.items():
        for name in names.split():
            why = f"read by the class of {model_type}"
            status = _read_status(re.fullmatch(NO_EFFECT, name) is not None)
            yield Key("config.json", name, "transformers", status, why=why)


def _rows(file: str, rows: Mapping[str, Any]) -> Iterator[Key]:
    library = rows["library"]
    for name in rows.get("honoured", "").split():
        yield Key(file, name, library, "honoured")
    for name in rows.get("inert", "").split():
        yield Key(file, name, library, "without effect")
    for name, (values, why) in rows.get("only", {}).items():
        yield Key(file, name, library, "honoured" if values else "refused", values, why)


class KeyReader:
    """Checks the files of one folder and remembers what was honoured.

    root: files are named as seen from there. ignored: key names that the operator vouches for (the
    setting `ignore_keys`).
    """

    def __init__(self, root: Path, ignored: Collection[str] = ()) -> None:
        self._root = root
        self._ignored = frozenset(ignored)
        self._honoured: dict[str, None] = {}
        self._config: dict[str, Any] = {}

    @property
    def honoured(self) -> tuple[str, ...]:
        """ "file: key", in the order in which they were met."""
        return tuple(self._honoured)

    def meaning(self, *, head: bool) -> dict[str, Any]:
        """Keys of config.json with an effect on what is computed, for the fingerprint. head: the model has
        a classification head."""
        skipped = re.compile(NO_EFFECT if head else f"{NO_EFFECT}|{HEAD_ONLY}")
        found = {name: v for name, v in self._config.items() if not skipped.fullmatch(name)}
        if found.get("use_sliding_window") is False:  # transformers then drops the window
            found = {name: v for name, v in found.items() if name not in _OF_THE_WINDOW}
        return found

    def check(self, path: Path, data: Any, kind: str, *, read: Collection[str] = ()) -> None:
        """Every key of one file. kind: a name of `ROWS`; read: keys that are honoured beside its rows, or
        whatever their value. Raises `ModelLoadError` with the key's name."""
        if not isinstance(data, Mapping):
            raise ModelLoadError(f"{path}: a JSON object is expected, not {type(data).__name__}")
        known = {row.name: row for row in _rows(kind, ROWS[kind])}
        for name, value in data.items():
            row = known.get(name) or _by_ending(kind, name)
            if name in read:
                row = Key(kind, name, ROWS[kind]["library"], "honoured")
            self._one(path, name, value, row)

    def check_config(self, path: Path, config: Mapping[str, Any], model_type: str) -> None:
        """config.json of a transformers model whose class is transformers' own."""
        known = {row.name: row for row in _rows("config.json", ROWS["config.json"])}
        family = {
            row.name: row
            for row in _rows("config.json", FOLDER_CONFIG.get(model_type, {"library": ""}))
        }
        read = {*READ_BY_ALL.split(), *READ_BY_TYPE.get(model_type, "").split()}
        for name, value in config.items():
            row = family.get(name)
            if row is None and name in read:
                without = re.fullmatch(NO_EFFECT, name) is not None
                row = Key("config.json", name, "transformers", _read_status(without))
            row = row or known.get(name)
            self._one(path, name, value, row)
            if row is not None and row.status == "honoured" and name not in self._ignored:
                self._config[name if "." not in model_type else f"{model_type}.{name}"] = value
            if isinstance(value, Mapping) and f"{model_type}.{name}" in READ_BY_TYPE:
                self.check_config(path, value, f"{model_type}.{name}")
        for name in ("rope_parameters", "rope_scaling"):
            self._check_rope(path, name, config.get(name))

    def _check_rope(self, path: Path, name: str, rope: Any) -> None:
        if not isinstance(rope, Mapping):
            return
        for key, value in rope.items():
            if isinstance(value, Mapping):  # one entry for each kind of layer
                self._check_rope(path, f"{name}.{key}", value)
            elif key not in ROPE.split() and key not in self._ignored:
                raise _unknown(path, f"{name}.{key}", value)

    def _one(self, path: Path, name: str, value: Any, row: Key | None) -> None:
        if name in self._ignored:
            self._remember(path, f"{name} (ignored, as `ignore_keys` says)")
        elif row is None:
            raise _unknown(path, name, value)
        elif row.status == "refused" or (row.only and not _among(value, row.only)):
            raise ModelLoadError(
                f"{path}: {name} = {_short(value)} is not supported: {row.why}"
                if row.why
                else f"{path}: {name} = {_short(value)} is not supported; supported: "
                + ", ".join(map(_short, row.only))
            )
        elif row.status == "honoured":
            self._remember(path, name)

    def _remember(self, path: Path, name: str) -> None:
        file = path.relative_to(self._root) if path.is_relative_to(self._root) else path.name
        self._honoured[f"{file}: {name}"] = None


_OF_THE_WINDOW = ("sliding_window", "max_window_layers")


def _read_status(without: bool) -> Status:
    return "without effect" if without else "honoured"


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """As in JSON: True is not 1."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _by_ending(kind: str, name: str) -> Key | None:
    """transformers takes any `*_token` of tokenizer_config.json as a special token of the model."""
    if kind == "tokenizer_config.json" and name.endswith("_token"):
        return Key(kind, name, "transformers", "honoured")
    return None


def _unknown(path: Path, name: str, value: Any) -> ModelLoadError:
    key = name.rsplit(".", 1)[-1]
    return ModelLoadError(
        f"{path}: the key {name} (= {_short(value)}) is not one that embedstream understands, so the "
        "vectors might silently be others than its own library's; if you know that it changes nothing, "
        f'remove it or set `ignore_keys = ["{key}"]` for this model'
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
