"""Images through the whole service: bytes in msgpack, a data: URI in JSON, bad ones alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

from gpu.load import make_runner_factory
from pipeline.oneoff import run_inproc
from pipeline.settings.load import Settings
from schemas.codec import decode_reply
from schemas.results import FailureReply, Reply
from tests.support.models_vision import encoded, picture, write_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "m")


async def test_texts_images_and_a_bad_image_in_one_request(folder: Path) -> None:
    """B10, A07: item i of the reply is item i of the request; the corrupt one has its own error."""
    image, long_text = encoded(picture(50, 40)), "x" * 500
    packed = msgpack.packb(
        {"id": "a", "input": [{"image": image}, "a river", {"image": image[:200]}, long_text]}
    )
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    as_json = json.dumps({"id": "b", "input": [{"image": uri}], "encoding": "base64"}).encode()
    remote = json.dumps({"id": "c", "input": [{"image": "http://example.com/x.png"}]}).encode()
    factories = {"clip": make_runner_factory("clip", folder, device="cpu")}
    replies = []
    async with run_inproc(Settings(), runner_factories=factories) as running:
        for body in (packed, as_json, remote):
            (raw,) = await running.request(body, None)
            replies.append(decode_reply(raw.body, raw.headers))
    first, second, third = replies
    assert isinstance(first, Reply) and first.n == 4 and first.normalized is False
    codes = [item.error.code if item.error else None for item in first.items]
    assert codes == [None, None, "invalid_request", "too_long"]
    assert first.items[0].tokens == 17 and first.dimensions == 24
    assert isinstance(second, Reply) and second.items[0].embedding == first.items[0].embedding
    vector = np.frombuffer(first.items[0].embedding or b"", "<f4")
    assert vector.shape == (24,) and np.isfinite(vector).all()
    assert isinstance(third, FailureReply) and third.error.path == "$.input[0].image"
