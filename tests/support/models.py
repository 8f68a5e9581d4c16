"""Tiny seeded model folders with small real tokenizers: written in milliseconds, no network.

Who calls it: unit tests of `gpu` and integration tests that want a real runner.
What must stay true: the folders are ordinary ones (config, safetensors, tokenizer.json, modules.json),
so nothing in the code under test knows that they are tiny; the same call writes the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models_encoders import ENCODERS
from tests.support.models_more import MORE

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 32, 2, 4, 64
WORDS = [
    "the",
    "a",
    "of",
    "to",
    "and",
    "in",
    "is",
    "it",
    "on",
    "for",
    "stream",
    "queue",
    "topic",
    "broker",
    "vector",
    "text",
    "model",
    "batch",
    "token",
    "river",
    "mountain",
    "capital",
    "china",
    "beijing",
    "paris",
    "hello",
    "world",
    "kafka",
    "redis",
    "small",
    "large",
    "red",
    "blue",
    "green",
    "query",
    "passage",
    "document",
    "answer",
    "question",
    "one",
    "two",
    "three",
    "four",
    "five",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def _wordpiece() -> tuple[Any, dict[str, str]]:
    """BERT-like: lower-casing WordPiece, ``[CLS] a [SEP] b [SEP]`` with segment ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *"[]<>/.,!?:", *LETTERS, *(f"##{c}" for c in LETTERS), *WORDS]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100)  # type: ignore[call-arg]
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tokenizer, names


def _unigram() -> tuple[Any, dict[str, str]]:
    """XLM-R-like: Unigram with Metaspace, ``<s> a </s></s> b </s>``, no segment ids; pad is 1."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*special, "▁", *(f"▁{w}" for w in WORDS), *LETTERS, *"[]<>/.,!?:-"]
    scores = [(p, 0.0 if p in special else -float(i % 17) - 1) for i, p in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, names


def _bytes(end: bool) -> tuple[Any, dict[str, str]]:
    """GPT-like byte-level BPE; with `end`, one end token closes every text (Qwen3-Embedding)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("a", "a"), ("aa", "aa")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marker = "<|endoftext|>"
    tokenizer.add_special_tokens([marker])
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {marker}",
            pair=f"$A {marker} $B {marker}",
            special_tokens=[(marker, len(vocab))],
        )
    return tokenizer, {"pad_token": marker, "eos_token": marker}


# family -> (config class, tokenizer, extra config fields)
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE,
    "initializer_range": 0.3,  # far from uniform attention, so that a leak shows
}
_DECODER: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "max_position_embeddings": 256}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "wordpiece", {**_COMMON, "max_position_embeddings": 128}),
    "electra": (
        "ElectraConfig",
        "wordpiece",
        {**_COMMON, "max_position_embeddings": 128, "embedding_size": HIDDEN},
    ),
    "distilbert": (
        "DistilBertConfig",
        "wordpiece",
        {
            "dim": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": INTERMEDIATE,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        },
    ),
    "nomic_bert": ("NomicBertConfig", "wordpiece", {**_COMMON, "max_position_embeddings": 128}),
    "mpnet": (
        "MPNetConfig",
        "unigram",
        {**_COMMON, "max_position_embeddings": 130, "pad_token_id": 1},
    ),
    "xlm-roberta": (
        "XLMRobertaConfig",
        "unigram",
        {**_COMMON, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "roberta": (
        "RobertaConfig",
        "unigram",
        {**_COMMON, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "camembert": (
        "CamembertConfig",
        "unigram",
        {**_COMMON, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "modernbert": (
        "ModernBertConfig",
        "wordpiece",
        {
            **_COMMON,
            "max_position_embeddings": 128,
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
            **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
        },
    ),
    "qwen3": ("Qwen3Config", "bytes_end", {**_DECODER, "head_dim": 8}),
    "qwen2": ("Qwen2Config", "bytes_end", _DECODER),
    "llama": ("LlamaConfig", "bytes_end", _DECODER),
    "mistral": ("MistralConfig", "bytes_end", {**_DECODER, "sliding_window": 8}),
    "gemma": ("GemmaConfig", "bytes_end", {**_DECODER, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        "bytes_end",
        {
            **_DECODER,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": ("Phi3Config", "bytes_end", {**_DECODER, "sliding_window": 12}),
    "gemma3_text": (
        "Gemma3TextConfig",
        "bytes_end",
        {
            **_DECODER,
            "head_dim": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
FAMILY_NAMES = tuple(_FAMILIES)


def write_model(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str | None = "mean",
    normalize: bool = True,
    labels: int | None = None,
    dense: int | None = None,
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
    include_prompt: bool = True,
    seed: int = 0,
    **config_fields: Any,
) -> Path:
    """A complete model folder.

    labels: write a `*ForSequenceClassification` with so many labels instead of an embedding model.
    pooling: None leaves modules.json out. dense: add a Dense module of this output size.
    config_fields: anything else for the config class.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_class = None
    if family in ENCODERS:
        config_class, tokenizer_kind, fields, model_class = ENCODERS[family]
    else:
        config_class, tokenizer_kind, fields = (_FAMILIES | MORE)[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = {
        "wordpiece": _wordpiece,
        "unigram": _unigram,
        "bytes_end": lambda: _bytes(True),
    }[tokenizer_kind]()
    write_tokenizer(folder, tokenizer, names, segments=tokenizer_kind == "wordpiece")
    merged: dict[str, Any] = {**fields, "vocab_size": tokenizer.get_vocab_size(), **config_fields}
    if labels is not None:
        merged["num_labels"] = labels
    if tokenizer_kind == "bytes_end":
        merged.setdefault("pad_token_id", tokenizer.token_to_id("<|endoftext|>"))
        merged.setdefault("eos_token_id", merged["pad_token_id"])
        merged.setdefault("bos_token_id", merged["pad_token_id"])
    config = getattr(transformers, config_class)(**merged)
    auto = (
        transformers.AutoModel
        if labels is None
        else transformers.AutoModelForSequenceClassification
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if labels is None and model_class is not None:
            model = getattr(transformers, model_class)(config).eval()
        else:
            model = auto.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
        model.save_pretrained(folder)
        if labels is None and pooling is not None:
            _write_modules(folder, pooling, include_prompt, normalize, dense)
    if max_seq_length is not None:
        _dump(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    if prompts is not None:
        _dump(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def write_new(folder: Path, *, scaling: float | None = 8.0, **fields: Any) -> Path:
    """GTE in its first form: model type `new`, code of its own, and the tensors under the names that
    transformers' Gte keeps in a file. scaling: factor of its NTK rope. fields: as in `write_model`."""
    from safetensors.torch import load_file, save_file

    write_model(folder, "gte", **fields)
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("gte.", "new.", 1): tensor for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    head = "ForSequenceClassification" if "labels" in fields else "Model"
    edit_json(
        folder / "config.json",
        model_type="new",
        architectures=[f"New{head}"],
        auto_map={
            f"AutoModel{head.removesuffix('Model')}": f"Alibaba-NLP/new-impl--modeling.New{head}"
        },
        rope_parameters=None,
        rope_theta=20000.0,
        rope_scaling=None if scaling is None else {"type": "ntk", "factor": scaling},
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        logn_attention_scale=False,
        logn_attention_clip1=False,
        pack_qkv=True,
        unpad_inputs=False,
        use_memory_efficient_attention=False,
        bos_token_id=None,
    )
    return folder


def write_bidirectional(folder: Path, *, pooling: str | None = None, **fields: Any) -> Path:
    """A Llama as NVIDIA's rerankers and embedders name theirs: code of the folder, attention both ways.

    pooling: of the config; None: it names none. fields: as in `write_model`, `temperature` for the config.
    """
    temperature = fields.pop("temperature", None)
    write_model(folder, "llama", **({"pooling": None} | fields))
    head = "ForSequenceClassification" if "labels" in fields else "Model"
    edit_json(
        folder / "config.json",
        model_type="llama_bidirec",
        architectures=[f"LlamaBidirectional{head}"],
        auto_map={
            f"AutoModel{head.removesuffix('Model')}": f"llama_bidirectional_model.LlamaBidirectional{head}"
        },
        pooling=pooling,
        temperature=temperature,
    )
    return folder


def write_adapter(folder: Path, base: Path, **lora: Any) -> Path:
    """A LoRA adapter to the model folder `base`, far from zero, with the base's other files."""
    import shutil

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    shutil.copytree(base, folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    wanted: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["query", "value", "dense"],
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(task_type="FEATURE_EXTRACTION", **(wanted | lora))
        model = get_peft_model(AutoModel.from_pretrained(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.2)
        model.save_pretrained(folder)
    return folder


def write_task_adapters(folder: Path, *names: str, **lora: Any) -> Path:
    """LoRA adapters in folders of those names beside the weights of the model in `folder`, each its own,
    on linears and on the word embeddings."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    wanted: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "fc1", "word_embeddings"],
    }
    for seed, name in enumerate(names):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(task_type="FEATURE_EXTRACTION", **(wanted | lora))
            model = get_peft_model(AutoModel.from_pretrained(folder), config)
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    torch.nn.init.normal_(parameter.data, std=0.2)
            model.save_pretrained(folder / name, save_embedding_layers=False)
    return folder


def write_tokenizer(
    folder: Path, tokenizer: Any, names: dict[str, str], *, segments: bool = False
) -> None:
    """tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    _dump(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **names},
    )


def _write_modules(
    folder: Path, pooling: str, include_prompt: bool, normalize: bool, dense: int | None
) -> None:
    import torch
    from safetensors.torch import save_file

    prefix = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    flags = {
        f"pooling_mode_{key}": key
        == {"mean": "mean_tokens", "cls": "cls_token"}.get(pooling, pooling)
        for key in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _dump(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, "include_prompt": include_prompt, **flags},
    )
    if dense is not None:
        modules.append(("2_Dense", "Dense"))
        (folder / "2_Dense").mkdir(exist_ok=True)
        _dump(
            folder / "2_Dense" / "config.json",
            {
                "in_features": HIDDEN,
                "out_features": dense,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )
        weights = {
            "linear.weight": torch.randn(dense, HIDDEN) * 0.3,
            "linear.bias": torch.randn(dense) * 0.1,
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _dump(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": prefix + kind}
            for i, (path, kind) in enumerate(modules)
        ],
    )


def edit_json(path: Path, **changes: Any) -> None:
    """Change top-level fields of a JSON file; None removes a field."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data.update(changes)
    _dump(path, {k: v for k, v in data.items() if v is not None})


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1))
