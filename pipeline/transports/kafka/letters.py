"""Dead letters in a Kafka topic.

Who calls it: the registry, for `embedstream dead-letters kafka://...`.
What must stay true: the topic is read without a group of the service; what was sent again is remembered as
committed offsets of a group of its own, in the order of reading, so that a letter left out on purpose
does not hide those behind it: they are remembered one by one in the commit's metadata.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import KafkaError

from pipeline.transports.kafka.admin import admin_of, words
from pipeline.transports.kafka.client_gaps import install
from pipeline.transports.kafka.consumer import committed_now
from pipeline.transports.kafka.deliveries import id_of_key, key_of_id
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.progress import parse
from pipeline.transports.kafka.security import client_settings
from pipeline.transports.kafka.watermark import PartitionWatermark
from pipeline.transports.letters import CannotReplay, DeadLetter

_WINDOW = 2**40


class KafkaLetters:
    """`letters.Letters` of one topic."""

    forgets = True

    def __init__(self, options: KafkaOptions, topic: str) -> None:
        self._options = options
        self._topic = topic
        self._group = f"{topic}.replayed"
        install()
        self._marks: dict[TopicPartition, PartitionWatermark] = {}
        self._consumer = AIOKafkaConsumer(
            **client_settings(options),
            group_id=self._group,
            enable_auto_commit=False,
            isolation_level=options.isolation_level,
            max_partition_fetch_bytes=options.max_partition_fetch_bytes,
        )
        self._producer = AIOKafkaProducer(
            **client_settings(options), acks="all", max_request_size=options.max_request_size
        )

    async def open(self) -> None:
        """Connect. Raises `ConnectionError`."""
        async with admin_of(self._options) as admin:  # tells why, where a consumer would only wait
            if self._topic not in await admin.list_topics():
                raise ConnectionError(
                    f"topic {self._topic} does not exist at {self._options.bootstrap}: name the dead-letter "
                    "topic of the service, as in kafka://host:port/embedstream.dead-letters"
                )
        await self._consumer.start()
        await self._producer.start()

    async def read(self, *, again: bool = False) -> AsyncIterator[DeadLetter]:
        """See `Letters`."""
        places = await self._places()
        self._consumer.assign(places)
        known = await committed_now(self._consumer, places)
        begins = await self._consumer.beginning_offsets(places)
        ends = await self._consumer.end_offsets(places)
        for place in places:
            commit = known.get(place)
            start = begins[place] if commit is None else max(commit.offset, begins[place])
            done = frozenset() if commit is None else parse(commit.offset, commit.metadata).done
            mark = self._marks[place] = PartitionWatermark(1, _WINDOW)
            mark.recall(start, parse(start, None))
            self._consumer.seek(place, begins[place] if again else start)
            while await self._consumer.position(place) < ends[place]:
                for record in (await self._consumer.getmany(place, timeout_ms=200)).get(place, []):
                    if record.offset >= start:
                        mark.hand_out(record.offset)
                    if record.offset in done:
                        mark.settle(record.offset)
                        if not again:
                            continue
                    headers = {name.lower(): value or b"" for name, value in record.headers}
                    yield DeadLetter(
                        position=f"{place.partition}-{record.offset}",
                        id="" if record.key is None else id_of_key(record.key),
                        body=record.value or b"",
                        headers=headers,
                        written_ms=record.timestamp,
                    )

    async def send_again(self, letter: DeadLetter, to: str | None) -> str:
        """See `Letters`."""
        letter.check()
        topic = to or letter.origin.get("topic")
        if not isinstance(topic, str) or not topic:
            raise CannotReplay(
                f"{letter.position} does not say where it came from: name a topic with --to"
            )
        if topic == self._topic:
            raise CannotReplay(
                "--to is the topic of the dead letters: it would only lie there again"
            )
        try:
            cluster = await self._producer.client.fetch_all_metadata()
            if not cluster.partitions_for_topic(topic):
                raise CannotReplay(
                    f"topic {topic} does not exist: create it, or name another with --to"
                )
            await self._producer.send_and_wait(
                topic,
                letter.body,
                key=key_of_id(letter.original_key),
                headers=list(letter.original_headers.items()),
            )
        except KafkaError as error:
            raise ConnectionError(
                f"{letter.position} was not sent again ({words(error)})"
            ) from None
        partition, _, offset = letter.position.partition("-")
        self._marks[TopicPartition(self._topic, int(partition))].settle(int(offset))
        return topic

    async def purge(self) -> int:
        """See `Letters`."""
        places = await self._places()
        begins = await self._consumer.beginning_offsets(places)
        ends = await self._consumer.end_offsets(places)
        async with admin_of(self._options) as admin:
            wanted = {
                place: RecordsToDelete(ends[place])
                for place in places
                if ends[place] > begins[place]
            }
            if wanted:
                await admin.delete_records(wanted)
        return sum(ends[place] - begins[place] for place in places)

    async def _places(self) -> list[TopicPartition]:
        numbers = (await self._consumer._client.fetch_all_metadata()).partitions_for_topic(
            self._topic
        )
        return [TopicPartition(self._topic, number) for number in sorted(numbers or ())]

    async def aclose(self) -> None:
        """See `Letters`."""
        try:
            commits = {
                place: (mark.committable, mark.memory(clean=True))
                for place, mark in self._marks.items()
                if mark.version and mark.committable is not None
            }
            if commits:
                await self._consumer.commit(commits)
        finally:
            await self._producer.stop()
            await self._consumer.stop()


async def open_letters(options: KafkaOptions, place: str) -> KafkaLetters:
    """Connected. Raises `ConnectionError`."""
    letters = KafkaLetters(options, place)
    try:
        await letters.open()
    except KafkaError as error:
        await letters.aclose()
        raise ConnectionError(f"Kafka at {options.bootstrap} refused: {words(error)}") from None
    except BaseException:
        await letters.aclose()
        raise
    return letters
