"""Settings: precedence, refusals, contradictions, redaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import given

from actors.admission import LaneBudget
from actors.packing import PackingPolicy
from actors.publish import PublishPolicy
from pipeline.settings import page as settings_doc
from pipeline.settings import records
from pipeline.settings.build import LIMITS_META, fields_of, unwrap
from pipeline.settings.load import (
    ModelSettings,
    RouteSettings,
    Settings,
    SettingsError,
    explain,
    load,
    redacted,
    route_options,
)
from pipeline.transports.files.options import FileOptions
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.redis.options import RedisOptions
from schemas.requests import Limits

ROOT = Path(__file__).parents[4]

TOML = """\
[models.minilm]
path = "all-MiniLM-L6-v2"
default_for = ["embed"]

[models.ranker]
path = "ms-marco"

[[routes]]
name = "kafka-requests"
source = "kafka://localhost:9092/embedstream.requests?group=embedstream"
model = "minilm"
rerank_model = "ranker"

[routes.limits]
max_items = 64

[[routes]]
name = "redis-rpc"
source = "redis://:hunter2@localhost:6379/embedstream.requests?group=embedstream"

[batching]
linger_ms = 7.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.toml"
    path.write_text(TOML)
    return path


def refused(overrides: dict[str, Any], environ: dict[str, str] | None = None, **kwargs: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(overrides, environ or {}, kwargs.pop("file", None), **kwargs)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    return path


# --- precedence ------------------------------------------------------------------------------------


def test_each_source_beats_the_one_before(file: Path) -> None:
    assert load({}, {}, None).batching.linger_ms == 5.0
    assert load({}, {}, file).batching.linger_ms == 7.5
    environ = {"EMBEDSTREAM_BATCHING__LINGER_MS": "3"}
    assert load({}, environ, file).batching.linger_ms == 3.0
    assert load({"batching.linger_ms": "1"}, environ, file).batching.linger_ms == 1.0


def test_a_value_remembers_where_it_came_from(file: Path) -> None:
    settings = load({"log.level": "debug"}, {"EMBEDSTREAM_MODELS__MINILM__MAX_TOKENS": "128"}, file)
    origin = {e.name: str(e.origin) for e in explain(settings)}
    assert (
        origin["batching.linger_ms"] == f"{file}:{TOML.splitlines().index('linger_ms = 7.5') + 1}"
    )
    assert origin["routes.0.limits.max_items"].startswith(f"{file}:")
    assert origin["models.minilm.max_tokens"] == "EMBEDSTREAM_MODELS__MINILM__MAX_TOKENS"
    assert origin["log.level"] == "--set log.level"
    assert origin["health.port"] == "default"
    assert origin["routes.1.lane"] == "default for redis://"


def test_routes_go_by_position_or_by_name(file: Path) -> None:
    settings = load(
        {"routes.redis-rpc.lane": "bulk", "routes.0.lane": "interactive"},
        {"EMBEDSTREAM_ROUTES__KAFKA_REQUESTS__MODEL": "ranker"},
        file,
    )
    assert [r.lane for r in settings.routes] == ["interactive", "bulk"]
    assert settings.routes[0].model == "ranker"


def test_a_flag_or_the_environment_can_add_a_route(file: Path) -> None:
    settings = load(
        {"routes.files.source": "file:///in.jsonl?replies=/out.jsonl"},
        {"EMBEDSTREAM_ROUTES__MORE__SOURCE": "redis://other/jobs"},
        file,
    )
    assert [r.name for r in settings.routes] == ["kafka-requests", "redis-rpc", "more", "files"]


def test_lane_of_a_redis_route_is_interactive_unless_said() -> None:
    models = {"models.m.path": "x"}
    redis = {"routes.a.source": "redis://localhost/q"}
    kafka = {"routes.b.source": "kafka://localhost/q"}
    settings = load({**models, **redis, **kafka}, {}, None)
    assert [r.lane for r in settings.routes] == ["interactive", "bulk"]
    assert load({**models, **redis, "routes.a.lane": "bulk"}, {}, None).routes[0].lane == "bulk"


def test_limits_of_a_route_lie_over_the_common_ones(file: Path) -> None:
    settings = load({"limits.max_depth": "9"}, {}, file)
    first, second = (settings.limits_for(route) for route in settings.routes)
    assert (first.max_items, first.max_depth) == (64, 9)
    assert (second.max_items, second.max_depth) == (Limits().max_items, 9)


def test_default_model_of_a_task(file: Path) -> None:
    settings = load({}, {}, file)
    route, other = settings.routes
    assert settings.model_for(route, "embed") == "minilm"
    assert settings.model_for(route, "score") == "ranker"
    assert settings.model_for(other, "embed") == "minilm"  # by default_for
    assert settings.model_for(other, "classify") is None


def test_the_demo_models_are_used_when_none_is_named() -> None:
    demo = {"minilm": ModelSettings(path="all-MiniLM-L6-v2")}
    assert set(load({}, {}, None, default_models=demo).models) == {"minilm"}
    own = load({"models.mine.path": "x"}, {}, None, default_models=demo)
    assert set(own.models) == {"mine"}


def test_names_that_are_no_settings_are_left_alone() -> None:
    environ = {
        "EMBEDSTREAM_TEST_KAFKA": "localhost:9092",
        "EMBEDSTREAM_MODELS": "/models",
        "EMBEDSTREAM_PORT": "tcp://10.0.0.1:80",
        "EMBEDSTREAM_PORT_80_TCP_ADDR": "10.0.0.1",
        "EMBEDSTREAM_SERVICE_HOST": "10.0.0.1",
        "EMBEDSTREAM_REDIS_PORT": "tcp://10.0.0.2:6379",
        "EMBEDSTREAM_REDIS_SERVICE_PORT_CLIENT": "6379",
        "EMBEDSTREAM_REDIS_PORT_6379_TCP_PROTO": "tcp",
        "PATH": "/bin",
    }
    assert load({}, environ, None) == load({}, {}, None)


@pytest.mark.parametrize("name", ["EMBEDSTREAM_HEALTH_PORT", "EMBEDSTREAM_LINGER_MS"])
def test_a_forgotten_underscore_is_refused(name: str) -> None:
    assert name in refused({}, {name: "8321"})


# --- refusals --------------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once_with_place_and_remedy(tmp_path: Path) -> None:
    file = write(tmp_path, '[batching]\nlinger_msec = 3\n[health]\nport = "x"\n')
    text = refused({"log.level": "loud"}, {"EMBEDSTREAM_EXECUTOR__CPU_WORKERS": "many"}, file=file)
    lines = text.splitlines()
    assert len(lines) == 4
    by_name = {line.split(" ", 1)[0].rstrip(":"): line for line in lines}
    assert f"{file}:2" in by_name["batching.linger_msec"]
    assert "did you mean linger_ms?" in by_name["batching.linger_msec"]
    assert f"{file}:4" in by_name["health.port"]
    assert "EMBEDSTREAM_EXECUTOR__CPU_WORKERS" in by_name["executor.cpu_workers"]
    assert 'or "auto"' in by_name["executor.cpu_workers"]
    assert "debug" in by_name["log.level"]


def test_unknown_table_is_refused_with_a_hint() -> None:
    assert "did you mean batching?" in refused({"batchin.linger_ms": "3"})
    assert "known: " in refused({"zzz": "3"})


def test_a_mistyped_route_name_is_refused(file: Path) -> None:
    text = refused({"routes.kafka-reqests.model": "minilm"}, file=file)
    assert "routes.2.source" in text and "is missing" in text


@pytest.mark.parametrize(
    "text",
    ["[batching", "a = ", "x = 1\nx = 2", "\x00", "[[routes]]\nname='a'\n[routes]\n"],
)
def test_a_file_that_is_not_toml(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    message = refused({}, file=file)
    assert str(file) in message and "is not TOML" in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "--config" in refused({}, file=tmp_path / "missing.toml")
    assert "--config" in refused({}, file=tmp_path)  # a folder
    (tmp_path / "latin.toml").write_bytes(b'a = "\xff"')
    assert "not UTF-8" in refused({}, file=tmp_path / "latin.toml")
    deep = write(tmp_path, "a = " + "[" * 100_000)
    assert "nested too deeply" in refused({}, file=deep)


def test_a_value_where_a_table_belongs_and_the_reverse(tmp_path: Path) -> None:
    assert "is a table, not a value" in refused({}, file=write(tmp_path, "batching = 3\n"))
    assert "is a value, not a table" in refused({"log.level.x": "1"})
    assert "is a table, not a value" in refused(
        {"batching": "3"}, {}, file=write(tmp_path, "[batching]\nlinger_ms=1\n")
    )
    assert "is no setting name" in refused({"batching..linger_ms": "3"})


def _numeric_settings() -> list[tuple[str, float, float]]:
    """Dotted name, low, high of every numeric setting there is."""
    found: list[tuple[str, float, float]] = []

    def visit(record: type[msgspec.Struct], prefix: str) -> None:
        for name, spec in fields_of(record).items():
            kind = unwrap(spec.type)
            if isinstance(kind, mi.DictType) and name == "models":
                kind, name = unwrap(kind.value_type), "models.m"
            if isinstance(kind, mi.VarTupleType):
                kind = unwrap(kind.item_type)
                if isinstance(kind, mi.StructType):
                    name = f"{name}.0"
            if isinstance(kind, mi.StructType):
                visit(kind.cls, f"{prefix}{name}.")
            for member in kind.types if isinstance(kind, mi.UnionType) else (kind,):
                member = unwrap(member)
                if isinstance(member, mi.IntType | mi.FloatType):
                    assert member.ge is not None and member.le is not None, prefix + name
                    found.append((f"{prefix}{name}", member.ge, member.le))

    visit(Settings, "")
    return found


NUMERIC = _numeric_settings()
BASE = {"models.m.path": "x", "routes.0.name": "r", "routes.0.source": "kafka://localhost/q"}


def test_finds_the_numeric_settings() -> None:
    """C13."""
    assert len(NUMERIC) >= 35
    assert {"models.m.max_batch_tokens", "health.port", "routes.0.limits.max_items"} <= {
        name for name, _, _ in NUMERIC
    }


@pytest.mark.parametrize(("name", "low", "high"), NUMERIC, ids=[n for n, _, _ in NUMERIC])
def test_zero_negative_and_huge_are_refused_with_the_name(
    name: str, low: float, high: float
) -> None:
    """C13: the same through a flag, the environment and a typed value."""
    bad = [-1, -(10**30), 10**30, float("nan"), float("inf"), float("-inf"), "9" * 5000]
    if low > 0:
        bad.append(0)
    for value in bad:
        text = refused({**BASE, name: str(value)})
        assert name in text and "from" in text
        variable = "EMBEDSTREAM_" + name.upper().replace(".", "__")
        assert name in refused(dict(BASE), {variable: str(value)})
        if not name.endswith("matryoshka_dimensions"):
            assert name in refused(
                {**BASE, name: value} if not isinstance(value, str) else {**BASE, name: [value]}
            )


def test_limits_table_is_complete() -> None:
    """C13."""
    assert set(LIMITS_META) == set(Limits.__struct_fields__)


def test_a_boolean_is_no_number_and_a_number_no_text() -> None:
    assert "batching.linger_ms" in refused({"batching.linger_ms": True})
    assert "health.host" in refused({"health.host": 3})
    assert "health.port" in refused({"health.port": 80.5})


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", "yes", "YES", "on", " true "])
@pytest.mark.parametrize("value", [True, False])
def test_one_boolean_rule(text: str, value: bool, tmp_path: Path) -> None:
    """G11: CLI, environment and file take the same words."""
    opposite = {"true": "false", "1": "0", "yes": "no", "on": "off"}
    word = text if value else opposite[text.strip().lower()]
    name = "publish.split_replies"
    assert load({name: word}, {}, None).publish.split_replies is value
    environ = {"EMBEDSTREAM_PUBLISH__SPLIT_REPLIES": word}
    assert load({}, environ, None).publish.split_replies is value
    file = write(tmp_path, f'[publish]\nsplit_replies = "{word}"\n')
    assert load({}, {}, file).publish.split_replies is value


def test_native_booleans_and_numbers(tmp_path: Path) -> None:
    """G11."""
    for text, value in [("true", True), ("false", False), ("1", True), ("0", False)]:
        file = write(tmp_path, f"[publish]\nsplit_replies = {text}\n")
        assert load({}, {}, file).publish.split_replies is value


@pytest.mark.parametrize("word", ["maybe", "", "2", "truee", "None"])
def test_anything_else_names_the_setting(word: str) -> None:
    """G11."""
    text = refused({"publish.split_replies": word})
    assert "publish.split_replies" in text and "true or false" in text


def test_lists_and_optionals_from_text() -> None:
    settings = load(
        {
            "models.m.path": "x",
            "models.m.matryoshka_dimensions": "64, 128",
            "models.m.default_for": "embed,classify",
            "models.m.prompts.query": "query: ",
            "routes.r.source": "kafka://localhost/q",
            "routes.r.model": "none",
        },
        {},
        None,
    )
    model = settings.models["m"]
    assert model.matryoshka_dimensions == (64, 128)
    assert model.default_for == ("embed", "classify")
    assert model.prompts == {"query": "query: "}
    assert settings.routes[0].model is None


# --- contradictions --------------------------------------------------------------------------------


def contradiction(*pairs: str, **extra: Any) -> str:
    overrides: dict[str, Any] = {"models.m.path": "x", **extra}
    overrides.update(pair.split("=", 1) for pair in pairs)
    return refused(overrides)


def test_a_route_names_a_model_that_exists() -> None:
    text = contradiction("routes.a.source=kafka://localhost/q", "routes.a.rerank_model=nope")
    assert "routes.0.rerank_model" in text and "[models.nope]" in text and "one of m" in text


def test_routes_need_a_model() -> None:
    assert "--model" in refused({"routes.a.source": "kafka://localhost/q"})


def test_two_defaults_for_one_task() -> None:
    text = contradiction(
        "models.m.default_for=embed", "models.n.path=y", "models.n.default_for=embed"
    )
    assert "models.n.default_for" in text and "models.m.default_for" in text


def test_two_routes_of_one_group() -> None:
    text = contradiction(
        "routes.a.source=kafka://h:1/q?group=g", "routes.b.source=kafka://h:1/p,q?group=g"
    )
    assert "routes.0.source" in text and "routes.1.source" in text and "another group" in text
    load(
        {
            "models.m.path": "x",
            "routes.a.source": "kafka://h:1/q?group=g",
            "routes.b.source": "kafka://h:1/q?group=other",
        },
        {},
        None,
    )


def test_two_routes_of_one_name(file: Path) -> None:
    assert "rename" in refused({"routes.1.name": "kafka-requests"}, file=file)


def test_replies_that_would_become_requests() -> None:
    text = contradiction(
        "routes.a.source=kafka://h:1/q", "routes.b.source=kafka://h:1/embedstream.replies?group=x"
    )
    assert "reply_topic" in text and "routes.1.source" in text


def test_drain_budget_against_the_poll_interval() -> None:
    """J04: both settings and both remedies are named."""
    text = contradiction(
        "routes.a.source=kafka://h:1/q?max_poll_interval_ms=20000&drain_budget_s=5",
        "lifecycle.drain_budget_s=25",
    )
    assert "lifecycle.drain_budget_s" in text and "max_poll_interval_ms" in text
    assert "lower" in text and "raise" in text


def test_records_that_could_never_be_admitted() -> None:
    text = contradiction(
        "admission.bulk.max_in_flight_bytes=4096",
        "limits.max_record_bytes=8192",
        "admission.interactive.max_in_flight_bytes=8192",
    )
    assert "limits.max_record_bytes" in text and "admission.bulk.max_in_flight_bytes" in text
    assert "interactive" not in text
    text = contradiction("models.m.max_tokens=4096", "admission.bulk.max_in_flight_tokens=2048")
    assert "models.m.max_tokens" in text and "admission.bulk.max_in_flight_tokens" in text


def test_backoff_bounds() -> None:
    assert "publish.max_backoff_ms" in contradiction("publish.backoff_ms=9000")


def test_a_wrong_address_is_refused_without_its_password() -> None:
    text = contradiction("routes.a.source=redis://u:hunter2@h:6379/q?nonsense=1")
    assert "routes.0.source" in text and "nonsense" in text and "hunter2" not in text
    text = contradiction("routes.a.source=ftp://u:hunter2@h/q")
    assert "ftp" in text and "hunter2" not in text


@pytest.mark.parametrize(
    ("destination", "words"),
    [
        ("nosuch://h/docs", "unknown transport 'nosuch'"),
        ("kafka://h:1", "one topic"),
        ("redis://h/answers", "list:NAME"),
        ("redis://h/list:", "list:NAME"),
        ("redis://u:hunter2/x@h/list:a", "%2F"),
        ("inproc://x", "no destination"),
        ("nowhere", "unknown transport"),
        ("kafka://h:1/q", "routes.0.source reads"),
    ],
)
def test_destinations_that_are_no_place_are_refused_by_name(destination: str, words: str) -> None:
    text = contradiction("routes.a.source=kafka://h:1/q", f"routes.a.destination={destination}")
    assert "routes.0.destination" in text and words in text and "hunter2" not in text


@pytest.mark.parametrize(
    "destination",
    ["kafka://h:1/a", "redis://h/list:a", "rediss://u:p@h/stream:a?db=3", "file:///out.jsonl", "-"],
)
def test_a_destination_may_be_of_another_kind_than_the_source(destination: str) -> None:
    settings = load(
        {
            "models.m.path": "x",
            "routes.a.source": "redis://h/q",
            "routes.a.destination": destination,
        },
        {},
        None,
    )
    assert settings.routes[0].destination == destination


def test_the_default_reply_topic_of_a_route_whose_replies_go_elsewhere_may_be_read() -> None:
    routes = {
        "models.m.path": "x",
        "routes.a.source": "kafka://h:1/q?reply_topic=answers",
        "routes.b.source": "kafka://h:1/answers?group=other",
    }
    assert "reply_topic=answers" in refused(routes)
    load({**routes, "routes.a.destination": "redis://h/list:a"}, {}, None)


@pytest.mark.parametrize(
    ("destination", "reason"),
    [("lance:///folder", "no collection is named"), ("lance:///folder#Docs Of Mine", "a-z")],
)
def test_collections_that_cannot_be_are_refused_by_name(destination: str, reason: str) -> None:
    text = contradiction("routes.a.source=kafka://h:1/q", f"routes.a.destination={destination}")
    assert "routes.0.destination" in text and reason in text


def test_a_route_into_a_collection_says_what_a_document_is() -> None:
    source, into = "routes.a.source=kafka://h:1/q", "routes.a.destination=lance:///folder#docs"
    text = contradiction(source, into)
    assert "routes.0.document" in text and "document.text" in text
    text = contradiction(source, "routes.a.document.text={title}")
    assert "routes.0.document" in text and "requests are no documents" in text
    good = load(
        {
            "routes.a.source": "kafka://h:1/q",
            "routes.a.destination": "lance:///f#docs",
            "routes.a.document.text": "{title}",
            "routes.a.document.metadata": "url,lang",
            "routes.a.chunk.max_tokens": "64",
            "models.m.path": "m",
        },
        {},
        None,
    )
    assert good.routes[0].document.metadata == ("url", "lang")
    assert good.routes[0].chunk.max_tokens == 64


# --- printing --------------------------------------------------------------------------------------


def test_no_print_shows_a_secret(file: Path) -> None:
    source = "kafka://h:1/q?security_protocol=SASL_SSL&sasl_username=me&sasl_password=hunter2"
    settings = load({"routes.sasl.source": source}, {}, file)
    everything = repr(explain(settings)) + repr(redacted(settings))
    assert "hunter2" not in everything
    assert "redis://:***@localhost:6379/embedstream.requests" in everything
    assert "sasl_username=me" in everything


def test_a_refused_secret_is_not_echoed() -> None:
    text = refused({"routes.a.source": ["redis://u:hunter2@h/q"], "models.m.path": "x"})
    assert "hunter2" not in text
    for source in ("redis:/u:hunter2@h/q", ["redis:/u:hunter2@h/q"], "u:hunter2@h"):  # K32
        text = refused({"routes.a.source": source, "models.m.path": "x"})
        assert "hunter2" not in text and "routes.0.source" in text


def test_explain_lists_every_leaf(file: Path) -> None:
    names = {e.name for e in explain(load({}, {}, file))}
    assert {n.replace("models.m.", "models.minilm.") for n, _, _ in NUMERIC} <= names


def test_other_routes_sources_are_no_reply_destinations() -> None:
    settings = load(
        {
            "models.m.path": "x",
            "routes.a.source": "kafka://h:1/embedstream.a",
            "routes.b.source": "kafka://h:1,h:2/embedstream.b?dead_letter_topic=embedstream.dl",
            "routes.c.source": "kafka://other:1/embedstream.c",
            "routes.d.source": "redis://h/embedstream.d",
            "routes.e.source": "redis://h/embedstream.e?refuse_destinations=embedstream.x",
            "routes.f.source": "redis://h/embedstream.f?db=1",
            "routes.g.source": "file:///in.jsonl",
        },
        {},
        None,
    )
    options = {route.name: route_options(settings, route) for route in settings.routes}
    kafka, redis = options["a"], options["e"]
    assert isinstance(kafka, KafkaOptions) and isinstance(redis, RedisOptions)
    assert {"embedstream.b", "embedstream.dl"} <= set(kafka.refuse_destinations)
    assert "embedstream.c" not in kafka.refuse_destinations
    assert {"embedstream.x", "embedstream.d"} <= set(redis.refuse_destinations)
    assert "embedstream.f" not in redis.refuse_destinations
    assert isinstance(options["g"], FileOptions)


PATTERN = r"kafka://h:1/?pattern=embedstream\.in\..*"


def test_what_the_pattern_of_another_route_matches_is_no_reply_destination() -> None:
    settings = load(
        {
            "models.m.path": "x",
            "routes.a.source": "kafka://h:1/t?group=a",
            "routes.b.source": PATTERN,
        },
        {},
        None,
    )
    options = route_options(settings, settings.routes[0])
    assert isinstance(options, KafkaOptions) and options.check() == []
    assert options.reads("embedstream.in.x") and not options.reads("embedstream.out.x")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"source": "kafka://h:1/embedstream.in.x"}, ["routes.1.source", "group"]),
        ({"source": PATTERN.replace("in", "i?n")}, ["routes.1.source", "group"]),
        (
            {"source": "kafka://h:1/t?group=b&reply_topic=embedstream.in.replies"},
            ["routes.1.source", "reply_topic"],
        ),
        (
            {"source": "-", "destination": "kafka://h:1/embedstream.in.y"},
            ["routes.1.destination", "answers would become requests"],
        ),
    ],
)
def test_a_route_that_a_pattern_runs_into_is_refused(
    more: dict[str, str], named: list[str]
) -> None:
    given = {f"routes.b.{name}": value for name, value in more.items()}
    with pytest.raises(SettingsError) as refused:
        load({"models.m.path": "x", "routes.a.source": PATTERN, **given}, {}, None)
    assert all(name in str(refused.value) for name in named), str(refused.value)


def test_every_setting_is_read_somewhere() -> None:
    """A setting that nothing reads would be accepted and ignored."""
    sources = "\n".join(
        path.read_text()
        for path in (ROOT / "pipeline").rglob("*.py")
        if path.name not in ("settings_doc.py", "settings_build.py", "settings_sources.py")
        and not path.name.startswith("cli_check")
    )
    for record in (
        RouteSettings, records.BatchingSettings, records.LaneAdmission,
        records.PublishSettings, records.AttemptsSettings, records.LifecycleSettings,
        records.HealthSettings, records.LogSettings, records.ExecutorSettings,
    ):  # fmt: skip
        for name in record.__struct_fields__:
            assert f".{name}" in sources, f"nothing reads {record.__name__}.{name}"


def test_a_part_built_by_itself_behaves_as_the_settings_say() -> None:
    """A benchmark or test that builds a station without settings measures what the service does."""
    batching, publish = records.BatchingSettings(), records.PublishSettings()
    packing, publishing = PackingPolicy(max_batch_tokens=1), PublishPolicy()
    assert packing.max_batch_items == batching.max_batch_items
    assert packing.linger_s * 1000 == batching.linger_ms
    assert packing.bulk_floor == batching.bulk_floor
    assert packing.max_reorder_items == batching.max_reorder_items
    assert publishing.max_concurrent == publish.max_concurrent
    assert publishing.attempts == publish.attempts
    assert publishing.first_backoff_s * 1000 == publish.backoff_ms
    assert publishing.max_backoff_s * 1000 == publish.max_backoff_ms
    lane, budget = records.LaneAdmission(), LaneBudget()
    assert budget.max_requests == lane.max_in_flight_requests
    assert budget.max_tokens == lane.max_in_flight_tokens
    assert budget.max_bytes == lane.max_in_flight_bytes
    assert budget.full_policy == lane.when_full


def test_docs_settings_is_what_the_code_says() -> None:
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == settings_doc.document(), (
        "run: python -m pipeline.settings.page > docs/settings.md"
    )
    rows = [line for line in written.splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    assert not [row for row in rows if row.endswith("|  |")], "an option without a sentence"


@pytest.mark.parametrize(
    ("source", "order", "able"),
    [
        ("redis://localhost/q", "key", '"none"'),
        ("file:///in.jsonl", "key", '"none" or "partition"'),
        ("file:///in.jsonl", "partition", None),
        ("kafka://localhost/q", "partition", None),
    ],
)
def test_an_order_that_the_source_cannot_keep_is_refused(
    source: str, order: str, able: str | None
) -> None:
    given = {**BASE, "routes.0.source": source, "routes.0.order": order}
    if able is None:
        assert load(given, {}, None).routes[0].order == order
    else:
        text = refused(given)
        assert "routes.0.order" in text and f"set it to {able}, or" in text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"routes.0.source": "redis://localhost/q"}, "routes.0.source"),
        ({"routes.0.source": "file:///in.jsonl"}, "routes.0.source"),
        ({"routes.0.source": "kafka://localhost/q?idempotent=false"}, "idempotent"),
        (
            {"routes.0.source": "kafka://localhost/q?max_in_flight_per_partition=1025"},
            "max_in_flight_per_partition",
        ),
        ({"routes.0.destination": "kafka://elsewhere:9092/out"}, "routes.0.destination"),
        ({"routes.0.destination": "redis://localhost/list:out"}, "routes.0.destination"),
        ({"routes.0.destination": "lance:///folder#docs"}, "collection"),
    ],
)
def test_what_cannot_be_exactly_once_is_refused(given: dict[str, str], named: str) -> None:
    text = refused({**BASE, **given, "routes.0.delivery": "exactly_once"})
    assert "routes.0.delivery" in text and named in text and "at_least_once" in text
    assert load({**BASE, "routes.0.delivery": "exactly_once"}, {}, None).routes[0].delivery


def test_a_report_stands_beside_a_collection_and_is_no_loop() -> None:
    collection = {
        **BASE,
        "routes.0.destination": "lance:///folder#docs",
        "routes.0.document.text": "{a}",
    }
    report = "routes.0.report_to"
    assert "routes.0.report_to" in refused({**BASE, report: "kafka://localhost:9092/told"})
    assert report in refused({**collection, report: "nothing://x"})
    source = BASE["routes.0.source"].partition("?")[0]
    assert "answers would become requests" in refused({**collection, report: source})
    loaded = load({**collection, report: "kafka://localhost:9092/told"}, {}, None)
    assert loaded.routes[0].report_to == "kafka://localhost:9092/told"


KEYS = st.lists(
    st.sampled_from(
        ["models", "m", "path", "routes", "0", "7", "r", "source", "name", "limits", "max_items",
         "batching", "linger_ms", "log", "level", "", "x", "é", "prompts"]
    ),
    min_size=1,
    max_size=5,
).map(".".join)  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=20), st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.text())
)


@hypothesis.settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_override_loads_or_is_refused_by_name(overrides: dict[str, Any]) -> None:
    try:
        settings = load(overrides, {}, None)
    except SettingsError as error:
        assert error.problems
        assert all(p.setting and p.message and p.remedy for p in error.problems)
    else:
        explain(settings)
        redacted(settings)
