"""Models read at the first token of each item: the last layer computes no more than what is read.

Who calls it: `gpu.model_runner`; `gpu.forward.proven` finds out whether the model can.
What must stay true: the states of the first tokens are those of the whole forward. Of a last layer, output
projection and feed-forward net are three quarters of the linears' work: 10 % of a model of 6 layers, 5 % of 12.
"""

from __future__ import annotations

import torch

from gpu.batch import PackedBatch, pack
from gpu.folder.spec import ModelSpec
from gpu.forward.encoder import EncoderModel
from gpu.forward.packed import Forward, PackedForward
from gpu.pooler import Segments, first_places, segments_of

_HEADS = ("pooler_classifier", "classifier_on_first")


class FirstTokens:
    """forward: the whole one, of a model of `gpu.forward.encoder`."""

    def __init__(self, forward: PackedForward) -> None:
        self._forward = forward

    def states(self, batch: PackedBatch) -> tuple[torch.Tensor, Segments]:
        """[n_items, hidden_size], and where the items lie in them: a row each."""
        n = batch.n_items
        if batch.n_tokens == 1:  # see `PackedForward`
            return self.states(pack([*batch.items, *batch.items]))[0][:1], _rows(n)
        read = torch.tensor(first_places(segments_of(batch)))
        return self._forward.run(batch, read=read)[0], _rows(n)


def _rows(n: int) -> Segments:
    return Segments(tuple(range(n)), tuple(range(1, n + 1)), (0,) * n)


@torch.inference_mode()
def first_tokens_of(forward: Forward, spec: ModelSpec, probe: PackedBatch) -> FirstTokens | None:
    """None: more than first tokens is read, the model's class is not ours, or the numbers differ."""
    if spec.head:
        reads_first = spec.family.head in _HEADS
    else:
        reads_first = spec.pooling == "cls" and spec.outputs == ("dense",)
    if not reads_first or type(forward) is not PackedForward:
        return None
    if not isinstance(forward.base, EncoderModel):
        return None
    found = FirstTokens(forward)
    expected = forward(probe)[first_places(segments_of(probe))]
    return found if torch.equal(found.states(probe)[0], expected) else None
