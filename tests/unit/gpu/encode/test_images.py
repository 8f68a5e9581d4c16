"""Image bytes from strangers: caps, orientation, and one typed error per bad item."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from gpu.encode.images import ImageLimits, open_image, require_pillow
from gpu.faults import ModelLoadError
from schemas.errors import EmbedstreamError, InvalidRequest, ItemTooLarge
from tests.support.models_vision import encoded, picture

LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000)


def opened(data: bytes, limits: ImageLimits = LIMITS) -> Any:
    return open_image(data, limits, path="$.input[3].image", index=3)


def refused(data: bytes, limits: ImageLimits = LIMITS) -> EmbedstreamError:
    with pytest.raises(EmbedstreamError) as caught:
        opened(data, limits)
    assert caught.value.items == (3,) and caught.value.path == "$.input[3].image"
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_common_formats_are_read_as_rgb(kind: str) -> None:
    image = opened(encoded(kind=kind))
    assert image.mode == "RGB" and image.size == (40, 30)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    source = Image.new(mode, (9, 7))
    source.save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    assert opened(buffer.getvalue()).mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(orientation: int) -> None:
    """A phone's portrait comes out upright: what a person sees is what is embedded."""
    from PIL import Image, ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(kind="PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    got = opened(data)
    assert got.size == ((30, 40) if orientation >= 5 else (40, 30))
    assert np.array_equal(np.asarray(got), np.asarray(expected))
    assert (orientation == 1) == np.array_equal(np.asarray(got), picture())


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [1001, 20_000, 60_000])
def test_decompression_bombs_are_refused_before_a_pixel_is_decoded(side: int) -> None:
    """Both ours and Pillow's own guard (179 million pixels) end as this item's error."""
    import tracemalloc

    data = bomb(side, side)
    tracemalloc.start()
    error = refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(error, ItemTooLarge) and error.limit == LIMITS.max_pixels
    assert peak < 2_000_000


def test_thin_strips_are_refused() -> None:
    """A resize of the short edge to 224 would make 1 x 60000 pixels 13 million wide."""
    assert isinstance(refused(bomb(60_000, 1)), InvalidRequest)
    assert opened(encoded(picture(200, 1))).size == (200, 1)
    assert isinstance(refused(encoded(picture(201, 1))), InvalidRequest)


def test_caps_are_exact() -> None:
    data = encoded(picture(40, 30))
    at = ImageLimits(max_bytes=len(data), max_pixels=1200)
    assert opened(data, at).size == (40, 30)
    for limits in (ImageLimits(len(data) - 1, 1200), ImageLimits(len(data), 1199)):
        error = refused(data, limits)
        assert isinstance(error, ItemTooLarge)
        assert error.given == error.limit + 1  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_truncated_and_flipped_files_never_crash(kind: str) -> None:
    data = encoded(picture(60, 50), kind=kind)
    rng = np.random.default_rng(0)
    outcomes = set()
    for cut in [*range(0, len(data), max(1, len(data) // 40))]:
        try:
            opened(data[:cut])
        except EmbedstreamError as error:
            outcomes.add(type(error))
    for _ in range(60):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            broken[place] = int(rng.integers(0, 256))
        try:
            assert opened(bytes(broken)).mode == "RGB"
        except EmbedstreamError as error:
            outcomes.add(type(error))
    assert InvalidRequest in outcomes and outcomes <= {InvalidRequest, ItemTooLarge}
    assert isinstance(refused(data[: len(data) // 2]), InvalidRequest)


def test_a_phones_double_photo_gives_its_first_picture() -> None:
    from PIL import Image

    buffer = io.BytesIO()
    frames = [Image.fromarray(picture(20, 20, seed)) for seed in range(2)]
    frames[0].save(buffer, "MPO", save_all=True, append_images=frames[1:])
    assert opened(buffer.getvalue()).size == (20, 20)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused(kind: str) -> None:
    from PIL import Image

    frames = [Image.fromarray(picture(20, 20, seed)) for seed in range(3)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    error = refused(buffer.getvalue())
    assert isinstance(error, InvalidRequest) and "animated" in str(error)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%PDF-1.7 ...", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"\0" * 5000]
)
def test_what_is_no_image_is_told_what_would_be(data: bytes) -> None:
    assert isinstance(refused(data), InvalidRequest)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_are_not_opened(kind: str) -> None:
    assert "PNG, JPEG" in str(refused(encoded(kind=kind)))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModelLoadError, match=r"embedstream\[vision\]"):
        require_pillow()
