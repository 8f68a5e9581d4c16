"""What the options of every transport share: one declaration per option, names, secrets.

Who calls it: `<kind>/options.py` derive from `Options`; the registry fills them from an address; the
settings page and the contradictions between routes read them.
What must stay true: building never touches a network; type, range, meaning and default stand once,
in the field; `check` names the options that contradict each other and both remedies; a secret
never appears in `repr`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import SplitResult

import msgspec
import msgspec.inspect as mi
from msgspec import Meta

SECRET_FIELDS = frozenset(
    {
        "password",
        "sasl_password",
        "ssl_password",
        "sasl_oauthbearer_client_secret",
        "sentinel_password",
        "schema_registry_password",
    }
)
"""Names that every print of a plan redacts."""

Self = TypeVar("Self", bound="Options")


def within(low: float, high: float, meaning: str) -> Meta:
    """An option that is a number from `low` to `high`."""
    return Meta(ge=low, le=high, description=meaning)


def says(meaning: str) -> Meta:
    """An option without a range."""
    return Meta(description=meaning)


MaxInFlight: TypeAlias = Annotated[int, within(1, 1_000_000, "Records handed out or buffered.")]
MaxReceive: TypeAlias = Annotated[int, within(1, 100_000, "Records handed out at once, at most.")]
ReleaseBackoffMs: TypeAlias = Annotated[
    int, within(1, 600_000, "First wait before a released delivery comes again; doubles.")
]
ReleaseBackoffMaxMs: TypeAlias = Annotated[
    int, within(1, 3_600_000, "Longest wait before a released delivery comes again.")
]
ReplyPrefixes: TypeAlias = Annotated[
    tuple[str, ...], says("A request may name only a `reply_to` that starts with one of these.")
]
RefuseDestinations: TypeAlias = Annotated[
    tuple[str, ...],
    says(
        "Names that no `reply_to` may have though a prefix allows them: the sources of other routes."
    ),
]


class Place(NamedTuple):
    """Where a transport reads or writes: equal names on one of the same `brokers` are one place.

    what     "topic", "stream", "file": for messages
    option   the option that names it
    group    the consumer group of a place read from
    pattern  regular expression: all places whose names match it, not one
    """

    brokers: frozenset[str]
    what: str
    name: str
    group: str = ""
    option: str = ""
    is_dead_letters: bool = False
    pattern: str = ""

    def beside(self, other: Place) -> bool:
        """Whether both are of one sort on one broker."""
        return self.what == other.what and not self.brokers.isdisjoint(other.brokers)

    def same(self, other: Place) -> bool:
        """Whether both are, or may be, one topic, stream or file. Of two patterns nobody can tell."""
        if self.pattern or other.pattern:
            return self.beside(other) and self._matches(other) and other._matches(self)
        return self.name == other.name and self.beside(other)

    def _matches(self, other: Place) -> bool:
        one_name = self.pattern and not other.pattern
        return not one_name or re.match(self.pattern, other.name) is not None


class Accepts(NamedTuple):
    """What a route's own limits let through, to compare with those of its broker.

    record_bytes          largest request record
    record_was_set        somebody chose it
    smallest_reply_bytes  what every reply repeats of its request at most
    """

    record_bytes: int
    record_was_set: bool
    smallest_reply_bytes: int


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every transport's options: plain frozen values that check themselves."""

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        """Options that stand in front of the `?` of an address. Raises `ValueError`."""
        raise NotImplementedError

    @classmethod
    def destination_values(cls, parts: SplitResult) -> tuple[dict[str, Any], str]:
        """The same for the address of a destination, and what the sink calls that one place.

        Raises `ValueError` where it names none.
        """
        raise ValueError(f"{parts.scheme}:// is no destination")

    def check(self) -> list[str]:
        """One line per contradiction, each naming its options; empty when all is well."""
        return self.own_problems() or self._loops()

    def own_problems(self) -> list[str]:
        """`check`, but for what is read and written in one place: a destination is only written."""
        return range_problems(self) + self.name_problems() or self.contradictions()

    def _loops(self) -> list[str]:
        written = self.writes()
        reads = [
            f"{place.option} and {read.option} are both {place.name}: a reply or dead letter would "
            "become a request; rename one"
            for place in written
            for read in self.consumes()
            if place.same(read)
        ]
        return reads + [
            f"{other.option} and {place.option} are both {place.name}; rename one"
            for n, place in enumerate(written)
            for other in written[:n]
            if place.same(other)
        ]

    def name_problems(self) -> list[str]:
        """Names that the broker would refuse."""
        return []

    def contradictions(self) -> list[str]:
        """Options that are each fine alone."""
        return self.not_above("release_backoff_ms", "release_backoff_max_ms")

    def consumes(self) -> tuple[Place, ...]:
        """Where requests are read."""
        return ()

    def writes(self) -> tuple[Place, ...]:
        """Where replies go that name no `reply_to`, if that is one place, and dead letters."""
        return ()

    def exactly_once_problem(self) -> str | None:
        """Why replies and settling cannot be one transaction here; None where they can."""
        return "it has no transaction that takes replies and settled requests: read from Kafka"

    def one_process_problem(self) -> str | None:
        """Why several processes cannot share what is read or written here; None where they can."""
        return None

    def orders(self) -> tuple[str, ...]:
        """What results may be ordered by, of what is read here; nothing where readers share a queue."""
        return ()

    def place_at(self, destination: str) -> Place:
        """Where the sink writes what is published to `destination`."""
        raise NotImplementedError

    def must_poll_within(self) -> tuple[str, float] | None:
        """Option and seconds after which the broker gives our work away unless it hears from us."""
        return None

    def refusing(self: Self, places: Iterable[Place]) -> Self:
        """With more places that no `reply_to` may name, where a request may name any."""
        if "refuse_destinations" not in self.__struct_fields__:
            return self
        refused = (*getattr(self, "refuse_destinations"), *(place.name for place in places))  # noqa: B009  not in the base
        return msgspec.structs.replace(self, refuse_destinations=tuple(dict.fromkeys(refused)))

    def not_above(self, lower: str, upper: str) -> list[str]:
        """The one problem there is when option `lower` exceeds option `upper`."""
        low, high = getattr(self, lower), getattr(self, upper)
        if low <= high:
            return []
        return [f"{lower} ({low}) exceeds {upper} ({high}): lower the one or raise the other"]

    def __repr__(self) -> str:
        """As msgspec's own, with secrets masked: options end up in tracebacks and logs."""
        shown = (
            f"{name}={'***' if name in SECRET_FIELDS and value is not None else repr(value)}"
            for name in self.__struct_fields__
            for value in [getattr(self, name)]
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@functools.cache
def declared(options: type[Options]) -> Mapping[str, mi.Field]:
    """Every option by name, with its type, range, meaning and default; inherited ones last."""
    info = mi.type_info(options)
    assert isinstance(info, mi.StructType)
    own = options.__annotations__
    return {f.name: f for f in sorted(info.fields, key=lambda field: field.name not in own)}


def range_problems(options: Options) -> list[str]:
    """One line per number that is none, or out of its range."""
    problems = []
    for name, field in declared(type(options)).items():
        value = getattr(options, name)
        found = bounds(field.type)
        if found is None or (value is None and field.default is None):
            continue
        low, high = found
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            problems.append(f"{name} is {value!r}, allowed is {low:g} to {high:g}")
    return problems


def bounds(kind: mi.Type) -> tuple[float, float] | None:
    """The range of a number; None for any other type."""
    while isinstance(kind, mi.Metadata):
        kind = kind.type
    if isinstance(kind, mi.UnionType):
        return next((found for member in kind.types if (found := bounds(member))), None)
    if isinstance(kind, mi.IntType | mi.FloatType) and kind.ge is not None and kind.le is not None:
        return kind.ge, kind.le
    return None
