"""An address in one line of text -> the options that it spells.

Who calls it: `pipeline.transports.registry`; the options of each kind read their own part of it.
What must stay true: pure; a parameter that is no option is refused by its name, and so is a value
that is not of the option's type; no message repeats what may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec.inspect as mi

from pipeline.settings.build import Refused, parse, unwrap
from pipeline.transports.options import Options, declared

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_OPTION = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_CUT_LOGIN = (
    "an '@' behind the host is written %40; when it ends a password, write '/' in that as %2F, "
    "'?' as %3F and '#' as %23"
)

T = TypeVar("T", bound=Options)


def scheme_of(url: str) -> str | None:
    """The scheme in lower case; None without `://` (`file:` needs none)."""
    found = _SCHEME.match(url)
    if found is None or (found[2] is None and found[1].lower() != "file"):
        return None
    return found[1].lower()


def plain(text: str) -> str:
    """`text` with %XX decoded; `+` is a plus. Raises `ValueError` when the bytes are no UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("the address holds %XX bytes that are no UTF-8") from None


def read_address(url: str, options: type[T]) -> T:
    """A source's address, whose scheme belongs to `options`.

    Raises `ValueError` with one line; `check` has been passed.
    """
    with _refusals(url, options) as parts:
        read = _build(options, parts, options.address_values(parts))
        _raise_any(read.check())
    return read


def read_destination(url: str, options: type[T]) -> tuple[T, str]:
    """The same of a destination, and what its sink calls the one place where replies go."""
    with _refusals(url, options) as parts:
        values, place = options.destination_values(parts)
        read = _build(options, parts, values)
        _raise_any(read.own_problems())
    return read, place


@contextmanager
def _refusals(url: str, options: type[Options]) -> Iterator[SplitResult]:
    """The parts of `url`; what is refused inside gets the scheme, and repeats no login."""
    scheme = scheme_of(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may quote the password
        raise ValueError(
            f"{scheme}: the host cannot be read; '[' and ']' in a password are written %5B and %5D"
        ) from None
    try:
        if parts.fragment or url.endswith("#"):
            raise ValueError("a '#' in the address must be written as %23")
        yield parts
    except ValueError as error:
        if _holds_cut_login(parts, options):
            raise ValueError(f"{scheme}: {_CUT_LOGIN}") from None
        raise ValueError(f"{scheme}: {error}") from None


def _build(options: type[T], parts: SplitResult, values: dict[str, Any]) -> T:
    return options(**values, **_query(options, parts.query, given=frozenset(values)))


def _raise_any(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _holds_cut_login(parts: SplitResult, options: type[Options]) -> bool:
    """Whether the `@` that ends a login may stand behind what was taken for the host."""
    pairs = parts.query.split("&")
    unknown = [pair for pair in pairs if pair.partition("=")[0] not in declared(options)]
    return "@" not in parts.netloc and "@" in "".join([parts.path, *unknown, parts.fragment])


def _query(options: type[Options], query: str, given: frozenset[str]) -> dict[str, Any]:
    fields = declared(options)
    values: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        quoted, equals, text = pair.partition("=")
        name = plain(quoted)
        if not equals or not _OPTION.fullmatch(name):
            raise ValueError("a parameter is written name=value, with & between two")
        if name not in fields:
            raise ValueError(f"unknown parameter {name!r}; known are {', '.join(sorted(fields))}")
        if name in given:
            raise ValueError(f"{name!r} is given twice: before the ? and as a parameter")
        if name in values:
            raise ValueError(f"parameter {name!r} is given twice")
        try:
            values[name] = parse(_given_kind(fields[name].type), plain(text), is_text=True)
        except Refused as refused:
            raise ValueError(f"{name} {refused.message}; {refused.remedy}") from None
    return values


def _given_kind(kind: mi.Type) -> mi.Type:
    """The type without "or None": who names an option gives it a value."""
    kind = unwrap(kind)
    if isinstance(kind, mi.UnionType):
        members = tuple(m for m in kind.types if not isinstance(unwrap(m), mi.NoneType))
        return members[0] if len(members) == 1 else mi.UnionType(members)
    return kind
