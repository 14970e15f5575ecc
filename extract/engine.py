"""Target forwards for extraction: samples' ids -> taps and final hidden state of each sample.

Samples are sorted by length and packed into right-padded batches of at most ``batch_tokens`` padded
tokens. Guarantee: row t of a sample belongs to its token t, nothing is shifted; samples do not see
each other (each is its own row, and a causal target cannot see the padding behind it). The batches
depend only on the samples and ``batch_tokens``, so a repeated shard gives the same bytes. Cost: one
forward without LM head and without cache.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .taps import TapRecorder
from .target import Target

_PADDING_ID = 0  # never read: no earlier token can see it


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group samples into batches, longest first.

    Args:
        lengths: tokens per sample.
        batch_tokens: padded tokens a batch may have; a longer sample is a batch of its own.

    Returns:
        Sample numbers of each batch.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


@torch.inference_mode()
def extract_features(
    target: Target,
    taps: Sequence[int],
    samples: Sequence[npt.NDArray[np.int32]],
    batch_tokens: int,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Run the target over samples.

    Args:
        target: the frozen target.
        taps: layer ids.
        samples: token ids int32 ``[n_i]`` of each.
        batch_tokens: padded tokens per forward.

    Yields:
        Sample number, taps ``[n_i, n_taps, hidden]`` and final hidden state ``[n_i, hidden]`` after
        the final norm, on the CPU in the target's dtype; in order of length.
    """
    with TapRecorder(target.layers, taps) as recorder:
        for batch in plan_batches([len(ids) for ids in samples], batch_tokens):
            ids = torch.full((len(batch), len(samples[batch[0]])), _PADDING_ID, dtype=torch.int64)
            for row, i in enumerate(batch):
                ids[row, : len(samples[i])] = torch.from_numpy(samples[i].astype(np.int64))
            output = target.decoder(input_ids=ids.to(target.device), use_cache=False)
            states = recorder.collect().cpu()  # [batch, tokens, n_taps, hidden]
            final = output.last_hidden_state.cpu()  # [batch, tokens, hidden]
            for row, i in enumerate(batch):
                length = len(samples[i])
                yield i, states[row, :length], final[row, :length]
