"""What the pages of docs/ claim, compared with the code: names everywhere, figures page by page.

A claim is found on its page by its words, so that both change together. Nothing here asks whether something
was ever run. Other pages have tests of their own: cases, life-of-a-request, operations, settings, tutorial,
web, kafka and wire-format.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from schemas.requests import Lane

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md")],
    key=lambda page: page.name,
)
EXTERNAL = {
    "service_name",  # an argument of redis-py's Sentinel
    "label_token_ids",  # fields of SGLang's /v1/score
    "apply_softmax",
    "DESCRIBE_CONFIGS",  # a right of Kafka
}
"""Names with an underscore that pages mention and that are others'."""
SOURCE_FOLDERS = (
    "schemas",
    "gpu",
    "actors",
    "pipeline",
    "clients",
    "benchmarks",
    "deploy",
    "examples",
)
SOURCE_FILES = ("compose.yaml", "Dockerfile", "Makefile", "pyproject.toml")


@cache
def prose(page: str) -> str:
    """A page in one line, without code blocks."""
    text = (ROOT / page).read_text("utf-8")
    return " ".join(re.sub(r"```.*?```", "", text, flags=re.S).split())


@cache
def sources() -> str:
    files = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in SOURCE_FILES]
    return "\n".join(
        path.read_text("utf-8", "replace")
        for path in files
        if path.is_file() and path.suffix in (".py", ".toml", ".js", ".yaml", "")
    )


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`]+)`", prose(str(page.relative_to(ROOT))))


# --- names, on every page ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_with_an_underscore_exist_in_the_code(page: Path) -> None:
    """Settings, options, fields, functions and counters that were renamed or are gone."""
    if page.name == "cases.md":
        pytest.skip("names tests, and is written from them")
    from pipeline.observe.metric_table import markdown

    known, missing = sources() + markdown(), set()
    for span in code_spans(page):
        for name in re.findall(r"\b[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]*[A-Za-z0-9]\b", span):
            generated = name.startswith("EMBEDSTREAM_")  # made of a prefix and a setting's name
            if (
                name not in known
                and name not in EXTERNAL
                and not generated
                and "tests/" not in span
            ):
                missing.add(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "schemas|gpu|actors|pipeline|tests|docs|deploy|clients|benchmarks|examples"
    for span in code_spans(page):
        for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w)", span.split("::")[0]):
            assert (ROOT / name).exists() or list(ROOT.glob(name + "*")), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    from pipeline.settings.load import Settings, explain

    names = {effective.name for effective in explain(Settings())}
    tables = {name.split(".")[0] for name in names if "." in name}
    for span in code_spans(page):
        found = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?: = .*)?", span)
        if found and found[1].split(".")[0] in tables:
            assert found[1] in names or any(n.startswith(found[1] + ".") for n in names), span


# --- figures and sentences, page by page ------------------------------------------------------------


def _demo() -> dict[str, Any]:
    from pipeline.demo import run
    from pipeline.demo.catalog import EMBEDDER, RERANKER
    from pipeline.demo.corpus import N_QUESTIONS

    return {
        f"`{EMBEDDER}`": True,
        f"`{RERANKER}`": True,
        f"takes {run.DemoOptions().documents:,} entries": True,
        f"{run.TEXTS_PER_REQUEST} texts a request": run.TEXTS_PER_REQUEST == 16,
        "asks five questions": N_QUESTIONS == 5,
        "the ten nearest documents": run.CANDIDATES == 10,
        f"asks {run.RPC_CALLS} more": True,
        "a dozen documents": run.FEW == 12,
        f"{run.DemoOptions().documents} by default": True,
        "before all the others are embedded": True,
    }


def _delivery() -> dict[str, Any]:
    from pipeline.settings.records import AttemptsSettings, PublishSettings
    from pipeline.transports.broker_names import DEAD_LETTERS, REPLY_PREFIXES
    from pipeline.transports.kafka import assignment, progress, window
    from pipeline.transports.kafka.options import KafkaOptions
    from pipeline.transports.redis import leases
    from pipeline.transports.redis.options import RedisOptions
    from pipeline.transports.redis_list.options import RedisListOptions

    queue = RedisListOptions(key="NAME")
    return {
        f"It goes to `{DEAD_LETTERS}`": True,
        f"`publish.remember_s` ({PublishSettings().remember_s:g} s": True,
        f"at most {progress.MAX_BYTES:,} bytes": True,
        "at most a fifth of `max_poll_interval_ms`": assignment._DRAIN_SHARE == 0.2,
        "what half of `drain_budget_s` finishes": window.DRAIN_SHARE == 0.5,
        "renewed at half of `claim_idle_ms`": leases.RENEW_AT == 0.5,
        f"`reply_ttl_s`, default {RedisOptions().reply_ttl_s} s": True,
        f"`reply_prefixes`, default `{REPLY_PREFIXES[0]}`": len(REPLY_PREFIXES) == 1,
        "`attempts.max_attempts` times": AttemptsSettings().max_attempts > 1,
        "LPUSH with `take_from=right` (the default)": queue.take_from == "right",
        f"`{queue.processing('CONSUMER')}`, `{queue.consumers}` and `{queue.attempts}`": True,
        "A consumer group reads the stream from its beginning": RedisOptions().start == "0"
        and KafkaOptions(bootstrap="h:1").auto_offset_reset == "earliest",
        "The producer is idempotent where the broker supports it": KafkaOptions(
            bootstrap="h:1"
        ).idempotent
        == "auto",
    }


def _operations() -> dict[str, Any]:
    from pipeline.cli import check, interrupts
    from pipeline.lifecycle import FORCE_GRACE_S
    from pipeline.observe import http, metrics
    from pipeline.settings.records import AdmissionSettings, HealthSettings, LifecycleSettings
    from pipeline.transports.kafka import letters

    health = HealthSettings()
    return {
        f"(default `{health.host}:{health.port}`; 0 turns it off": True,
        "GET and HEAD only": '("GET", "HEAD")' in inspect.getsource(http),
        f"a metric holds at most {metrics.MAX_SERIES_PER_METRIC} label sets": True,
        f"the budget's default is {LifecycleSettings().drain_budget_s:g}": True,
        "offsets of the group `TOPIC.replayed`": '{topic}.replayed"' in inspect.getsource(letters),
        "does not answer within five seconds is given up": check.REACH_S == 5,
        "two seconds later the process is gone": FORCE_GRACE_S == 2,
        "one-off commands and `demo` within two seconds": interrupts.GRACE_S < 2,
        "The interactive lane is full": AdmissionSettings().interactive.when_full == "reject",
        "the bulk lane's budgets are full": AdmissionSettings().bulk.when_full == "wait",
    }


def _engine() -> dict[str, Any]:
    from gpu.device import kernels
    from gpu.folder.families import FAMILIES
    from gpu.forward import packed, speed

    padded = [family for family in FAMILIES.values() if family.padded_because]
    return {
        f"each shape of {kernels.MEASURED_FROM:,} weights and more": True,
        "when it needs 5 % less time": kernels.MARGIN == 0.95,
        "`embedstream/linears.json`": kernels.__doc__ is not None,
        f"under {speed.HALF_ATTENTION_FROM} tokens": True,
        f"a multiple of {packed.PAD_TO} tokens": True,
        "Every family of the table runs packed": not padded,
        '`speed = "int8"` is refused': "int8" in speed.__doc__,
    }


def _models() -> dict[str, Any]:
    from gpu.folder.families import FAMILIES
    from pipeline.settings.records import LaneAdmission
    from tests.support.models_encoders import ENCODERS

    pins = (ROOT / "constraints.txt").read_text("utf-8").split()
    versions = {name: pin for name, _, pin in (line.partition("==") for line in pins)}
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| [^|]* \| ([^|]*) \|", page, re.M))
    run = {family for family, how in rows.items() if how.strip() == "packed"}
    known = {family.model_type for family in FAMILIES.values()}
    tokens = LaneAdmission().max_in_flight_tokens
    return {
        f"`admission.bulk.max_in_flight_tokens`, {tokens // 10**6} million by default": True,
        "2.4 KB per token": True,
        f"(torch {versions['torch']}, transformers {versions['transformers']}, one thread": True,
        "(2 layers, hidden size 32,": {"num_hidden_layers": 2, "hidden_size": 32}.items()
        <= ENCODERS["albert"][2].items(),
        "Every family below gives the same bytes": "| no |" not in page,
        "This page is written by `python -m benchmarks.parity`": (
            ROOT / "benchmarks/parity.py"
        ).exists(),
        "a model type without a row here is refused": known <= set(rows),
        "Other multimodal types are refused by name": "siglip2" not in {*known, *rows},
        "MPNet, RemBERT": {"mpnet", "rembert"} <= run,
        "Families that need more than the interface": (ROOT / "gpu/forward/wrappers.py").exists(),
    }


def _outputs() -> dict[str, Any]:
    import numpy as np

    from gpu.answer import sparse
    from gpu.folder import static

    width = 384
    return {
        "A chunk is 2^24 numbers (64 MiB)": 4 * sparse.LOGIT_ELEMENTS_CPU == 64 * 2**20,
        "2^27 on CUDA": sparse.LOGIT_ELEMENTS_CUDA == 2**27,
        f"else {static.MODEL2VEC_MAX_TOKENS} tokens": True,
        f"beyond {int(np.finfo(np.float16).max):,} has no float16": np.finfo(np.float16).max
        == 65504,
        f"| `float32` | {4 * width:,} |": True,
        f"| `float16` | {2 * width} |": True,
        f"| `binary` | {width // 8} |": True,
        "`embedstream models fetch potion-base-8M`": _is_packaged("potion-base-8M"),
        "splade-tiny": _is_packaged("splade-tiny"),
    }


def _is_packaged(name: str) -> bool:
    from pipeline.demo.fetch import find_model

    return find_model(name) is not None


def _rerankers() -> dict[str, Any]:
    from gpu.folder import read
    from gpu.folder.prompts import BUILT_IN, BUILT_IN_LABELS

    activation = read._label_activation
    page = (ROOT / "docs" / "rerankers.md").read_text("utf-8")
    assert "qwen3 and bge-gemma know theirs" in page
    return {
        "| `qwen3` | the model card's system prompt": "qwen3" in BUILT_IN,
        "| `bge-gemma` | `A: query`, `B: passage`": "A: {query}" in BUILT_IN["bge-gemma"].template,
        "| `plain` | query, then document | takes none |": BUILT_IN["plain"].instruction is None,
        "Only the document is cut": True,
        "softmax, sigmoid for multi-label or one label, none for regression": [
            activation({"problem_type": kind}, labels)
            for kind, labels in (
                ("single_label_classification", 3),
                ("multi_label_classification", 3),
                (None, 1),
                ("regression", 1),
            )
        ]
        == ["softmax", "sigmoid", "sigmoid", "identity"],
        "no activation": activation({"architectures": ["Qwen2ForRewardModel"]}, 1) == "identity",
        "A label must be one token": "is not one token of this model's vocabulary" in sources(),
        "| yes, no | logit(yes) - logit(no)": BUILT_IN_LABELS["qwen3"] == ("yes", "no"),
        "`multi_item = true`": "multi_item" in sources(),
        "`*ForRewardModel`": "RewardModel" in sources(),
    }


def _attention() -> dict[str, Any]:
    import gpu.attention as attention
    from gpu.attention import flashinfer, interface, sdpa, varlen
    from gpu.forward import token_buckets

    return {
        f"under the name `{interface.NAME}`": True,
        "the first of flashinfer, varlen, sdpa": attention.NAMES
        == ("flashinfer", "varlen", "sdpa"),
        "head size 64, 128, 256": flashinfer.HEAD_DIMS == (64, 128, 256),
        "multiples of 8 up to 256": varlen.MAX_HEAD_DIM == 256,
        f"{flashinfer.WORKSPACE_BYTES // 2**20} MiB of workspace": True,
        f"blocks of {sdpa.WINDOW_ROWS} query rows": True,
        "16, 32, ... up to": token_buckets.SMALLEST_BUCKET == 16,
        f"at most {token_buckets.LARGEST_BUCKET:,} tokens": True,
        f"items of up to {token_buckets.FILLER_TOKENS} tokens of their own": True,
        "Outside of a pack the function raises": "outside of a pack" in sources(),
        "Attention sinks (`s_aux`)": "attention sinks (s_aux)" in sources(),
    }


def _deploy() -> dict[str, Any]:
    image = (ROOT / "Dockerfile").read_text("utf-8")
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    services = compose["services"]
    settings = (ROOT / "deploy" / "embedstream.toml").read_text("utf-8")
    arguments = set(re.findall(r"^ARG (\w+)", image, re.M))
    return {
        "`Dockerfile` has three stages": len(re.findall(r"^FROM ", image, re.M)) == 3,
        "runs as user 10001": "USER 10001" in image,
        "| `TORCH_INDEX_URL` |": arguments == {"TORCH_INDEX_URL", "EXTRAS", "MODELS"},
        "| `kafka` | one KRaft node | 9092": "9092" in json.dumps(services["kafka"]["ports"]),
        "| `redis` | `noeviction`, append-only file | 6379": "6379"
        in json.dumps(services["redis"]),
        "this repository | 8321": "8321" in json.dumps(services["embedstream"]["ports"]),
        "`stop_grace_period` (35 s)": services["embedstream"]["stop_grace_period"] == "35s",
        "the drain budget (25 s)": "drain_budget_s = 25.0" in settings,
        "two volumes, `kafka-data` and `redis-data`": set(compose["volumes"])
        == {"kafka-data", "redis-data"},
        "| `topics` | makes the three topics, then ends |": "topics" in services,
    }


def _indexing() -> dict[str, Any]:
    from pipeline.indexing import mapping
    from pipeline.indexing.options import ChunkOptions
    from pipeline.indexing.sinks.registry import SINKS

    extras = (ROOT / "pyproject.toml").read_text("utf-8")
    return {
        f"text of up to {mapping.MAX_ID_BYTES} bytes": True,
        "`sentences` (default)": ChunkOptions().by == "sentences",
        "`lance:///folder#docs`": "lance" in SINKS,
        "`qdrant://host:6333#docs`": "qdrant" in SINKS,
        "`postgresql://user:password@host/db#docs`": "postgresql" in SINKS,
        "`opensearch://user:password@host:9200?tls=true#docs`": "opensearch" in SINKS,
        "`redis-vectors://user:password@host:6379/0#docs`": "redis-vectors" in SINKS,
        "`chroma://host:8000#docs`": "chroma" in SINKS,
        "`milvus://user:password@host:19530#docs`": "milvus" in SINKS,
        "`parquet:///folder#docs`": "parquet" in SINKS,
        "Weaviate, Vespa and Elasticsearch are not there": len(SINKS) == 8,
        "`embedstream[pgvector]`": re.search(r"^pgvector = ", extras, re.M) is not None,
        "`embedstream[parquet]`": re.search(r"^parquet = ", extras, re.M) is not None,
        "`uuid5` of document id and ordinal": "uuid.uuid5(" in sources(),
        "tables `docs` and `docs__documents`": "__documents" in sources(),
    }


def _readme() -> dict[str, Any]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    client = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text("utf-8"))["project"]
    lanes = get_args(Lane)
    return {
        "`make up` starts": {"demo", "test", "up", "demo-index"} <= targets,
        "`constraints.txt` pins torch to one release": "torch=="
        in (ROOT / "constraints.txt").read_text("utf-8"),
        "`deploy/embedstream.toml`": (ROOT / "deploy" / "embedstream.toml").exists(),
        "`pip install 'clients/python[redis]'`": "redis" in client["optional-dependencies"],
        "`make demo ARGS='--documents 100 --in-process'`": "--in-process" in sources(),
        "bulk indexing fills the batches that interactive queries leave room in": lanes
        == ("interactive", "bulk"),
        "Python 3.11 or newer": project["requires-python"].startswith(">=3.11"),
        "Licence: Apache-2.0": project["license"] == "Apache-2.0",
        "FlashInfer": any("flashinfer" in one for one in extras["cuda"]),
        "PostgreSQL, Qdrant, OpenSearch, Chroma, Milvus, Redis 8, Parquet files": {
            *("lance", "pgvector", "qdrant", "opensearch", "chroma", "milvus"),
            *("redis-vectors", "parquet"),
        }
        <= set(extras),
    }


CLAIMS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": _readme,
    "docs/attention.md": _attention,
    "docs/delivery.md": _delivery,
    "docs/demo.md": _demo,
    "docs/deploy.md": _deploy,
    "docs/engine.md": _engine,
    "docs/indexing.md": _indexing,
    "docs/models.md": _models,
    "docs/operations.md": _operations,
    "docs/outputs.md": _outputs,
    "docs/rerankers.md": _rerankers,
}


@pytest.mark.parametrize("page", CLAIMS)
def test_claims_of_a_page_hold(page: str) -> None:
    text = prose(page)
    claims = CLAIMS[page]()
    assert {claim for claim in claims if claim not in text} == set(), "not on the page any more"
    assert {claim for claim, holds in claims.items() if not holds} == set(), "not so in the code"
