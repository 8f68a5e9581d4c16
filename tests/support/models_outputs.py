"""Tiny seeded folders of models with other outputs than one dense vector.

Who calls it: tests of sparse, token-level and static models.
What must stay true: the same layout as published folders (`modules.json`, `sparse_linear.pt`, ...), so
that sentence-transformers or the formulas of their own libraries are the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models import HIDDEN, WORDS, _dump, edit_json, write_model

ST = "sentence_transformers."


def write_splade(
    folder: Path,
    family: str = "bert",
    *,
    strategy: str = "max",
    activation: str = "relu",
    modules: bool = True,
    seed: int = 0,
    **config_fields: Any,
) -> Path:
    """A `*ForMaskedLM` folder; with `modules`, a Sentence-Transformers SPLADE one."""
    import torch
    import transformers

    write_model(folder, family, pooling=None, seed=seed, **config_fields)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForMaskedLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.5)
        model.save_pretrained(folder)
    if modules:
        kind = f"{ST}sparse_encoder.models."
        _write_modules(folder, [("", f"{kind}MLMTransformer"), ("1_Pool", f"{kind}SpladePooling")])
        _dump(
            folder / "1_Pool" / "config.json",
            {"pooling_strategy": strategy, "activation_function": activation},
        )
        _dump(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return folder


def write_router(folder: Path, **model: Any) -> Path:
    """Inference-free SPLADE, as sentence-transformers itself writes it: documents through a masked-LM
    model, queries through a table."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import (
        MLMTransformer,
        SparseStaticEmbedding,
        SpladePooling,
    )

    documents = write_splade(folder.with_name("documents"), "bert", modules=False, **model)
    transformer = MLMTransformer(str(documents))
    generator = torch.Generator().manual_seed(2)
    weight = torch.rand(len(transformer.tokenizer), generator=generator)
    weight[::7] = 0.0
    table = SparseStaticEmbedding(transformer.tokenizer, weight=weight)
    router = Router.for_query_document([table], [transformer, SpladePooling("max")])
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder))
    return folder


def write_m3(folder: Path, *, modules: bool = True, normalize: bool = True, **fields: Any) -> Path:
    """An XLM-R folder with BGE-M3's two extra heads."""
    import torch

    write_model(
        folder, "xlm-roberta", pooling="cls" if modules else None, normalize=normalize, **fields
    )
    generator = torch.Generator().manual_seed(7)
    for name, out in (("sparse_linear.pt", 1), ("colbert_linear.pt", HIDDEN)):
        weight = torch.randn(out, HIDDEN, generator=generator) * 0.3
        bias = torch.randn(out, generator=generator) * 0.1 + (1.0 if out == 1 else 0.0)
        torch.save({"weight": weight, "bias": bias}, folder / name)
    return folder


def write_colbert(
    folder: Path,
    family: str = "bert",
    *,
    size: int = 12,
    style: str = "st",
    skip: tuple[str, ...] = (),
    prefixes: bool = False,
    expand: bool | dict[str, Any] = False,
    **fields: Any,
) -> Path:
    """A ColBERT folder as sentence-transformers writes it (`st`) or as PyLate 3 did (`pylate`).

    expand: queries are filled up with mask tokens; a dict says how, in the words of the layout."""
    import torch
    from safetensors.torch import save_file

    write_model(folder, family, pooling=None, **fields)
    (folder / "1_Dense").mkdir()
    generator = torch.Generator().manual_seed(5)
    save_file(
        {"linear.weight": torch.randn(size, HIDDEN, generator=generator)},
        folder / "1_Dense" / "model.safetensors",
    )
    dense: dict[str, Any] = {
        "in_features": HIDDEN,
        "out_features": size,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    st_config: dict[str, Any] = {"prompts": {}}
    if style == "pylate":
        modules = [("", f"{ST}models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
        st_config |= {
            "model_type": "ColBERT",
            "skiplist_words": list(skip),
            "do_query_expansion": bool(expand),
            "query_prefix": "[Q] " if prefixes else "",
            "document_prefix": "[D] " if prefixes else "",
        }
        st_config |= expand if isinstance(expand, dict) else {}
        if prefixes:
            _add_tokens(folder, ["[Q] ", "[D] "])
    else:
        base = f"{ST}base.modules."
        mask = f"{ST}multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
        modules = [
            ("", f"{base}transformer.Transformer"),
            ("1_Dense", f"{base}dense.Dense"),
            ("2_MultiVectorMask", mask),
            ("3_Normalize", f"{ST}sentence_transformer.modules.normalize.Normalize"),
        ]
        dense |= dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
        st_config["model_type"] = "MultiVectorEncoder"
        if expand:
            edit_json(folder / "sentence_bert_config.json", query_expansion=expand)
        (folder / "2_MultiVectorMask").mkdir()
        _dump(folder / "2_MultiVectorMask" / "config.json", {"skiplist_words": list(skip)})
        (folder / "3_Normalize").mkdir()
        names = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
        _dump(folder / "3_Normalize" / "config.json", names)
    if expand:
        known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        masks = [t["content"] for t in known if t["content"] in ("[MASK]", "<unk>")]
        edit_json(folder / "tokenizer_config.json", mask_token=(masks or [None])[0])
    _dump(folder / "1_Dense" / "config.json", dense)
    _dump(folder / "config_sentence_transformers.json", st_config)
    _write_modules(folder, modules)
    return folder


def write_static(
    folder: Path,
    *,
    size: int = 16,
    weights: bool = False,
    mapping: bool = False,
    layout: str = "model2vec",
    dtype: str = "float32",
    normalize: bool = True,
    **config: Any,
) -> Path:
    """A Model2Vec folder, or the same table as a sentence-transformers StaticEmbedding (`st`)."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["[PAD]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # As distilled models keep it from their teacher; static models must not use it.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[PAD] $A [PAD]", special_tokens=[("[PAD]", 0)]
    )
    rng = np.random.default_rng(3)
    n_rows = len(pieces) // 2 if mapping else len(pieces)
    table = rng.standard_normal((n_rows, size)).astype(np.float32)
    if dtype == "int8":
        table = np.clip(table * 40, -127, 127)
    tensors = {"embeddings": table.astype(dtype)}
    if weights:
        tensors["weights"] = rng.uniform(0.1, 2.0, len(pieces)).astype(np.float32)
    if mapping:
        tensors["mapping"] = rng.integers(0, n_rows, len(pieces)).astype(np.int64)
    where = folder
    if layout == "st":
        where = folder / "0_StaticEmbedding"
        where.mkdir(exist_ok=True)
        tensors = {"embedding.weight": tensors["embeddings"]}
        kinds = [("0_StaticEmbedding", f"{ST}models.StaticEmbedding")]
        kinds += [("1_Normalize", f"{ST}models.Normalize")] if normalize else []
        _write_modules(folder, kinds)
    else:
        said = {"model_type": "model2vec", "architectures": ["StaticModel"], **config}
        _dump(folder / "config.json", {**said, "normalize": normalize})
    tokenizer.save(str(where / "tokenizer.json"))
    save_file(tensors, where / "model.safetensors")
    return folder


def _write_modules(folder: Path, modules: list[tuple[str, str]]) -> None:
    entries = []
    for i, (path, kind) in enumerate(modules):
        (folder / path).mkdir(exist_ok=True)
        entries.append({"idx": i, "name": str(i), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(entries, indent=1))


def _add_tokens(folder: Path, tokens: list[str]) -> None:
    """Add ordinary (not special) tokens, and give the weights rows for them."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    name = next(n for n in state if n.endswith(("word_embeddings.weight", "tok_embeddings.weight")))
    rows = torch.randn(len(tokens), state[name].shape[1], generator=generator) * 0.3
    state[name] = torch.cat([state[name], rows])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", vocab_size=tokenizer.get_vocab_size())


def write_csr(
    folder: Path, *, centred: bool = False, unit: bool = False, dense: int | None = None, k: int = 8
) -> Path:
    """A BERT with a SparseAutoEncoder of 64 latents behind its pooling. centred: the module normalises what it
    is given; unit: a Normalize module stands before it; dense: a Dense module of that size too."""
    import json

    import torch
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    write_model(folder, "bert", normalize=unit, dense=dense)
    modules = json.loads((folder / "modules.json").read_text())
    path = f"{len(modules)}_SparseAutoEncoder"
    kind = "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder"
    modules.append({"idx": len(modules), "name": str(len(modules)), "path": path, "type": kind})
    _dump(folder / "modules.json", modules)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = SparseAutoEncoder(dense or 32, hidden_dim=64, k=k, k_aux=16, normalize=centred)
        with torch.no_grad():
            made.pre_bias.normal_(std=0.3)
            made.latent_bias.normal_(std=0.1)
    (folder / path).mkdir()
    made.save(str(folder / path))
    _dump(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return folder
