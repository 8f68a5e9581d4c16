"""CLIP and SigLIP: texts packed through the text tower, images through the vision tower.

Who calls it: `gpu.forward.vision`.
What must stay true: a text's vector is the projection of its last token (CLIP's end token; SigLIP's filling,
mostly), an image's that of the class token or of the attention pool, as the models' own
`get_text_features` and `get_image_features` give them; on the CPU
every image is a call of its own, so that its bits do not depend on how many came along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.encode.vision import PIXELS
from gpu.forward.towers import Towers


class ClipTowers(Towers):
    """A text tower and a vision tower, each with its projection."""

    modalities = ("text", "image")

    def probes(self) -> list[EncodedItem]:
        rng = np.random.default_rng(0)
        config = self._model.config.text_config
        top = int(config.vocab_size) - 1
        # transformers takes the highest id for the end token where the config says 2, an old mistake.
        end = top if int(config.eos_token_id) == 2 else int(config.eos_token_id)
        items = []
        for length in (1, 5, 5, min(17, self._spec.max_tokens), self._spec.max_tokens):
            ids = rng.integers(0, top, size=length).astype(np.int32)
            ids[ids == end] = (end + 1) % top
            ids[-1] = end
            items.append(EncodedItem(ids))
        size = int(self._model.config.vision_config.image_size)
        for _ in range(2):
            pixels = rng.integers(0, 256, size=(3, size, size), dtype=np.uint8)
            items.append(EncodedItem(np.zeros(3, np.int32), extras={PIXELS: pixels}))
        return items

    def reference(self, item: EncodedItem) -> torch.Tensor:
        if PIXELS in item.extras:
            return self._images([item])[0]
        ids = torch.from_numpy(item.input_ids.astype(np.int64))[None].to(self._device)
        out: torch.Tensor = self._model.get_text_features(input_ids=ids).pooler_output[0]
        return out

    def vectors(self, batch: PackedBatch) -> torch.Tensor:
        images = [row for row, item in enumerate(batch.items) if PIXELS in item.extras]
        texts = [row for row, item in enumerate(batch.items) if PIXELS not in item.extras]
        found = torch.empty(
            batch.n_items, int(self._spec.dimensions or 0), dtype=torch.float32, device=self._device
        )
        if images:
            found[images] = self._images([batch.items[row] for row in images]).float()
        if texts:
            # `pack` is a stable sort and the rows are sorted already, so rows keep their order.
            found[texts] = self._texts(pack([batch.items[row] for row in texts])).float()
        return found

    def _texts(self, batch: PackedBatch) -> torch.Tensor:
        """[n_items, dimensions] in the compute dtype."""
        if batch.n_tokens == 1:  # see `gpu.forward.packed.PackedForward`
            return self._texts(pack([*batch.items, *batch.items]))[:1]
        tower = self._model.text_model
        # The embeddings module refuses a pack that is longer than the position table: its two halves do not.
        embeddings = tower.embeddings
        states = embeddings.token_embedding(self._row(batch.input_ids))
        states = states + embeddings.position_embedding(self._row(batch.positions))
        with self._attending(batch):
            states = tower.encoder(
                inputs_embeds=states, attention_mask=None, **self._encoder_arguments
            ).last_hidden_state
        out: torch.Tensor = self._projection(tower.final_layer_norm(states[0][self._ends(batch)]))
        return out

    @property
    def _encoder_arguments(self) -> dict[str, Any]:
        return {"is_causal": True}

    @property
    def _projection(self) -> Any:
        return self._model.text_projection

    def _images(self, items: Sequence[EncodedItem]) -> torch.Tensor:
        """[n_items, dimensions] in the compute dtype."""
        per_call = 1 if self._device.type == "cpu" else len(items)
        parts = []
        for start in range(0, len(items), per_call):
            pixels = np.stack([item.extras[PIXELS] for item in items[start : start + per_call]])
            values = self._pixels(pixels)
            parts.append(self._model.get_image_features(pixel_values=values).pooler_output)
        return torch.cat(parts)


class SiglipTowers(ClipTowers):
    """Both towers look both ways; every text has the same length, which the encoder sees to."""

    def probes(self) -> list[EncodedItem]:
        rng = np.random.default_rng(0)
        config, filled = self._model.config, self._spec.max_tokens
        size = int(config.vision_config.image_size)
        texts = rng.integers(0, int(config.text_config.vocab_size), size=(3, filled))
        pictures = rng.integers(0, 256, size=(2, 3, size, size), dtype=np.uint8)
        return [
            *(EncodedItem(ids.astype(np.int32)) for ids in texts),
            *(EncodedItem(np.zeros(3, np.int32), extras={PIXELS: pixels}) for pixels in pictures),
        ]

    @property
    def _encoder_arguments(self) -> dict[str, Any]:
        return {}

    @property
    def _projection(self) -> Any:
        return self._model.text_model.head
