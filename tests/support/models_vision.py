"""Tiny seeded folders of models that take images, and pictures to send them.

Who calls it: tests of images: CLIP, SigLIP and GME.
What must stay true: ordinary folders (config, safetensors, tokenizer.json, preprocessor_config.json);
the same call writes the same bytes.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import _bytes, _unigram, edit_json, write_tokenizer

SIZE, PATCH = 32, 8  # CLIP: 16 patches and the class token
GME_CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_MEAN = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def _save(folder: Path, model: Any, seed: int, scale: float = 0.3) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (scale if parameter.shape[-1] <= 64 else 0.05))
            elif "class_embedding" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.eval().save_pretrained(folder)


def write_clip(folder: Path, *, seed: int = 0, legacy_end: bool = False) -> Path:
    """CLIP with projections of 24; `legacy_end`: eos_token_id 2 as in the published configs."""
    from tokenizers import processors
    from transformers import CLIPConfig, CLIPModel

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _ = _bytes(False)
    tokenizer.add_special_tokens(["<|startoftext|>", "<|end|>"])
    start, end = (tokenizer.token_to_id(t) for t in ("<|startoftext|>", "<|end|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|end|>",
        pair="<|startoftext|> $A <|end|> $B <|end|>",
        special_tokens=[("<|startoftext|>", start), ("<|end|>", end)],
    )
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    write_tokenizer(folder, tokenizer, names)
    common = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "hidden_size": 32,
    }
    config = CLIPConfig(
        text_config={
            **common,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 77,
            "bos_token_id": start,
            "eos_token_id": 2 if legacy_end else end,
            "pad_token_id": end,
        },
        vision_config={**common, "image_size": SIZE, "patch_size": PATCH},
        projection_dim=24,
    )
    _save(folder, CLIPModel(config), seed)
    _dump(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": SIZE},
            "do_center_crop": True,
            "crop_size": {"height": SIZE, "width": SIZE},
            "do_normalize": True,
            "resample": 3,
            **_MEAN,
        },
    )
    return folder


def write_siglip(
    folder: Path, *, seed: int = 0, library: bool = False, **tokenizer_fields: Any
) -> Path:
    """SigLIP with vectors of 32 and texts of 64 tokens; `tokenizer_fields` go to tokenizer_config.json.

    library: with the files that Sentence-Transformers writes, texts filled up.
    """
    from tokenizers import processors
    from transformers import SiglipConfig, SiglipModel

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = _unigram()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    write_tokenizer(folder, tokenizer, names)
    edit_json(
        folder / "tokenizer_config.json",
        **{"model_input_names": ["input_ids"], "model_max_length": 64, **tokenizer_fields},
    )
    common = {
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 32,
    }  # fmt: skip
    config = SiglipConfig(
        text_config={
            **common,
            "vocab_size": tokenizer.get_vocab_size(),
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        vision_config={**common, "image_size": SIZE, "patch_size": PATCH},
    )
    _save(folder, SiglipModel(config), seed, scale=0.15)
    said = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "resample": 3,
    }
    _dump(folder / "preprocessor_config.json", said)
    if library:
        kinds = ("base.modules.transformer.Transformer", "base.modules.normalize.Normalize")
        modules = [
            {
                "idx": i,
                "name": str(i),
                "path": ("", "1_Normalize")[i],
                "type": f"sentence_transformers.{kind}",
            }
            for i, kind in enumerate(kinds)
        ]
        _dump(folder / "modules.json", modules)
        methods = {
            name: {"method": f"get_{name}_features", "method_output_name": "pooler_output"}
            for name in ("text", "image")
        }
        _dump(
            folder / "sentence_bert_config.json",
            {
                "transformer_task": "feature-extraction",
                "modality_config": methods,
                "module_output_name": "sentence_embedding",
                "processing_kwargs": {"text": {"padding": "max_length"}},
            },
        )
    return folder


def write_gme(folder: Path, *, seed: int = 0, gme: bool = False, **fields: Any) -> Path:
    """Qwen2-VL with hidden size 32; `fields` go to the config.

    gme: say that it is GME's, by the class that its config names.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = _bytes(False)
    tokenizer.add_special_tokens(list(GME_CONTROL))
    ids = {token: tokenizer.token_to_id(token) for token in GME_CONTROL}
    write_tokenizer(folder, tokenizer, names)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        **fields,
    )
    _save(folder, Qwen2VLForConditionalGeneration(config), seed)
    _dump(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_MEAN,
        },
    )
    if gme:
        edit_json(
            folder / "config.json",
            architectures=["GmeQwen2VL"],
            auto_map={"AutoModel": "modeling_gme_qwen2vl.GmeQwen2VL"},
        )
    return folder


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1))


def picture(width: int = 40, height: int = 30, seed: int = 0) -> np.ndarray:
    """[height, width, 3] uint8: noise over a slope, so that a turn or a crop shows."""
    rng = np.random.default_rng(seed)
    slope = np.linspace(0, 150, width)[None, :, None] + np.linspace(0, 80, height)[:, None, None]
    return (slope + rng.integers(0, 25, (height, width, 3))).astype(np.uint8)


def encoded(pixels: np.ndarray | None = None, kind: str = "PNG", **options: Any) -> bytes:
    """A file of that picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture() if pixels is None else pixels).save(buffer, kind, **options)
    return buffer.getvalue()
