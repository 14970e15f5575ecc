"""Is the output the target's own? Two token sequences -> first difference and how close it was.

In float32 every method must reproduce the baseline token for token. In a 16-bit type a forward of
many tokens and a forward of one may round differently, and where the target's two best tokens are
nearly tied either may come first; such a flip is excused only if the margin is below a bound, and
is counted and shown either way. The bound was measured on a trained Gated DeltaNet hybrid
in bfloat16 on an H200 (``python -m tests.benchmarks.near_ties``, 3,072 tokens): chains of 8 moved
the margin by 0.2 steps in the median, 2.1 at 99.9 % and 4.0 at most, and one best token differed,
at a margin of 0. After a flip the two texts are different texts: nothing behind it
is compared.
"""

from collections.abc import Sequence

import torch

from .decode import Decoded
from .records import OutputRecord

NEAR_TIE_STEPS = 4


def near_tie_bound(dtype: torch.dtype, peak: float) -> float:
    """Margin below which two candidates may swap when kernels round differently.

    Logits of size ``peak`` lie ``eps * peak`` apart in a 16-bit type; a few such steps can come
    from another order of summation. In float32 nothing is excused.
    """
    return 0.0 if dtype == torch.float32 else NEAR_TIE_STEPS * torch.finfo(dtype).eps * peak


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None if equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_outputs(
    names: dict[str, str],
    temperature: float,
    baseline: Decoded,
    tokens: Sequence[int],
    dtype: torch.dtype,
) -> OutputRecord:
    """Compare a response with the baseline's.

    Args:
        names: sample_id and method of the response.
        temperature: of both; margins mean something for greedy choices only.
        baseline: the autoregressive response of the same run.
        tokens: the response.
        dtype: the target's.
    """
    position = first_difference(baseline.tokens, tokens)
    margin = bound = None
    shared = min(len(baseline.tokens), len(tokens))
    if position is not None and position < shared and temperature == 0:
        margin = baseline.margins[position]
        bound = near_tie_bound(dtype, baseline.peaks[position])
    return OutputRecord(
        **names, temperature=temperature, position=position, margin=margin, bound=bound
    )
