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


def incomplete(folder: Path) -> Path:
    """Two shards and their index, of which the second is not there."""
    from safetensors.torch import load_file, save_file

    write_model(folder, "bert")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(names[len(names) // 2 :], "model-00002-of-00002.safetensors")
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def without_index(folder: Path) -> None:
    (incomplete(folder) / "model.safetensors.index.json").unlink()


def cut_short(folder: Path) -> None:
    write_model(folder, "bert")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def pointer(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder, "bert")
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
        (folder / name).write_text(text)

    return write


def broken_link(folder: Path) -> None:
    """A folder of the hub's cache whose blobs were removed."""
    write_model(folder, "bert")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")


def around(inner: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder / inner, "bert")

    return write


def holding(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        empty(folder)
        for name in names:
            (folder / name).write_text("{}")

    return write


def odd_pickle(folder: Path) -> None:
    hub_pickles(folder)
    (folder / "model.pt").write_bytes(b"x")


def quantized(**fields: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder, "bert")
        edit_json(folder / "config.json", **fields)

    return write


def no_object(folder: Path) -> None:
    write_model(folder, "bert")
    (folder / "config.json").write_text("[]")


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
    "nomic-embed-text-v2-moe": (nomic_moe, "take nomic-embed-text-v1.5"),
    "a sentencepiece tokenizer alone": (sentencepiece, "write one, where the packages"),
    "a `*ForMaskedLM` without modules.json": (naver_splade, 'set `pooling = "splade"`'),
    "an empty folder": (empty, "an empty folder; fetch the model into it"),
    "a folder around a model": (around("inner"), "set the path to inner inside it"),
    "a folder of the hub's cache": (around("snapshots/0af"), "set the path to snapshots/0af inside it"),
    "weights in several files, one missing": (incomplete, "00002.safetensors is missing, one of the 2 files"),
    "weights in several files without their index": (without_index, "without the index that names them"),
    "weights that end early": (cut_short, "the download is not complete; fetch it again"),
    "a link to a file that is gone": (broken_link, "a link to a file that is not there; fetch the folder"),
    "a Git LFS pointer": (pointer("model.safetensors"), "a Git LFS pointer"),
    "a Git LFS pointer as tokenizer": (pointer("tokenizer.json"), "run `git lfs pull` in the repository"),
    "another pickle (`model.pt`, `.ckpt`, `.pkl`)": (odd_pickle, "a pickle under a name that no library"),
    "quantized weights (GPTQ, AWQ, bitsandbytes)": (
        quantized(quantization_config={"quant_method": "gptq"}), "save the model dequantized"),
    "quantized weights (MLX)": (quantized(quantization={"bits": 4}), "save the model dequantized"),
    "Meta's or Mistral's first form": (holding("params.json", "consolidated.00.pth"), "ends in -hf"),
    "a diffusion pipeline": (holding("model_index.json"), "name a model that embeds or scores"),
    "a config that is no object": (no_object, "holds no JSON object"),
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
    (empty(tmp_path / "m") / "notes.txt").write_text("x")
    with pytest.raises(ModelLoadError, match=r"config.json is missing"):
        load_spec(tmp_path / "m")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelLoadError, match="is not a folder"):
        load_spec(tmp_path / "file")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    folder = incomplete(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="names a file outside of its folder"):
        make_runner_factory("m", folder)()
    for text in ("[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(ModelLoadError, match="holds no weight_map"):
            make_runner_factory("m", folder)()


def test_files_beside_the_weights_are_no_weights(tmp_path: Path) -> None:
    """K09: a copy in half precision, shards of an older state and a pickle: transformers reads none of them, and
    the fingerprint counts none; not even a damaged one is opened."""
    folder = write_model(tmp_path / "m", "bert")
    first = load_spec(folder)
    assert [path.name for path in first.weights] == ["model.safetensors"]
    for name in ("model.fp16.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_text("{")
    again = load_spec(folder)
    assert again.weights == first.weights and again.fingerprint == first.fingerprint


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
