"""Dotted paths into JSON values, and text templates over them. Pure.

Who calls it: the document mapping.
What must stay true: an error names the path and never the value; a path through a list means every
element; what a template asks for and is not there is an error unless it is marked with ``?``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""What a path that leads nowhere gives; JSON null counts as absent."""


def lookup(value: Any, path: str) -> Any:
    """The value at a dotted path, `ABSENT` when there is none.

    A list is walked through element by element (``sections.title`` is the list of titles) unless
    the next part is a number, which picks one. A field whose name holds dots is found as well.
    """
    if value is None:
        return ABSENT
    if not path:
        return value
    head, _, rest = path.partition(".")
    if isinstance(value, list):
        if head.isdecimal():
            return lookup(value[int(head)], rest) if int(head) < len(value) else ABSENT
        found = [one for one in (lookup(each, path) for each in value) if one is not ABSENT]
        return found or ABSENT
    if not isinstance(value, dict):
        return ABSENT
    if path in value:
        return ABSENT if value[path] is None else value[path]
    return lookup(value[head], rest) if head in value else ABSENT


def scalars(value: Any, path: str) -> Iterator[str]:
    """The texts in a value: strings, numbers, booleans, and lists of them. Raises on an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, int | float):
        yield str(value)
    elif isinstance(value, list):
        for one in value:
            if one is not None:
                yield from scalars(one, path)
    else:
        raise InvalidRequest(f"$.{path} is an object: name one of its fields", path=f"$.{path}")


_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class _Field:
    path: str
    optional: bool


class Template:
    """A text with fields: ``{title}\\n\\n{body?}``. Braces are doubled to mean themselves.

    Raises:
        ValueError: a brace without its partner, or an empty field.
    """

    def __init__(self, template: str) -> None:
        self._parts: list[str | _Field] = []
        end = 0
        for match in _FIELD.finditer(template):
            self._parts.append(template[end : match.start()])
            end = match.end()
            if match[0] in ("{{", "}}"):
                self._parts.append(match[0][0])
            elif match[1] is None:
                raise ValueError(f"a brace at {match.start()} has no partner; double it to mean it")
            else:
                path = match[1].strip()
                optional = path.endswith("?")
                path = path.rstrip("?").removeprefix("$.")
                if not path or any(not part for part in path.split(".")):
                    raise ValueError(f"{match[0]!r} names no field")
                self._parts.append(_Field(path, optional))
        self._parts.append(template[end:])

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields it reads."""
        return tuple(part.path for part in self._parts if isinstance(part, _Field))

    def render(self, document: Any) -> str:
        """The text of one document. Raises `InvalidRequest` with the path."""
        return "".join(
            part if isinstance(part, str) else self._text(document, part) for part in self._parts
        )

    @staticmethod
    def _text(document: Any, field: _Field) -> str:
        value = lookup(document, field.path)
        if value is ABSENT:
            if field.optional:
                return ""
            raise InvalidRequest(
                f"$.{field.path} is missing; write {{{field.path}?}} if it may be",
                path=f"$.{field.path}",
            )
        return "\n".join(scalars(value, field.path))
