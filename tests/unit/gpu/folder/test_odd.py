"""Folders that hold something else: each refusal says what it is and what to do, as docs/models.md does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from tests.support.models import edit_json, write_model

PAGE = (Path(__file__).parents[4] / "docs" / "models.md").read_text()


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def gguf(folder: Path) -> None:
    (empty(folder) / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


def onnx(folder: Path) -> None:
    (empty(folder) / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"x")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))


def pickles(folder: Path) -> None:
    write_model(folder, "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def hub_pickles(folder: Path) -> None:
    """As it comes from the hub while pickles may not be fetched."""
    write_model(folder, "bert")
    (folder / "model.safetensors").unlink()


def tensorflow(folder: Path) -> None:
    hub_pickles(folder)
    (folder / "tf_model.h5").write_bytes(b"x")


def adapter(folder: Path) -> None:
    empty(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/base"}))
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def sentencepiece(folder: Path) -> None:
    write_model(folder, "xlm-roberta")
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(b"x")


def new_type(folder: Path) -> None:
    write_model(folder, "bert")
    edit_json(folder / "config.json", model_type="new", auto_map={"AutoModel": "modeling.NewModel"})


def typed(model_type: str, *, code: bool = False) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder, "bert")
        maps = {"auto_map": {"AutoModel": "modeling.Model"}} if code else {}
        edit_json(folder / "config.json", model_type=model_type, **maps)

    return write


def nomic_moe(folder: Path) -> None:
    write_model(folder, "nomic_bert")
    edit_json(folder / "config.json", num_experts=8, moe_top_k=2)


def jina_code(folder: Path) -> None:
    write_model(folder, "xlm-roberta")
    edit_json(folder / "config.json", lora_adaptations=["retrieval.query"], lora_alpha=1)


def naver_splade(folder: Path) -> None:
    write_model(folder, "bert", pooling=None)
    edit_json(folder / "config.json", architectures=["BertForMaskedLM"])


def stanford_colbert(folder: Path) -> None:
    write_model(folder, "bert", pooling=None)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "GGUF": (gguf, "llama.cpp's format; take the repository"),
    "ONNX without safetensors": (onnx, "take the repository that they were exported from"),
    "a `pytorch_model.bin` in a folder": (pickles, "allow_pickle = true"),
    "a `pytorch_model.bin` on the hub": (hub_pickles, "allow_pickle = true"),
    "TensorFlow, Flax, OpenVINO": (tensorflow, "TensorFlow weights alone; take a revision"),
    "an adapter whose base model is not at hand": (adapter, "an adapter to a/base, which is not at hand"),
    "SigLIP 2 NaFlex": (typed("siglip2"), "a SigLIP 2 model of a fixed resolution"),
    "EmbeddingGemma 2 with its towers": (typed("embedding_gemma2"), "save its text tower on its own"),
    "MiniCPM that is no layerwise reranker": (
        typed("minicpm", code=True), "only the layerwise reranker",
    ),
    "a Nemotron that takes images": (typed("llama_nemotron_vl", code=True), "its images are not computed"),
    "Qwen3-VL, jina-embeddings-v4, ColPali": (typed("qwen3_vl"), "this tower of images"),
    "jina-embeddings-v3 with code of its own": (jina_code, "take jinaai/jina-embeddings-v3-hf"),
    "nomic-embed-text-v2-moe": (nomic_moe, "the key num_experts"),
    "a sentencepiece tokenizer alone": (sentencepiece, "write one, where the packages"),
    'model type `new`': (new_type, "in the form `gte` alone; take a repository of that type; or read that code"),
    "a `*ForMaskedLM` without modules.json": (naver_splade, 'set `pooling = "splade"`'),
    "an `HF_ColBERT`": (stanford_colbert, "save the model once in the form of"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_each_says_what_it_is_and_what_to_do(tmp_path: Path, what: str) -> None:
    """K27"""
    write, words = ODD[what]
    write(tmp_path / "m")
    with pytest.raises(ModelLoadError) as caught:
        make_runner_factory("m", tmp_path / "m")()
    assert words in str(caught.value)
    assert f"| {what} |" in PAGE


def test_a_folder_of_nothing_is_not_called_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json is missing"):
        load_spec(empty(tmp_path / "m"))


def test_files_that_do_not_fit_each_other_end_in_one_line(tmp_path: Path) -> None:
    """A post-processor that names a token which is not there makes the tokenizers library panic."""
    folder = write_model(tmp_path / "m", "qwen3")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["post_processor"]["single"][-1]["SpecialToken"]["id"] = "<gone>"
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelLoadError, match="tokenizer"):
        make_runner_factory("m", folder)()


def test_a_dense_module_that_does_not_fit_its_weights_is_refused(tmp_path: Path) -> None:
    """K25"""
    folder = write_model(tmp_path / "m", "bert", dense=8)
    edit_json(folder / "2_Dense" / "config.json", out_features=9)
    with pytest.raises(ModelLoadError, match=r"weight \(9, 32\), the weights hold \(8, 32\)"):
        make_runner_factory("m", folder)()
