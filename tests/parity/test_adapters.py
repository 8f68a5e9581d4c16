"""LoRA folders: merged at load, equal to peft's own forward; refused where peft would do more than that."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.requests import EmbedRequest, Text, TokenIds
from tests.support.models import edit_json, write_adapter, write_model, write_task_adapters

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
TEXTS = ["hello world", "kafka", "the capital of china is beijing", "x", "a river " * 9]


def vectors(runner: Any, texts: list[str]) -> np.ndarray:
    request = EmbedRequest(id="r", input=tuple(map(Text, texts)))
    batch = pack(runner.encoder.encode([request])[0].items)
    return np.stack([outcome.dense for outcome in scatter(batch, runner.forward(batch))])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "m", "bert", prompts={"query": "query: "})


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", base)


@pytest.fixture
def copied(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "a"))


@pytest.mark.parametrize(
    "lora",
    [{}, {"use_dora": True}, {"use_rslora": True, "rank_pattern": {"query": 2}}],
    ids=["plain", "dora", "rslora"],
)
def test_a_merged_adapter_equals_peft(base: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    """A01, A10: pooling and tokenizer from the adapter's folder, weights from its base; the same bytes
    alone and in a pack."""
    from peft import PeftModel
    from sentence_transformers import SentenceTransformer

    folder = write_adapter(tmp_path / "a", base, **lora)
    runner = make_runner_factory("a", folder)()
    assert runner.info.packed and any("merged into m" in note for note in runner.info.notes)
    library = SentenceTransformer(str(base), device="cpu")
    plain = library.encode(TEXTS)
    first: Any = library[0]
    first.auto_model = PeftModel.from_pretrained(first.auto_model, str(folder)).eval()
    want = library.encode(TEXTS)
    got = vectors(runner, TEXTS)
    assert np.abs(got - want).max() <= 1e-5
    assert np.abs(want - plain).max() > 0.01, "the adapter changes nothing"
    assert vectors(runner, TEXTS[2:3]).tobytes() == got[2].tobytes()
    assert runner.info.fingerprint != make_runner_factory("m", base)().info.fingerprint


def test_a_bare_adapter_takes_its_bases_tokenizer_and_a_pooling_that_is_named(
    copied: Path,
) -> None:
    folder = copied
    for name in ("tokenizer.json", "tokenizer_config.json", "modules.json"):
        (folder / name).unlink()
    with pytest.raises(ModelLoadError, match="set `pooling"):
        make_runner_factory("a", folder)()
    got = vectors(make_runner_factory("a", folder, pooling="cls")(), TEXTS)
    assert got.shape == (len(TEXTS), 32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights too"),
        ({"modules_to_save": ["pooler"]}, "modules_to_save = .* is not supported"),
        ({"scale_of_the_moon": 2}, "scale_of_the_moon .*ignore_keys"),
        ({"base_model_name_or_path": "someone/base"}, "which is not at hand .*write its folder"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"target_modules": ["query", "value"]}, "the adapter does not fit m: .*dense"),
    ],
)
def test_an_adapter_that_would_be_merged_wrong_is_refused(
    copied: Path, changes: dict[str, Any], what: str
) -> None:
    edit_json(copied / "adapter_config.json", **changes)
    with pytest.raises(ModelLoadError, match=what):
        make_runner_factory("a", copied)()


def test_without_peft_the_message_says_what_to_install(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelLoadError, match=r"embedstream\[peft\]"):
        make_runner_factory("a", adapter)()


TASKS = ("retrieval_query", "text_matching", "separation")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """jina-embeddings-v3 in transformers' form: two prompts are named as two of its adapters are."""
    prompts = {"retrieval.query": "query: ", "text-matching": ""}
    root = tmp_path_factory.mktemp("tasks")
    folder = write_model(root / "m", "jina_embeddings_v3", prompts=prompts)
    return write_task_adapters(folder, *TASKS)


@pytest.fixture(scope="module")
def runner(tasks: Path) -> Any:
    return make_runner_factory("m", tasks)()


def asked(runner: Any, name: str | None, *inputs: Any, **fields: Any) -> list[Any]:
    request = EmbedRequest(id="r", input=inputs, prompt_name=name, **fields)
    return list(runner.encoder.encode([request])[0].items)


def computed(runner: Any, items: list[Any]) -> list[np.ndarray]:
    batch = pack(items)
    return [outcome.dense for outcome in scatter(batch, runner.forward(batch))]


def test_a_prompts_name_picks_the_adapter_of_that_name(tasks: Path, runner: Any) -> None:
    """A01, A10: as peft's own forward with that adapter active; without a name, the model as it is."""
    from peft import PeftModel
    from sentence_transformers import SentenceTransformer

    assert runner.info.prompts == ("retrieval.query", "separation", "text-matching")
    library = SentenceTransformer(str(tasks), device="cpu")
    first: Any
    want: dict[str | None, Any] = {None: library.encode(TEXTS)}
    named = {"retrieval.query": TASKS[0], "text-matching": TASKS[1], "separation": TASKS[2]}
    for name, task in named.items():
        library = SentenceTransformer(str(tasks), device="cpu")
        first = library[0]
        first.auto_model = PeftModel.from_pretrained(first.auto_model, str(tasks / task)).eval()
        prompt = {"prompt": "query: "} if name == "retrieval.query" else {}
        want[name] = library.encode(TEXTS, **prompt)
    for name, expected in want.items():
        got = computed(runner, asked(runner, name, *map(Text, TEXTS)))
        assert np.abs(np.stack(got) - expected).max() <= 1e-5, name
        assert name is None or np.abs(expected - want[None]).max() > 0.01, "it changes nothing"


def test_texts_of_several_adapters_in_one_pack_get_the_bytes_they_get_alone(runner: Any) -> None:
    """A06: also ids as they came, and texts cut into chunks."""
    items = []
    for name in (None, "retrieval.query", "separation", "text-matching"):
        items += asked(runner, name, *map(Text, TEXTS), TokenIds((0, 9, 8, 2)))
        items += asked(runner, name, Text("a river " * 90), aggregate="mean")
    alone = [computed(runner, [item])[0].tobytes() for item in items]
    assert len({*alone}) == len(items)
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = rng.permutation(len(items))
        for got, i in zip(computed(runner, [items[i] for i in order]), order, strict=True):
            assert got.tobytes() == alone[i], i


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"use_dora": True}, "use_dora of a task adapter"),
        ({"bias": "all"}, "bias = 'all' of a task adapter"),
        ({"scale_of_the_moon": 2}, "scale_of_the_moon .*ignore_keys"),
        ({"target_modules": ["q_proj"]}, "the adapter does not fit m: "),
    ],
)
def test_a_task_adapter_that_would_be_computed_wrong_is_refused(
    tasks: Path, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    folder = Path(shutil.copytree(tasks, tmp_path / "m"))
    edit_json(folder / "separation" / "adapter_config.json", **changes)
    with pytest.raises(ModelLoadError, match=what):
        make_runner_factory("m", folder)()


def test_task_adapters_are_part_of_the_fingerprint_and_go_with_no_other_shape(
    tasks: Path, runner: Any, tmp_path: Path
) -> None:
    """K09"""
    folder = Path(shutil.copytree(tasks, tmp_path / "m"))
    edit_json(folder / "separation" / "adapter_config.json", lora_alpha=7)
    assert make_runner_factory("m", folder)().info.fingerprint != runner.info.fingerprint
    with pytest.raises(ModelLoadError, match="know no task adapters"):
        make_runner_factory("m", folder, cuda_graphs="auto")()
