"""Requests with texts and images -> encoded items with pixels: CLIP's form, SigLIP's and GME's.

Who calls it: the tokenizer actor's thread, through `gpu.batch.Encoder`.
What must stay true: decoding and resizing happen on this thread, never on the event loop or the
device's; an image costs its patches in tokens, so that the token budget holds; preprocessing is the
model folder's own (transformers' PIL processors, no torchvision); a text never becomes an image
token, because control tokens are put in here and not found in texts.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu.batch import EncodedItem, Int32
from gpu.encode.cut import cut_to
from gpu.encode.folder_tokenizer import folder_tokenizer, is_slow_siglip, unusable
from gpu.encode.images import ImageLimits, open_image, require_pillow
from gpu.encode.spans import first_with_spans
from gpu.encode.text import Content, EmptyPolicy, TextEncoder, _Plan
from gpu.faults import ModelLoadError
from gpu.folder.fingerprint import with_tokenizer
from gpu.folder.spec import ModelSpec
from gpu.folder.towers import SIGLIP, TOWERS
from gpu.folder.vision import GME, GME_IMAGE_TOKENS
from schemas.errors import EmbedstreamError, InvalidRequest, TooLong, Unsupported
from schemas.requests import AnyRequest, EmbedRequest, Image

PIXELS = "pixels"
"""Key in `EncodedItem.extras`: uint8, resized; CLIP [3, height, width], Qwen2-VL [n_patches, 3, side,
side]. `gpu.forward.pixels` makes floats of it."""
GRID = "grid"
"""Key: (1, rows, columns) of patches before merging, Qwen2-VL."""
POSITIONS = "positions"
"""Key: [3, n_tokens] int32, Qwen2-VL's time, row and column of each token."""

GME_INSTRUCTION = "You are a helpful assistant."
TOKEN_SIDE = 28  # pixels of an image token's square
# gme_inference.py resizes to whole tokens first, within wide bounds; the processor does it again.
FIRST_TOKENS = (4, 16384)


class _ImageEncoder(TextEncoder, ABC):
    """What both have in common: opening images, and the folder's preprocessing."""

    def __init__(
        self, spec: ModelSpec, tokenizer: Any, *, processor: Any, limits: ImageLimits,
        empty_input: EmptyPolicy,
    ) -> None:  # fmt: skip
        super().__init__(spec, tokenizer, token_types=False, empty_input=empty_input)
        self._processor, self._limits = processor, limits

    def _plan(self, request: AnyRequest, texts: list[str]) -> _Plan | EmbedstreamError:
        if isinstance(request, EmbedRequest):
            for name in ("aggregate", "chunk_tokens"):
                if getattr(request, name) is not None:
                    return Unsupported(f"this model cannot {name}", path=f"$.{name}")
            if (at := first_with_spans(request)) is not None:
                return Unsupported("this model takes no spans", path=f"$.input[{at}].spans")
        return super()._plan(request, texts)

    def _image(self, plan: _Plan, index: int, item: Image) -> EncodedItem | EmbedstreamError:
        path = f"$.input[{index}]"
        try:
            picture = self._resized(
                open_image(item.data, self._limits, path=f"{path}.image", index=index)
            )
            found = self._processor(
                images=picture, return_tensors="np", do_rescale=False, do_normalize=False
            )
        except EmbedstreamError as error:
            return error
        except (ValueError, MemoryError) as error:
            return InvalidRequest(
                f"the image of item {index} cannot be resized for this model: {str(error)[:120]}",
                path=f"{path}.image",
                items=(index,),
            )
        return self._with_pixels(plan, index, item, found)

    def _resized(self, picture: Any) -> Any:
        """What happens to a picture before the folder's own preprocessing: nothing, mostly."""
        return picture

    @abstractmethod
    def _with_pixels(
        self, plan: _Plan, index: int, item: Image, found: Any
    ) -> EncodedItem | EmbedstreamError:
        """The item with its pixel values, or why there are none."""


class ClipEncoder(_ImageEncoder):
    """A text or an image per item, each in its own tower; there is no joint vector."""

    def _with_pixels(
        self, plan: _Plan, index: int, item: Image, found: Any
    ) -> EncodedItem | EmbedstreamError:
        if item.text is not None:
            return Unsupported(
                "this model has one tower for text and one for images and no joint vector; send the "
                "text and the image as two items",
                path=f"$.input[{index}]",
                items=(index,),
            )
        pixels = np.ascontiguousarray(found["pixel_values"][0], dtype=np.uint8)
        vision = self.spec.config["vision_config"]
        n_patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
        # The ids stand for the patches and the class token: they are the item's cost, and unread.
        return EncodedItem(
            np.zeros(n_patches + 1, dtype=np.int32), plan.options, extras={PIXELS: pixels}
        )


class SiglipEncoder(ClipEncoder):
    """As CLIP's, and every text is filled up to the length that the model was trained with.

    pad: id of the token to fill with; at_end: whether it stands behind the text.
    """

    def __init__(
        self, spec: ModelSpec, tokenizer: Any, *, pad: int, at_end: bool, **more: Any
    ) -> None:
        super().__init__(spec, tokenizer, **more)
        self._pad, self._at_end = pad, at_end
        named = with_tokenizer(self.spec.fingerprint, {}, ["filled", pad, at_end, self.limit])
        self.spec = dataclasses.replace(self.spec, fingerprint=named)

    def canonical(self) -> bool:
        """Texts lose case, punctuation and double spaces, as SigLIP's first tokenizer has it."""
        texts = "  A photo, of\t(two) CATS & a dog-house! ", "a photo of two cats a doghouse"
        one, other = (self._content(text) for text in texts)
        return not isinstance(one, EmbedstreamError) and np.array_equal(one, np.asarray(other))

    def _single(self, *given: Any) -> EncodedItem | EmbedstreamError:
        return self._filled(super()._single(*given))

    def _verbatim(self, *given: Any) -> EncodedItem | EmbedstreamError:
        return self._filled(super()._verbatim(*given))

    def _filled(self, item: EncodedItem | EmbedstreamError) -> EncodedItem | EmbedstreamError:
        if isinstance(item, EmbedstreamError):
            return item
        ids = np.full(self.limit, self._pad, dtype=np.int32)
        kept = slice(0, item.n_tokens) if self._at_end else slice(self.limit - item.n_tokens, None)
        ids[kept] = item.input_ids
        return dataclasses.replace(item, input_ids=ids)


class GmeEncoder(_ImageEncoder):
    """GME's chat form: system instruction, one user turn of image and text, one end token at the end.

    A request's prompt is the instruction. Template, default instruction and image sizes: the model's
    published gme_inference.py.
    """

    def __init__(
        self, spec: ModelSpec, tokenizer: Any, *, processor: Any, limits: ImageLimits,
        empty_input: EmptyPolicy,
    ) -> None:  # fmt: skip
        self._ids = {token: tokenizer.token_to_id(token) for token in _CONTROL}
        missing = sorted(token for token, found in self._ids.items() if found is None)
        if missing:
            raise ModelLoadError(f"{spec.transformer}: the tokenizer lacks {', '.join(missing)}")
        super().__init__(
            spec, tokenizer, processor=processor, limits=limits, empty_input=empty_input
        )
        config = spec.config
        self._image_id = int(config["image_token_id"])
        self._merge = int((config.get("vision_config") or {}).get("spatial_merge_size", 2))
        vision = config.get("vision_config") or {}
        self._frames = int(vision.get("temporal_patch_size", 2))
        self._side = int(vision.get("patch_size", 14))
        self._role = self._words("user\n")
        self._suffix = self._join(
            "<|im_end|>", "\n", "<|im_start|>", "assistant\n", "<|endoftext|>"
        )

    def _words(self, text: str) -> Int32:
        content = self._content(text)
        assert not isinstance(content, EmbedstreamError)
        return content

    def _join(self, *pieces: str) -> Int32:
        """Control tokens by name, everything else tokenized on its own."""
        parts = [
            np.array([self._ids[piece]]) if piece in self._ids else self._words(piece)
            for piece in pieces
        ]
        return np.concatenate(parts).astype(np.int32)

    def _plan(self, request: AnyRequest, texts: list[str]) -> _Plan | EmbedstreamError:
        try:
            instruction = None
            if isinstance(request, EmbedRequest):
                instruction = super()._prompt(request)
        except EmbedstreamError as error:
            return error
        plan = super()._plan(request, texts)
        if isinstance(plan, _Plan):
            plan.prompt = instruction
        return plan

    def _prompt(self, request: Any) -> str | None:
        return None  # it is no part of the text: see `_around`

    def _resized(self, picture: Any) -> Any:
        if not self.spec.config[GME]:
            return picture
        return picture.resize(whole_tokens(*picture.size))

    def _around(self, plan: _Plan) -> Int32:
        instruction = GME_INSTRUCTION if plan.prompt is None else plan.prompt
        return self._join(
            "<|im_start|>", f"system\n{instruction}", "<|im_end|>", "\n", "<|im_start|>"
        )

    def _single(
        self, plan: _Plan, index: int, text: str, content: Content, prompt_ids: Int32 | None
    ) -> EncodedItem | EmbedstreamError:
        if isinstance(content, EmbedstreamError):
            return content
        if self._is_empty(text, content, None):
            return super()._single(plan, index, text, content, None)
        head, body = self._role, content
        if text[:1].isspace():  # it may merge with the line break before it
            body = self._words(f"user\n{text}")
            same = np.array_equal(body[: len(head)], head)
            head, body = (head, body[len(head) :]) if same else (head[:0], body)
        return self._item(plan, index, np.concatenate((self._around(plan), head)), body, {})

    def _with_pixels(
        self, plan: _Plan, index: int, item: Image, found: Any
    ) -> EncodedItem | EmbedstreamError:
        grid = tuple(int(n) for n in found["image_grid_thw"][0])
        n_tokens = int(np.prod(grid)) // self._merge**2
        text = self._content(item.text) if item.text else np.zeros(0, dtype=np.int32)
        if isinstance(text, EmbedstreamError):
            return text
        start = self._join("<|vision_start|>")
        head = np.concatenate(
            (
                self._around(plan),
                self._role,
                start,
                np.full(n_tokens, self._image_id, dtype=np.int32),
                self._join("<|vision_end|>"),
            )
        )
        # The processor repeats a still picture for every frame of a patch; one is enough to wait with.
        patches = found["pixel_values"].reshape(int(np.prod(grid)), 3, self._frames, self._side, -1)
        pixels = np.ascontiguousarray(patches[:, :, 0], dtype=np.uint8)
        return self._item(plan, index, head, text, {PIXELS: pixels, GRID: grid})

    def _item(
        self, plan: _Plan, index: int, head: Int32, body: Int32, extras: dict[str, Any]
    ) -> EncodedItem | EmbedstreamError:
        room = self.limit - len(head) - len(self._suffix)
        cut = cut_to(body, room, plan.request.truncate) if room >= min(1, len(body)) else None
        if cut is None:
            given = len(head) + len(body) + len(self._suffix)
            return TooLong(
                f"item {index} has {given} tokens with its image and its instruction, the model takes "
                f"{self.limit}; images are never cut",
                items=(index,),
                given=given,
                limit=self.limit,
            )
        ids = np.concatenate((head, cut, self._suffix)).astype(np.int32)
        if extras:
            grids = [] if self.spec.config[GME] else [extras[GRID]]
            extras = {
                **extras,
                POSITIONS: rope_positions(ids, self._image_id, grids, self._merge),
            }
        return EncodedItem(ids, plan.options, truncated=len(cut) < len(body), extras=extras)


_CONTROL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>")


def whole_tokens(width: int, height: int) -> tuple[int, int]:
    """(width, height) in whole tokens, 4 to 16384 of them, the aspect about kept (gme_inference.py)."""
    side, (fewest, most) = TOKEN_SIDE, (n * TOKEN_SIDE**2 for n in FIRST_TOKENS)
    w, h = (max(side, round(n / side) * side) for n in (width, height))
    if w * h > most:
        beta = math.sqrt(width * height / most)
        w, h = (math.floor(n / beta / side) * side for n in (width, height))
    elif w * h < fewest:
        beta = math.sqrt(fewest / (width * height))
        w, h = (math.ceil(n * beta / side) * side for n in (width, height))
    return w, h


def rope_positions(
    ids: Int32, image_id: int, grids: Sequence[tuple[int, ...]], merge: int
) -> Int32:
    """[3, n_tokens]: time, row and column of each token, as transformers' `get_rope_index` numbers them.

    Text counts up on all three; an image's tokens stand on its merged grid, and what follows goes on
    after its longer side.
    """
    positions = np.zeros((3, len(ids)), dtype=np.int32)
    at, following, left = 0, 0, list(grids)
    while at < len(ids):
        if ids[at] == image_id and left:
            frames, rows, columns = left.pop(0)
            shape = (frames, rows // merge, columns // merge)
            places = np.indices(shape, dtype=np.int32).reshape(3, -1)
            positions[:, at : at + places.shape[1]] = places + following
            at += places.shape[1]
            following += max(rows, columns) // merge
        else:
            positions[:, at] = following
            at, following = at + 1, following + 1
    return positions


def load_vision_encoder(
    spec: ModelSpec, *, limits: ImageLimits, empty_input: EmptyPolicy = "error"
) -> TextEncoder:
    """The folder's tokenizer and image preprocessing. Raises `ModelLoadError`."""
    require_pillow()
    outer = folder_tokenizer(spec)
    with unusable(spec, "no usable image preprocessing"):
        processor = _processor(spec)
    common = {"processor": processor, "limits": limits, "empty_input": empty_input}
    if spec.model_type == SIGLIP:
        return _siglip(spec, outer, common)
    made = ClipEncoder if spec.model_type in TOWERS else GmeEncoder
    return made(spec, outer.backend_tokenizer, **common)


def _siglip(spec: ModelSpec, outer: Any, common: Mapping[str, Any]) -> TextEncoder:
    """What fills a text up is its tokenizer's to say. Raises `ModelLoadError` for one that hides it."""
    names = list(outer.model_input_names)
    if names != ["input_ids"]:
        raise ModelLoadError(
            f"{spec.transformer}: model_input_names = {names} in tokenizer_config.json; SigLIP attends to what "
            'fills a text up, so there is no mask: set it to ["input_ids"]'
        )
    if outer.pad_token_id is None:
        raise ModelLoadError(
            f"{spec.transformer}: the tokenizer names no pad_token to fill texts with"
        )
    made = SiglipEncoder(
        spec,
        outer.backend_tokenizer,
        pad=int(outer.pad_token_id),
        at_end=outer.padding_side == "right",
        **common,
    )
    if is_slow_siglip(spec) and not made.canonical():
        raise ModelLoadError(
            f"{spec.transformer}: SiglipTokenizer lower-cases texts and takes ASCII punctuation and double "
            "spaces out of them, and the tokenizer.json beside it does not; take another copy of the folder"
        )
    return made


def _processor(spec: ModelSpec) -> Any:
    where = str(spec.transformer)
    if spec.model_type == SIGLIP:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        return SiglipImageProcessorPil.from_pretrained(where, local_files_only=True)
    if spec.model_type in TOWERS:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil.from_pretrained(where, local_files_only=True)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    fewest, most = (
        int(spec.config.get(name) or default) * TOKEN_SIDE**2
        for name, default in zip(
            ("min_image_tokens", "max_image_tokens"), GME_IMAGE_TOKENS, strict=True
        )
    )
    return Qwen2VLImageProcessorPil.from_pretrained(
        where,
        local_files_only=True,
        size={"shortest_edge": fewest, "longest_edge": most},
        min_pixels=None,
        max_pixels=None,
    )
