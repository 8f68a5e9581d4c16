"""The fingerprint changes exactly when a vector does: every value of every file of three folders, changed."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu.batch import ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.errors import EmbedstreamError
from schemas.requests import ClassifyRequest, Document, EmbedRequest, RerankRequest, Text
from tests.support.models import LETTERS, WORDS, edit_json, write_model

# Every piece of the small vocabularies, segments longer than the limit, prompts, and special tokens.
TEXTS = (
    "Hello World [SEP] </s> <|endoftext|> aaaaa the thin in a",
    " ".join(WORDS[:40]),
    " ".join(WORDS[40:]) + " x1 " + " ".join(f"q{c}" for c in LETTERS),
    "a river of text " * 30,
    "[]<>/.,!?:- \u00e9\u4e2d",
)


def embedder(folder: Path) -> Path:
    write_model(
        folder,
        "bert",
        dense=8,
        max_seq_length=48,
        prompts={"query": "query: "},
        include_prompt=False,
    )
    edit_json(folder / "config_sentence_transformers.json", similarity_fn_name="cosine")
    edit_json(folder / "config_sentence_transformers.json", __version__={"pytorch": "2.0"})
    return folder


def decoder(folder: Path) -> Path:
    return write_model(folder, "qwen3", pooling="lasttoken", max_seq_length=60)


def reranker(folder: Path) -> Path:
    return write_model(folder, "xlm-roberta", pooling=None, labels=1)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "embedder": embedder,
    "decoder": decoder,
    "reranker": reranker,
}


def answers(folder: Path) -> tuple[str, list[bytes]] | None:
    """(fingerprint, every number that the folder gives); None: it is refused."""
    try:
        runner = make_runner_factory("m", folder)()
    except ModelLoadError:
        return None
    texts = tuple(map(Text, TEXTS))
    requests: list[Any] = []
    if "embed" in runner.info.tasks:
        requests = [
            EmbedRequest(id="r", input=texts, truncate="right", prompt_name=name)
            for name in (None, *runner.info.prompts)
        ]
    if "rerank" in runner.info.tasks:
        documents = tuple(Document(text=text) for text in TEXTS)
        requests = [RerankRequest(id="r", query="hello", documents=documents, truncate="right")]
        requests.append(ClassifyRequest(id="r", input=texts, truncate="right"))
    found = [",".join(runner.info.labels).encode()]
    for request in requests:
        encoded = runner.encoder.encode([request])[0]
        if isinstance(encoded, EmbedstreamError):
            found.append(str(encoded.code).encode())
            continue
        kept = [item for item in encoded.items if not isinstance(item, EmbedstreamError)]
        batch = pack(kept)
        for outcome in scatter(batch, runner.forward(batch)):
            if isinstance(outcome, EmbedstreamError):
                found.append(outcome.code.encode())
                continue
            assert isinstance(outcome, ItemResult)
            values = outcome.dense if outcome.dense is not None else outcome.scores
            assert values is not None
            found.append(values.tobytes())
        found.extend(b"refused" for item in encoded.items if isinstance(item, EmbedstreamError))
    return runner.info.fingerprint, found


def changed(value: Any) -> list[Any]:
    """Other values in place of one: what an editor, or another version of a library, would write."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if isinstance(value, str):
        return [value + "x"]
    return [1] if value is None else []


def mutations(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, new value) for every value; of a long list or table every twentieth entry."""
    if isinstance(data, dict | list):
        entries = list(data.items() if isinstance(data, dict) else enumerate(data))
        for key, value in entries[:: 20 if len(entries) > 40 else 1]:
            yield from mutations(value, (*path, key))
    else:
        for value in changed(data):
            yield path, value


def mutated(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


# Values that change what some text becomes, but none of `TEXTS` in every case; and the prompt's own words,
# which stand in the reply.
OF_OTHER_TEXTS = (
    "tokenizer.json model.",
    "tokenizer.json added_tokens.",
    "tokenizer.json normalizer.",
    "tokenizer.json pre_tokenizer.",
    "config_sentence_transformers.json prompts.",
    "config.json use_sliding_window",  # layer_types says which layers, where it is written
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FOLDERS)
def test_whatever_changes_a_number_changes_it_and_nothing_else_does(
    tmp_path: Path, kind: str
) -> None:
    """K09"""
    folder = FOLDERS[kind](tmp_path / "m")
    first = answers(folder)
    assert first is not None and answers(folder) == first
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for file in sorted(folder.rglob("*.json")):
        original = file.read_text(encoding="utf-8")
        for place, value in mutations(json.loads(original)):
            file.write_text(json.dumps(mutated(json.loads(original), place, value)))
            now = answers(folder)
            name = f"{file.relative_to(folder)} {'.'.join(map(str, place))} = {value!r}"
            if now is None:
                counts["refused"] += 1
            elif (now[0] != first[0]) == (now[1] != first[1]):
                counts["both" if now[0] != first[0] else "neither"] += 1
            elif now[0] != first[0] and name.startswith(OF_OTHER_TEXTS):
                counts["of other texts"] += 1
            else:
                wrong.append(f"{name}: {'fingerprint' if now[0] != first[0] else 'numbers'} alone")
        file.write_text(original)
    print(f"{kind}: {counts.total()} values tried, {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert counts["both"] >= 5 and counts["neither"] >= 5 and counts["refused"] >= 5


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_tensor_that_is_read_changes_it(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = FOLDERS[kind](tmp_path / "m")
    first = answers(folder)
    assert first is not None
    counts: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(file)
        for name in [*sorted(tensors)[::4], *(n for n in tensors if "pooler" in n)]:
            other = {n: t.clone() for n, t in tensors.items()}
            # Softmax forgets what is added to every score alike (the keys' bias).
            other[name].view(-1)[:: max(1, other[name].numel() // 7)] += 0.5
            save_file(other, file)
            now = answers(folder)
            assert now is not None
            counts["both" if now[0] != first[0] and now[1] != first[1] else "not both"] += 1
            if "key.bias" not in name:
                assert (now[0] != first[0]) == (now[1] != first[1]), name
        save_file(tensors, file)
    print(f"{kind}: {counts.total()} tensors tried, {dict(counts)}")
    assert counts["both"] >= 5


def test_what_is_no_part_of_the_model_leaves_it(tmp_path: Path) -> None:
    """README, other formats, file times, another order of keys, shards, and the folder's place."""
    from safetensors.torch import load_file, save_file

    folder = embedder(tmp_path / "m")
    first = make_runner_factory("m", folder)().info.fingerprint
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (other / "README.md").write_text("words")
    (other / "onnx").mkdir()
    (other / "onnx" / "model.onnx").write_bytes(b"x")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    tensors = load_file(other / "model.safetensors")
    save_file(
        dict(reversed(tensors.items())), other / "model.safetensors", {"format": "pt", "x": "y"}
    )
    assert make_runner_factory("m", other)().info.fingerprint == first
