"""Our own BERT and its kin: the numbers of transformers' classes on the same weights, and nothing else taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gpu.batch import EncodedItem, ItemOptions, pack
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from tests.support.models import edit_json, write_model

KIN = ("bert", "roberta", "xlm-roberta", "camembert")


def runner(folder: Path, implementation: str = "auto", **given: Any) -> Any:
    return make_runner_factory("m", folder, implementation=implementation, **given)()


def items(
    runner: Any, lengths: list[int], *, types: bool, task: Any = "embed"
) -> list[EncodedItem]:
    rng = np.random.default_rng(len(lengths))
    made = []
    for length in lengths:
        ids = rng.integers(5, int(runner.spec.config["vocab_size"]), length, dtype=np.int32)
        kinds = rng.integers(0, 2, length, dtype=np.int32) if types else None
        made.append(EncodedItem(ids, options=ItemOptions(task=task), token_type_ids=kinds))
    return made


@pytest.mark.parametrize("labels", [None, 1, 3])
@pytest.mark.parametrize("family", KIN)
def test_it_gives_the_numbers_of_transformers_classes(
    tmp_path: Path, family: str, labels: int | None
) -> None:
    folder = write_model(tmp_path / "m", family, labels=labels)
    ours, theirs = runner(folder), runner(folder, "transformers")
    assert (ours.info.implementation, theirs.info.implementation) == ("own", "transformers")
    assert ours.info.packed
    assert ours.info.fingerprint == theirs.info.fingerprint
    assert ours.info.notes == theirs.info.notes
    task = min(ours.spec.tasks)
    batch = pack(items(ours, [1, 40, 7, 7, 2, 19], types=family == "bert", task=task))
    for one, other in zip(ours.forward(batch), theirs.forward(batch), strict=True):
        for name in ("dense", "scores"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_it_does_so_for_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    heads = data.draw(st.sampled_from([1, 2, 3, 4]))
    fields = {
        "num_attention_heads": heads,
        "hidden_size": 32 if heads in (1, 2, 4) else 48,
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "intermediate_size": data.draw(st.sampled_from([1, 17, 64])),
        "layer_norm_eps": data.draw(st.sampled_from([1e-12, 1e-5, 1e-2])),
        "type_vocab_size": data.draw(st.sampled_from([1, 2])),
    }
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    family = data.draw(st.sampled_from(KIN))
    folder = write_model(tmp_path_factory.mktemp("m") / "m", family, pooling=None, **fields)
    ours = runner(folder, pooling="mean")
    theirs = runner(folder, "transformers", pooling="mean")
    assert ours.info.implementation == "own"
    batch = pack(items(ours, lengths, types=False))
    for one, other in zip(ours.forward(batch), theirs.forward(batch), strict=True):
        np.testing.assert_allclose(one.dense, other.dense, atol=2e-5, rtol=1e-4)


def test_an_item_alone_has_the_bits_it_has_in_a_pack(tmp_path: Path) -> None:
    ours = runner(write_model(tmp_path / "m", "bert"))
    made = items(ours, [3, 9, 9, 1, 30, 5, 9], types=True)
    together = ours.forward(pack(made))
    batch = pack(made)
    for row, outcome in enumerate(together):
        alone = ours.forward(pack([batch.items[row]]))[0]
        assert np.array_equal(alone.dense, outcome.dense)


def test_weights_in_half_precision_or_in_shards_are_taken(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "roberta")
    state = load_file(folder / "model.safetensors")
    expected = runner(folder)
    batch = pack(items(expected, [4, 12], types=False))
    names = sorted(state)
    halves = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    for part, keys in halves.items():
        save_file(
            {name: state[name] for name in keys}, folder / f"{part}.safetensors", {"format": "pt"}
        )
    (folder / "model.safetensors").unlink()
    index = {name: f"{part}.safetensors" for part, keys in halves.items() for name in keys}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    sharded = runner(folder)
    assert sharded.info.implementation == "own"
    for one, other in zip(expected.forward(batch), sharded.forward(batch), strict=True):
        assert np.array_equal(one.dense, other.dense)
    for path in folder.glob("?.safetensors"):
        part = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(part, path, {"format": "pt"})
    ours, theirs = runner(folder), runner(folder, "transformers")
    assert ours.info.implementation == "own"
    for one, other in zip(ours.forward(batch), theirs.forward(batch), strict=True):
        np.testing.assert_allclose(one.dense, other.dense, atol=2e-6)


def test_a_checkpoint_saved_with_its_head_before_the_names_is_taken(tmp_path: Path) -> None:
    """A base model cut out of a masked LM: `bert.` before each name, heads that nobody reads beside them."""
    folder = write_model(tmp_path / "m", "bert")
    path = folder / "model.safetensors"
    expected = runner(folder)
    state = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    state["cls.predictions.bias"] = torch.zeros(3)
    save_file(state, path, {"format": "pt"})
    ours = runner(folder)
    assert ours.info.implementation == "own"
    assert "1 tensors of a pre-training head were left out" in ours.info.notes
    batch = pack(items(ours, [4, 12], types=False))
    for one, other in zip(expected.forward(batch), ours.forward(batch), strict=True):
        assert np.array_equal(one.dense, other.dense)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_new"},
        {"layer_norm_eps": None},
        {"type_vocab_size": None},
        {"pad_token_id": None},
    ],
    ids=str,
)
def test_what_it_does_not_compute_goes_to_transformers(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "m", "bert")
    edit_json(folder / "config.json", **change)
    assert runner(folder).info.implementation == "transformers"


@pytest.mark.parametrize("damage", ["missing", "shape", "more"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    folder = write_model(tmp_path / "m", "bert")
    path = folder / "model.safetensors"
    state = load_file(path)
    name = "encoder.layer.1.attention.self.key.weight"
    if damage == "missing":
        del state[name]
    elif damage == "shape":
        state[name] = state[name][:-1].clone()
    else:
        name = "encoder.layer.1.attention.self.key.scale"
        state[name] = torch.ones(1)
    save_file(state, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        runner(folder)


def test_a_process_with_such_a_model_imports_neither_transformers_nor_a_compiler(
    tmp_path: Path,
) -> None:
    """Five of the six seconds of a one-off `embed` were imports."""
    folder = write_model(tmp_path / "m", "bert")
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="BertTokenizer",
        do_lower_case=True,
        mask_token="[MASK]",
    )
    edit_json(
        folder / "tokenizer.json",
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    code = (
        "import sys\n"
        "from gpu.load import make_runner_factory\n"
        f"runner = make_runner_factory('m', {str(folder)!r})()\n"
        "from schemas.requests import EmbedRequest, Text\n"
        "from gpu.batch import pack\n"
        "(found,) = runner.encoder.encode([EmbedRequest(id='r', input=(Text('hello world'),))])\n"
        "assert runner.forward(pack(found.items))[0].dense is not None\n"
        "heavy = ('transformers', 'torch._dynamo', 'sympy', 'scipy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("model", "reads_first"),
    [
        ({"pooling": "cls"}, True),
        ({"pooling": "cls", "dense": 8}, True),
        ({"labels": 1}, True),
        ({"labels": 3}, True),
        ({"pooling": "mean"}, False),
        ({"pooling": "lasttoken"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_last_layer_for_first_tokens_alone_gives_the_same_bits(
    tmp_path: Path, family: str, model: dict[str, Any], reads_first: bool
) -> None:
    ours = runner(write_model(tmp_path / "m", family, **model))
    assert (ours._first is not None) is reads_first
    task = min(ours.spec.tasks)
    made = items(ours, [1, 40, 7, 7, 2, 19, 1], types=family == "bert", task=task)
    made[1].pooled_from = 3  # a prompt that is left out of the pooling
    packs = [pack(made), pack(made[:1])]
    quick = [ours.forward(batch) for batch in packs]
    ours._first = None
    for batch, found in zip(packs, quick, strict=True):
        for one, other in zip(found, ours.forward(batch), strict=True):
            for name in ("dense", "scores"):
                a, b = getattr(one, name), getattr(other, name)
                assert (a is None) == (b is None)
                assert a is None or np.array_equal(a, b)
