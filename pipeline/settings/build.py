"""A tree of leaves becomes the typed records: types, ranges, unknown names, one boolean rule.

Who calls it: `pipeline.settings.load.load`.
What must stay true: every problem is collected with the setting's full name and a remedy; a value
of the wrong type is never guessed; text from flags and environment is parsed by the setting's type.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import typing
from typing import Any

import msgspec
import msgspec.inspect as mi

from pipeline.redact import MASK, is_secret_name, redact
from pipeline.settings.records import LimitsOverride, Origin, Settings
from pipeline.settings.sources import Leaf, Problem, Tree
from schemas.requests import Limits

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NOT_CONFIGURED = frozenset({"origins"})
_POSITION = re.compile(r"^[0-9]{1,4}$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


# Ranges and sentences of `schemas.requests.Limits`, which stays free of operator concerns.
LIMITS_META: dict[str, msgspec.Meta] = {
    "max_record_bytes": msgspec.Meta(
        ge=256, le=2**30, description="Bytes of an encoded record -> `record_too_large`."
    ),
    "max_items": msgspec.Meta(
        ge=1, le=1_000_000, description="Items of one request -> `too_many_items`."
    ),
    "max_item_bytes": msgspec.Meta(
        ge=1, le=2**30, description="UTF-8 bytes of one text or image -> `item_too_large`."
    ),
    "max_depth": msgspec.Meta(ge=3, le=200, description="Nesting of maps and lists -> `too_deep`."),
    "max_id_bytes": msgspec.Meta(ge=8, le=65_536, description="Bytes of a request id."),
    "max_metadata_bytes": msgspec.Meta(
        ge=0, le=16 * 1024 * 1024, description="Bytes of the encoded `metadata` map."
    ),
}


class Refused(Exception):
    """A value does not fit; `remedy` says what would."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class NotBoolean(Refused):
    """G11: the text is none of the words that mean true or false."""


@functools.cache
def fields_of(record: type[msgspec.Struct]) -> dict[str, mi.Field]:
    """The configurable fields of a settings record, ranges of `Limits` included."""
    info = mi.type_info(record)
    assert isinstance(info, mi.StructType)
    fields = {f.name: f for f in info.fields if f.name not in _NOT_CONFIGURED}
    if record in (Limits, LimitsOverride):
        for name, meta in LIMITS_META.items():
            bounded = mi.Metadata(
                type=mi.IntType(ge=meta.ge, le=meta.le),  # type: ignore[arg-type]
                extra_json_schema={"description": meta.description},
            )
            fields[name] = msgspec.structs.replace(fields[name], type=bounded)
    return fields


def unwrap(kind: mi.Type) -> mi.Type:
    """The type without its documentation."""
    while isinstance(kind, mi.Metadata):
        kind = kind.type
    return kind


class Builder:
    """Builds records from a tree. One instance per load; collects problems and origins."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}

    def settings(self, tree: Tree) -> Settings | None:
        """The whole record, or None when a problem was found."""
        values = self._fields(Settings, tree, "")
        if self.problems or values is None:
            return None
        return Settings(**values, origins=dict(self.origins))

    def _refuse(self, setting: str, message: str, remedy: str, origin: Origin | None) -> None:
        self.problems.append(Problem(setting, message, remedy, origin))

    def _fields(
        self, record: type[msgspec.Struct], tree: Tree, prefix: str, base: Any = None
    ) -> dict[str, Any] | None:
        """Constructor arguments for `record`; absent keys keep the value of `base`."""
        fields = fields_of(record)
        values: dict[str, Any] = {}
        for key, node in tree.items():
            name = f"{prefix}{key}"
            if key not in fields:
                self._refuse(name, "unknown setting", _hint(key, fields), _first_origin(node))
                continue
            current = getattr(base, key, None) if base is not None else _default(fields[key])
            found, value = self._value(fields[key].type, node, name, current)
            if found:
                values[key] = value
        for key, spec in fields.items():
            if spec.required and key not in tree:
                self._refuse(
                    f"{prefix}{key}", "is missing", f"set {prefix}{key}", _first_origin(tree)
                )
        if base is not None:
            return {**{key: getattr(base, key) for key in fields}, **values}
        return values

    def _value(self, kind: mi.Type, node: Tree | Leaf, name: str, base: Any) -> tuple[bool, Any]:
        kind = unwrap(kind)
        if isinstance(kind, mi.StructType):
            return self._record(kind.cls, node, name, base)
        if isinstance(kind, mi.DictType):
            return self._named_tables(kind, node, name)
        if isinstance(kind, mi.VarTupleType) and isinstance(unwrap(kind.item_type), mi.StructType):
            return self._list_of_tables(kind, node, name)
        if isinstance(node, dict):
            origin = _first_origin(node)
            self._refuse(name, "is a value, not a table", f"write {name} = ...", origin)
            return False, None
        try:
            value = parse(kind, node.value, is_text=node.is_text)
        except Refused as refused:
            shown = MASK if is_secret_name(name) else _shown(node.value)
            self._refuse(name, f"{refused.message}, not {shown}", refused.remedy, node.origin)
            return False, None
        self.origins[name] = node.origin
        return True, value

    def _record(
        self, cls: type[msgspec.Struct], node: Tree | Leaf, name: str, base: Any
    ) -> tuple[bool, Any]:
        node_tree = self._as_tree(node, name)
        if node_tree is None:
            return False, None
        before = len(self.problems)
        values = self._fields(cls, node_tree, f"{name}.", base)
        if values is None or len(self.problems) > before:
            return False, None
        return True, cls(**values)

    def _named_tables(self, kind: mi.DictType, node: Tree | Leaf, name: str) -> tuple[bool, Any]:
        node_tree = self._as_tree(node, name)
        if node_tree is None:
            return False, None
        values = {}
        for key, child in node_tree.items():
            if not _NAME.match(key):
                self._refuse(
                    f"{name}.{_shown(key)}",
                    "is no name",
                    "use up to 64 letters, digits, dots, dashes and underscores",
                    _first_origin(child),
                )
                continue
            found, value = self._value(kind.value_type, child, f"{name}.{key}", None)
            if found:
                values[key] = value
        return True, values

    def _list_of_tables(
        self, kind: mi.VarTupleType, node: Tree | Leaf, name: str
    ) -> tuple[bool, Any]:
        if isinstance(node, Leaf) and node.value == []:
            return True, ()
        node_tree = self._as_tree(node, name)
        if node_tree is None:
            return False, None
        values = []
        numbers = sorted((key for key in node_tree if _POSITION.match(key)), key=int)
        names = [key for key in node_tree if not _POSITION.match(key)]
        for position, key in enumerate(numbers + names):
            child = node_tree[key]
            if position < len(numbers) and key != str(position):
                self._refuse(
                    f"{name}.{key}",
                    f"is no entry: the list has {position}",
                    f"use {name}.{position}, or a new name instead of the number",
                    _first_origin(child),
                )
                continue
            if position >= len(numbers) and isinstance(child, dict):
                # flags and environment make a new entry by its name
                child = {"name": Leaf(key, _first_origin(child) or Origin("flag")), **child}
            found, value = self._value(kind.item_type, child, f"{name}.{position}", None)
            if found:
                values.append(value)
        return True, tuple(values)

    def _as_tree(self, node: Tree | Leaf, name: str) -> Tree | None:
        if isinstance(node, dict):
            return node
        self._refuse(name, "is a table, not a value", "set one of its keys", node.origin)
        return None


def parse(kind: mi.Type, value: Any, *, is_text: bool) -> Any:
    """One value by its type. Raises `Refused`."""
    kind = unwrap(kind)
    if isinstance(kind, mi.UnionType):
        return _parse_union(kind, value, is_text)
    if isinstance(kind, mi.BoolType):
        return parse_bool(value)
    if isinstance(kind, mi.IntType | mi.FloatType):
        return _parse_number(kind, value, is_text)
    if isinstance(kind, mi.LiteralType):
        choices = [str(choice) for choice in kind.values]
        in_any_case = {choice.lower(): choice for choice in choices} if is_text else {}
        text = in_any_case.get(str(value).strip().lower(), value)
        if text in choices:
            return text
        raise Refused(f"must be one of {', '.join(choices)}", _close(str(value), choices))
    if isinstance(kind, mi.StrType):
        return _parse_text(kind, value)
    if isinstance(kind, mi.VarTupleType):
        return _parse_list(kind, value, is_text)
    raise AssertionError(f"no parser for {kind}; this is a bug")


def parse_bool(value: Any) -> bool:
    """G11: the one boolean rule, the same in the file, the environment and flags."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise NotBoolean("must be a boolean", "write true or false (also 1/0, yes/no, on/off)")


def _parse_union(kind: mi.UnionType, value: Any, is_text: bool) -> Any:
    members = [unwrap(member) for member in kind.types]
    optional = any(isinstance(member, mi.NoneType) for member in members)
    if optional and (value is None or (is_text and str(value).strip().lower() in ("none", ""))):
        return None
    words = [str(v) for m in members if isinstance(m, mi.LiteralType) for v in m.values]
    if isinstance(value, str) and value.strip().lower() in words:
        return value.strip().lower()
    for member in members:
        if not isinstance(member, mi.NoneType | mi.LiteralType):
            try:
                return parse(member, value, is_text=is_text)
            except Refused as refused:
                if not words:
                    raise
                quoted = " or ".join(f'"{word}"' for word in words)
                raise Refused(f"{refused.message} or {quoted}", refused.remedy) from None
    raise Refused(f"must be one of {', '.join(words)}", _close(str(value), words))


def _parse_number(kind: mi.IntType | mi.FloatType, value: Any, is_text: bool) -> int | float:
    whole = isinstance(kind, mi.IntType)
    low, high = kind.ge, kind.le
    what = "a whole number" if whole else "a number"
    asked = f"must be {what}" + (f" from {low} to {high}" if low is not None else "")
    remedy = "choose a value in that range" if low is not None else f"write {what}"
    if is_text:
        try:
            value = int(value) if whole else float(value)
        except (ValueError, OverflowError):
            raise Refused(asked, remedy) from None
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise Refused(asked, remedy)
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(asked, remedy)
    if (low is not None and value < low) or (high is not None and value > high):
        raise Refused(asked, remedy)
    return value if whole else float(value)


def _parse_text(kind: mi.StrType, value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("must be a text", "put it in quotes")
    if "\x00" in value:
        raise Refused("must not hold a NUL character", "remove it")
    if kind.min_length is not None and len(value.strip()) < kind.min_length:
        raise Refused("must not be empty", "give it a value or remove it")
    if kind.max_length is not None and len(value) > kind.max_length:
        raise Refused(f"must have at most {kind.max_length} characters", "shorten it")
    if kind.pattern is not None and re.search(kind.pattern, value) is None:
        raise Refused(f"must match {kind.pattern}", "write it that way")
    return value


def _parse_list(kind: mi.VarTupleType, value: Any, is_text: bool) -> tuple[Any, ...]:
    if is_text:
        value = [part.strip() for part in str(value).strip("[] ").split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise Refused("must be a list", "write it in brackets, or with commas in a flag")
    return tuple(parse(kind.item_type, entry, is_text=is_text) for entry in value)


def _hint(key: str, fields: typing.Iterable[str]) -> str:
    names = list(fields)
    return _close(key, names) if names else "remove it"


def _close(given: str, names: list[str]) -> str:
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(sorted(names))}"


def _default(spec: mi.Field) -> Any:
    if isinstance(spec.default, msgspec.Struct):
        return spec.default
    return None


def _shown(value: Any) -> str:
    """A given value for a message: redacted and short."""
    text = redact(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_origin(node: Tree | Leaf) -> Origin | None:
    if isinstance(node, Leaf):
        return node.origin
    for child in node.values():
        origin = _first_origin(child)
        if origin is not None:
            return origin
    return None
