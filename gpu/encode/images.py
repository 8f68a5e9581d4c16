"""Image bytes from strangers -> one upright RGB picture, or a typed error; never a crash.

Who calls it: `gpu.encode.vision`, on the encoder's thread.
What must stay true: sizes are checked before a pixel is decoded, so that neither a decompression bomb
nor a thin strip that a resize would blow up costs memory; only a few formats are opened; whatever a
file does to its decoder becomes that item's error. Pillow is imported here alone, and late: it is an
optional extra.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from gpu.faults import ModelLoadError
from schemas.errors import InvalidRequest, ItemTooLarge

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_ASPECT = 200  # Qwen2-VL's own bound; CLIP's resize of the short edge multiplies the long one


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """max_bytes: of the file. max_pixels: width x height before any resize; 40 million take 120 MB."""

    max_bytes: int = 16 * 1024 * 1024
    max_pixels: int = 40_000_000


def require_pillow() -> None:
    """Raises `ModelLoadError` that names the extra when Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(
            "this model takes images, which need Pillow: pip install 'embedstream[vision]'"
        ) from error


def open_image(data: bytes, limits: ImageLimits, *, path: str, index: int) -> Any:
    """A `PIL.Image.Image` in RGB, turned as its EXIF orientation says; transparency is dropped.

    Raises `ItemTooLarge` (bytes, pixels) or `InvalidRequest` (no image, another format, animated,
    truncated, corrupt, one side more than 200 times the other).
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    where: dict[str, Any] = {"path": path, "items": (index,)}
    if len(data) > limits.max_bytes:
        raise ItemTooLarge(
            f"the image of item {index} has {len(data)} bytes, this model takes {limits.max_bytes}",
            **where,
            given=len(data),
            limit=limits.max_bytes,
        )
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(
            f"item {index} is no image that can be read; send PNG, JPEG, WebP, GIF or BMP", **where
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ItemTooLarge(
            f"the image of item {index} claims more pixels than any model takes",
            **where,
            limit=limits.max_pixels,
        ) from None
    except Exception as error:  # noqa: BLE001 - a decoder of hostile bytes may raise anything
        raise _corrupt(error, where) from None
    with image:
        _check_shape(image, limits, where)
        try:
            # A phone's JPEG may hold a second picture (MPO); the first one is the photo.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise InvalidRequest(
                    f"the image of item {index} is animated; send one frame", **where
                )
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise _corrupt(error, where) from None


def _check_shape(image: Any, limits: ImageLimits, where: dict[str, Any]) -> None:
    width, height = image.size
    index = where["items"][0]
    if width * height > limits.max_pixels:
        raise ItemTooLarge(
            f"the image of item {index} has {width} x {height} pixels, this model takes "
            f"{limits.max_pixels}; make it smaller",
            **where,
            given=width * height,
            limit=limits.max_pixels,
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidRequest(
            f"the image of item {index} is {width} x {height}; one side may be {MAX_ASPECT} times the "
            "other",
            **where,
            limit=MAX_ASPECT,
        )


def _corrupt(error: Exception, where: dict[str, Any]) -> InvalidRequest:
    return InvalidRequest(
        f"the image of item {where['items'][0]} is truncated or corrupt ({type(error).__name__})",
        **where,
    )
