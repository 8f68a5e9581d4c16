"""Folders that hold something else than a model this engine reads: what each is, and what to do.

Who calls it: `gpu.folder.read`, before the ordinary readers and where one of them finds nothing to read.
What must stay true: names of files and JSON only; every refusal ends in a remedy. docs/models.md has the
same table, and a test holds the two together.
"""

from __future__ import annotations

from pathlib import Path

from gpu.faults import ModelLoadError
from gpu.folder.stored import ADAPTER, WEIGHTS, read_json

# Model types that people ask for and that are not computed here: why, and what to do.
NOT_HERE = {
    "siglip2": "NaFlex takes images of any shape, patch by patch with a mask, which is not computed here; take "
    "a SigLIP 2 model of a fixed resolution (its config.json says `siglip`)",
    "embedding_gemma2": "its images and sounds are not computed here; save its text tower on its own "
    "(`AutoModel.from_pretrained(repo).language_model.save_pretrained(folder)`)",
    "minicpm": "of MiniCPM only the layerwise reranker (LayerWiseMiniCPMForCausalLM) is computed here; take it, or "
    "bge-reranker-v2-m3",
    "llama_nemotron_vl": "its images are not computed here; take llama-nemotron-embed-1b-v2 or CLIP",
    **dict.fromkeys(
        ("qwen3_vl", "qwen2_5_vl", "jina_embeddings_v4", "colpali", "colqwen2", "idefics3"),
        "this tower of images is not computed here; take CLIP or GME",
    ),
}

SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")


def refuse_odd(folder: Path) -> None:
    """Raises `ModelLoadError` for a folder without a config that says what it is by its files."""
    config = folder / "config.json"
    if config.is_file() and not isinstance(read_json(config), dict):
        raise ModelLoadError(
            f"{config} holds no JSON object, so it is no model's config; fetch it again"
        )
    if config.is_file() or any((folder / name).is_file() for name in ("modules.json", ADAPTER)):
        return
    if what := _elsewhere(folder) or _other_format(folder):
        raise ModelLoadError(f"{folder}: {what}")


def _elsewhere(folder: Path) -> str | None:
    """The folder is no model's own: what it is."""
    if not any(folder.iterdir()):
        return "an empty folder; fetch the model into it, or correct the path"
    if (folder / "model_index.json").is_file():
        return "a diffusion pipeline of the diffusers library, which makes pictures; name a model that embeds or scores"
    for pattern in ("*/config.json", "snapshots/*/config.json"):
        if found := sorted(folder.glob(pattern)):
            inner = found[0].parent.relative_to(folder)
            return f"no model itself, but a folder around one; set the path to {inner} inside it"
    if (folder / "params.json").is_file():
        return (
            "weights as Meta or Mistral first publish them (params.json); take the repository in transformers' form, "
            "which holds a config.json (its name often ends in -hf)"
        )
    return None


def no_weights(folder: Path) -> str:
    """The message for a folder with a config and without weights."""
    for name in WEIGHTS:
        if (folder / name).is_symlink():
            return f"{folder / name} is a link to a file that is not there; fetch the folder again"
    if any(folder.glob("model-*-of-*.safetensors")) or any(folder.glob("pytorch_model-*-of-*.bin")):
        return (
            f"{folder}: weights in several files without the index that names them (model.safetensors.index.json); "
            "the download is not complete: fetch the folder again"
        )
    if what := _other_format(folder):
        return f"{folder}: {what}"
    return (
        f"{folder}: no weights (model.safetensors) in the folder; if the hub repository holds "
        "pytorch_model.bin alone, set `allow_pickle = true`, or convert it: "
        "`AutoModel.from_pretrained(repo).save_pretrained(folder)`"
    )


def _other_format(folder: Path) -> str | None:
    if any(folder.glob("*.gguf")):
        return (
            "a GGUF file, which is llama.cpp's format; take the repository that it was converted from, "
            "which holds safetensors"
        )
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        return (
            "ONNX files without safetensors; take the repository that they were exported from (its name "
            "stands in the README, mostly as base_model)"
        )
    for name, library in (
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("saved_model.pb", "TensorFlow"),
        ("openvino_model.xml", "OpenVINO"),
        ("*.mlpackage", "Core ML"),
        ("*.mlmodel", "Core ML"),
        ("*.engine", "TensorRT"),
    ):
        if any(folder.glob(name)):
            return f"{library} weights alone; take a revision or a repository with safetensors"
    for pattern in ("*.pt", "*.pth", "*.ckpt", "*.pkl", "*.joblib"):
        if found := sorted(folder.glob(pattern)):
            return (
                f"a pickle under a name that no library looks for ({found[0].name}), which may run code when it is "
                "read; load it with the code that wrote it, and write the folder with `save_pretrained`"
            )
    return None


def odd_tokenizer(folder: Path, *, slow: bool = False) -> str | None:
    """The message for a tokenizer that has to be converted first; None: there is a tokenizer.json, or
    one that transformers builds without further packages. slow: transformers has no way to write one."""
    if (folder / "tokenizer.json").is_file():
        return None
    found = next((name for name in SENTENCEPIECE if (folder / name).is_file()), None)
    if found is None:
        return None
    what = f"{folder}: the tokenizer is a sentencepiece model ({found}) without a tokenizer.json"
    if slow:
        return f"{what}; take a repository that holds both, or SigLIP 2"
    return (
        f"{what}; write one, where the packages sentencepiece and protobuf are installed: "
        "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
    )


def odd_architecture(folder: Path, architecture: str) -> str | None:
    """The message for published models that name a class of another library; None: an ordinary one."""
    if architecture == "HF_ColBERT":
        return (
            f"{folder}: HF_ColBERT is Stanford's class; save the model once in the form of "
            "Sentence-Transformers (`MultiVectorEncoder(repo).save_pretrained(folder)`) and serve that"
        )
    return None
