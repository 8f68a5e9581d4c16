"""Addresses of collections: ``lance:///folder#docs``, ``postgresql://user@host/db#docs``. Pure.

Who calls it: the settings and the commands, through the registry of sinks.
What must stay true: a message shows an address without its password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,47}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CollectionUrl:
    """A parsed address.

    scheme: in lower case.  collection: the fragment.  path: decoded, as it stands for a folder.
    base: the address without fragment and query, as clients take it.
    """

    scheme: str
    host: str | None
    port: int | None
    user: str | None
    password: str | None
    path: str
    collection: str
    query: dict[str, str]
    base: str

    @property
    def shown(self) -> str:
        """For messages: without password and query."""
        host = "" if self.host is None else self.host + (f":{self.port}" if self.port else "")
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{host}{self.path}#{self.collection}"

    def with_collection(self, name: str) -> str:
        """The same store, another collection."""
        query = "&".join(f"{k}={v}" for k, v in self.query.items())
        return f"{self.base}{'?' + query if query else ''}#{name}"


def parse_collection_url(url: str) -> CollectionUrl:
    """Raises `ValueError` with what is wrong and an example."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not an address of a collection: {error}") from None
    scheme = parts.scheme.lower()
    if not scheme:
        raise ValueError("not an address of a collection: such as lance:///folder#docs")
    name = unquote(parts.fragment)
    if not name:
        raise ValueError(f"{scheme}: no collection is named: add it after '#', such as #docs")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{scheme}: the collection's name takes a-z, 0-9, '_' and '-', starts with a letter "
            "and has 48 characters at most"
        )
    return CollectionUrl(
        scheme=scheme,
        host=parts.hostname,
        port=port,
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        path=unquote(parts.path),
        collection=name,
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
        base=urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")),
    )


def refuse_unknown(url: CollectionUrl, known: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` for a query parameter that a sink does not read."""
    for name in url.query:
        if name not in known:
            told = f"; known: {', '.join(known)}" if known else ""
            raise ValueError(f"{url.scheme}: unknown parameter {name!r}{told}")
