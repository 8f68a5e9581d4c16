"""Qwen2-VL as an embedding model (GME): texts and images in one packed sequence per item.

Who calls it: `gpu.forward.vision`.
What must stay true: positions are three per token (time, row, column), numbered per item; image
features enter at the item's own image tokens, in order; the language model runs packed while the
vision tower, which attends over each image on its own, keeps transformers' attention; an item's
vector is its last token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu.attention import AttentionBackend
from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.encode.vision import GRID, PIXELS, POSITIONS, rope_positions
from gpu.folder.spec import ModelSpec
from gpu.forward.towers import Towers


class Qwen2VlTower(Towers):
    """A language model that reads both, and the vision tower before it."""

    modalities = ("text", "image", "text and image")

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        device: torch.device,
        backends: Sequence[AttentionBackend],
    ) -> None:
        super().__init__(model, spec, device, backends)
        config = model.config
        self._image_id = int(config.image_token_id)
        self._merge = int(config.vision_config.spatial_merge_size)
        self._frames = int(config.vision_config.temporal_patch_size)
        causal = spec.causal if spec.causal is not None else spec.config.get("is_causal")
        if causal is not None:
            config.text_config.is_causal = bool(causal)

    def probes(self) -> list[EncodedItem]:
        rng = np.random.default_rng(0)
        config = self._model.config
        vision = config.vision_config
        items = []
        for length, grid in ((1, None), (5, None), (17, None), (23, (1, 4, 4)), (11, (1, 2, 6))):
            ids = rng.integers(0, int(self._spec.config["vocab_size"]), size=length, dtype=np.int32)
            for control in (self._image_id, getattr(config, "video_token_id", -1)):
                ids[ids == control] = 0
            if grid is None:
                items.append(EncodedItem(ids))
                continue
            rows, columns = (n * self._merge // 2 for n in grid[1:])
            grid = (1, rows, columns)
            n_tokens = rows * columns // self._merge**2
            ids[2 : 2 + n_tokens] = self._image_id
            shape = (rows * columns, 3, vision.patch_size, vision.patch_size)
            pixels = rng.integers(0, 256, size=shape, dtype=np.uint8)
            positions = rope_positions(ids, self._image_id, [grid], self._merge)
            items.append(
                EncodedItem(ids, extras={PIXELS: pixels, GRID: grid, POSITIONS: positions})
            )
        return items

    def reference(self, item: EncodedItem) -> torch.Tensor:
        ids = torch.from_numpy(item.input_ids.astype(np.int64))[None].to(self._device)
        more: dict[str, Any] = {}
        if PIXELS in item.extras:
            more = {
                "mm_token_type_ids": (ids == self._image_id).int(),
                "pixel_values": self._patches(item),
                "image_grid_thw": torch.tensor([item.extras[GRID]], device=self._device),
            }
        out: torch.Tensor = self._model(input_ids=ids, use_cache=False, **more).last_hidden_state
        return out[0, -1]

    def vectors(self, batch: PackedBatch) -> torch.Tensor:
        if batch.n_tokens == 1:  # see `gpu.forward.packed.PackedForward`
            return self.vectors(pack([*batch.items, *batch.items]))[:1]
        model = self._model
        states = model.get_input_embeddings()(self._row(batch.input_ids))
        images = [item for item in batch.items if PIXELS in item.extras]
        if images:
            features = torch.cat([self._features(item) for item in images]).to(states.dtype)
            places = torch.from_numpy(batch.input_ids == self._image_id).to(self._device)
            states = states.clone()
            states[0, places] = features
        positions = np.concatenate([_positions(item) for item in batch.items], axis=1)
        with self._attending(batch):
            hidden = model.language_model(
                input_ids=None,
                inputs_embeds=states,
                position_ids=torch.from_numpy(positions.astype(np.int64))[:, None].to(self._device),
                attention_mask=None,
                use_cache=False,
            ).last_hidden_state
        return hidden[0][self._ends(batch)].float()

    def _features(self, item: EncodedItem) -> torch.Tensor:
        """[n_image_tokens, hidden_size]. One image per call: the tower's convolution takes its patches as
        a batch, and whose kernel may be chosen by how many there are."""
        grid = torch.tensor([item.extras[GRID]], device=self._device)
        found = self._model.get_image_features(self._patches(item), grid)
        out: torch.Tensor = torch.cat(list(found.pooler_output))
        return out

    def _patches(self, item: EncodedItem) -> torch.Tensor:
        """[n_patches, 3 * frames * side * side] float32: the one frame of a picture, repeated."""
        still = self._pixels(item.extras[PIXELS])[:, :, None]
        return still.expand(-1, -1, self._frames, -1, -1).reshape(len(still), -1)


def _positions(item: EncodedItem) -> np.ndarray:
    """[3, n_tokens] of one item; a text's are the same on all three axes."""
    given = item.extras.get(POSITIONS)
    if given is not None:
        return np.asarray(given)
    return np.broadcast_to(np.arange(item.n_tokens, dtype=np.int32), (3, item.n_tokens))
