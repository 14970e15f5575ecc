"""Make a target run rows of samples without padding, if that is proven to change nothing.

Attention is replaced by ``rows.attend_row`` through Transformers' attention interface, Gated
DeltaNet layers by ``recurrent.mix_row``. A trial at the start runs four short samples in one row
and alone; a target whose states differ by more than rounding (an architecture that keeps the past
in another way, kernels that ignore sample bounds) is run in right-padded batches instead. On CUDA
norms, MLPs, rotary turns and the pointwise parts of recurrent layers are compiled or kernels of
ours. Cost: the trial
is five short forwards; compiling and the kernels' first use take about a minute on a GPU.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from .pointwise_kernels import AVAILABLE, faster_rotary, is_gated_mlp, run_gated_mlp
from .recurrent import PROJECTIONS, RowParts, known_variant, mix_row
from .rows import ATTENTION_NAME, Row, attend_row, using
from .spread import is_spread, replaced_forward
from .target import Target

_LOGGER = logging.getLogger(__name__)
_TRIAL_LENGTHS = (200, 9, 70, 3)
# Root mean square of the difference over that of the states.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16_BIT = 0.15
_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
_COMPILED_CLASSES = ("RMSNorm", "RMSNormGated", "MLP")
_ROTARY = "apply_rotary_pos_emb"

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def packed(target: Target) -> Iterator[bool]:
    """Run the target in rows while the body runs.

    Yields:
        Whether it does; if not, the target is as it was, and its batches must be padded.
    """
    compiled = _compiler(target)
    names = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ())
    if names - _LAYER_TYPES or not _replaceable(target):
        _LOGGER.info("%s: its layers are not known to run in rows; batches are padded", target.name)
        with _faster_parts(target, compiled):
            yield False
        return
    plain = _trial(target, in_rows=False)
    with _faster_parts(target, compiled):
        with _rows(target, compiled):
            reason = _compare(target, plain)
            if reason is None:
                yield True
                return
        _LOGGER.info("%s: %s; batches are padded", target.name, reason)
        yield False


def _compiler(target: Target) -> Compile:
    """Compiles on CUDA; one graph serves every length."""
    if target.device.type != "cuda":
        return lambda function: function
    return functools.partial(torch.compile, dynamic=True)


def _replaceable(target: Target) -> bool:
    """Recurrent layers are of known classes."""
    return all(
        type(module).__name__ in PROJECTIONS and known_variant(module)
        for layer in target.layers
        for module in layer.modules()
        if hasattr(module, "conv1d")
    )


@contextmanager
def _rows(target: Target, compiled: Compile) -> Iterator[None]:
    """Replace attention and recurrent layers."""
    AttentionInterface.register(ATTENTION_NAME, attend_row)
    before = target.model.config._attn_implementation
    parts: RowParts | None = None
    try:
        target.model.set_attn_implementation(ATTENTION_NAME)
        with ExitStack() as stack:
            for layer in target.layers:
                for module in layer.modules():
                    if type(module).__name__ in PROJECTIONS:
                        parts = parts or RowParts.of(module, target.device, compiled)
                        mix = functools.partial(mix_row, module, parts)
                        stack.enter_context(replaced_forward(module, mix))
            yield
    finally:
        target.model.set_attn_implementation(before)


@contextmanager
def _faster_parts(target: Target, compiled: Compile) -> Iterator[None]:
    """Norms, MLPs and rotary turns compiled or as kernels of ours.

    Compiling whole layers was slower (a fallback was traced).
    """
    homes: dict[Any, Callable[..., Any]] = {}
    functions: dict[type, Callable[..., Any]] = {}
    with ExitStack() as stack:
        for module in target.decoder.modules() if target.device.type == "cuda" else ():
            kind = type(module)
            if AVAILABLE and is_gated_mlp(module) and _as_written(module):
                forward = functools.partial(run_gated_mlp, module)
                stack.enter_context(replaced_forward(module, forward))
            elif kind.__name__.endswith(_COMPILED_CLASSES) and _as_written(module):
                function = functions.setdefault(kind, compiled(kind.forward))
                stack.enter_context(replaced_forward(module, functools.partial(function, module)))
            home = sys.modules[kind.__module__]
            if home not in homes and hasattr(home, _ROTARY):
                homes[home] = getattr(home, _ROTARY)
                setattr(home, _ROTARY, faster_rotary(homes[home], compiled(homes[home])))
        try:
            yield
        finally:
            for home, function in homes.items():
                setattr(home, _ROTARY, function)


def _as_written(module: torch.nn.Module) -> bool:
    """Its forward is its class's, and none of its weights have to be loaded first."""
    own = getattr(module.forward, "__func__", None) is type(module).forward
    return own and not any(is_spread(part) for part in module.modules())


@torch.inference_mode()
def _trial(target: Target, in_rows: bool) -> list[Tensor]:
    """Final hidden states [n, d] of the trial's samples."""
    generator = torch.Generator().manual_seed(0)
    shortest = min(max(_TRIAL_LENGTHS), target.max_positions)
    lengths = [min(n, shortest) for n in _TRIAL_LENGTHS]
    samples = [torch.randint(0, target.vocab_rows, (n,), generator=generator) for n in lengths]
    if not in_rows:
        return [run_plain(target, ids[None].to(target.device))[0] for ids in samples]
    row = Row.of(lengths, target.device)
    states = run_row(target, torch.cat(samples).to(target.device), row)
    return [states[span] for span in row.spans]


def _compare(target: Target, plain: list[Tensor]) -> str | None:
    """Why rows cannot be used, or None."""
    try:
        found = _trial(target, in_rows=True)
    except (NotImplementedError, TypeError) as exc:
        return f"rows of samples do not run ({exc})"
    worst = 0.0
    for ours, theirs in zip(found, plain, strict=True):
        scale = theirs.float().square().mean().sqrt()
        error = ((ours.float() - theirs.float()).square().mean().sqrt() / scale).item()
        worst = max(worst, error if error == error else float("inf"))
    if worst > _TOLERANCE.get(target.dtype, _TOLERANCE_16_BIT):
        return f"samples in one row differ from samples alone by {worst:.2g}"
    return None


def run_plain(target: Target, ids: Tensor) -> Tensor:
    """Final hidden states [batch, n, d] of ids [batch, n], a row of the batch per sample."""
    states = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return states.to(target.device)


def run_row(target: Target, ids: Tensor, row: Row) -> Tensor:
    """Final hidden states [t, d] of ids [t]."""
    with using(row):
        output = target.decoder(
            input_ids=ids[None], position_ids=row.positions[None], use_cache=False
        )
    return output.last_hidden_state[0].to(target.device)
