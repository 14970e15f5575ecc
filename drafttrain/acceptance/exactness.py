"""Can this target verify a draft tree exactly? Its layers are looked at, then a trial is run.

Two layer kinds can be verified along a tree and rolled back: full attention (keys and values by
position) and Gated DeltaNet (``gated_delta``). Anything else is refused by name before any work.
What cannot be seen from outside (a masked kernel that ignores its mask, positions that are counted
rather than given, a library version whose continuation is wrong) is found by decoding a few tokens
as a tree and comparing with plain forwards. Cost: three short forwards and a few rounds.
"""

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from drafttrain.data.errors import TargetError
from drafttrain.extract.recurrent import PROJECTIONS, known_variant
from drafttrain.extract.spread import is_spread
from drafttrain.extract.target import Target

from .tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:
    from .session import TargetSession

_MASKABLE = ("sdpa", "eager")
# Root, two children, a grandchild of each, one node more below the second: paths of 3 and of 4.
_TRIAL_PARENTS, _TRIAL_DEPTHS = [0, 0, 2, 1, 3], [1, 1, 2, 2, 3]
_TRIAL_PROMPT = 6
# Root mean square of the difference over that of the logits around their mean.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
_TOLERANCE_16_BIT = 0.15


def recurrent_layers(target: Target) -> dict[int, nn.Module]:
    """The Gated DeltaNet modules of a target by decoder layer; empty for full attention alone.

    Raises:
        TargetError: naming the layer, kernel or argument that makes exact verification impossible.
    """
    model = target.model
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    if len(kinds) != len(target.layers):
        raise TargetError(
            f"the target has {len(target.layers)} layers but keeps the past of {len(kinds)}: layers"
            " that share their past cannot be rolled back one by one; use replay, or another target"
        )
    found: dict[int, nn.Module] = {}
    for number, (kind, layer) in enumerate(zip(kinds, target.layers, strict=True)):
        if kind is LinearAttentionLayer:
            found[number] = _gated_delta_module(number, layer)
        elif kind is not DynamicLayer:
            raise TargetError(
                f"layer {number} of the target ({_mixer(layer)}) keeps its past in a"
                f" {kind.__name__}; live decoding is exact for full attention and Gated DeltaNet"
                " layers only, because dropped draft tokens cannot be removed from other states:"
                " use replay, or another target"
            )
    if found and is_spread(model):
        raise TargetError(
            "the target is spread over devices, and the states of its recurrent layers are kept"
            " together on one: set eval.live_prompts to 0 (replay needs no target), or evaluate"
            " where the target fits one device (target.device: auto)"
        )
    kernel = model.config._attn_implementation
    if len(found) < len(kinds) and kernel not in _MASKABLE:
        raise TargetError(
            f"the target runs attention with '{kernel}', which takes no tree mask: load it with "
            "one of " + ", ".join(_MASKABLE)
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TargetError(
            f"{type(model).__name__} takes no position_ids, so siblings of a draft tree cannot "
            "share a position: use replay, or another target"
        )
    return found


def _gated_delta_module(number: int, layer: nn.Module) -> nn.Module:
    for module in layer.modules():
        if type(module).__name__ in PROJECTIONS:
            _check_gated_delta(number, module)
            return module
    raise TargetError(
        f"layer {number} of the target ({_mixer(layer)}) keeps a recurrent state that drafttrain"
        f" cannot roll back; it knows {', '.join(PROJECTIONS)}: use replay, or another target"
    )


def _check_gated_delta(number: int, module: Any) -> None:
    """Variants of a known class that compute something else."""
    if not known_variant(module):
        raise TargetError(
            f"layer {number} of the target ({type(module).__name__}) has a convolution with"
            f" activation '{module.activation}' and bias {module.conv1d.bias is not None}; only"
            " 'silu' without a bias is implemented: use replay, or another target"
        )


def _mixer(layer: nn.Module) -> str:
    """Class of the part of a decoder layer that looks at other tokens."""
    named = [module for module in layer.modules() if getattr(module, "layer_idx", None) is not None]
    return type(named[-1] if named else layer).__name__


@torch.inference_mode()
def prove_exact(session: "TargetSession", target: Target) -> None:
    """Decode a few tokens in rounds of every kind and compare with plain forwards.

    Args:
        session: of the target, at rest; it is at rest afterwards.
        target: the same target.

    Raises:
        TargetError: logits differ by more than rounding.
    """
    draw = np.random.default_rng(0).integers(0, target.vocab_rows, 32)
    text = draw[:_TRIAL_PROMPT].tolist()
    parents, depths = np.array(_TRIAL_PARENTS), np.array(_TRIAL_DEPTHS)
    tree = DraftTree(draw[8 : 8 + len(parents)], parents, depths)
    session.prefill(torch.tensor(text))
    # Each round: the tree, its anchor, the path that is kept, whose tokens become text.
    rounds = [(tree, 20, [0, 2, 3]), (EMPTY_TREE, 21, [0]), (tree, 22, [0, 1]), (tree, 23, [0])]
    worst = 0.0
    for drafted, anchor, path in rounds:
        logits = session.verify(int(draw[anchor]), drafted).logits
        session.commit(path)
        text += [int(draw[anchor]), *(int(drafted.tokens[node - 1]) for node in path[1:])]
        plain = target.model(input_ids=torch.tensor([text], device=target.device), use_cache=False)
        worst = max(worst, _deviation(logits[path], plain.logits[0, -len(path) :].float()))
    if worst > _TOLERANCE.get(target.dtype, _TOLERANCE_16_BIT):
        raise TargetError(
            f"target '{target.name}' cannot be decoded along a draft tree exactly: on a trial of"
            f" {len(text)} tokens its logits differ from plain forwards by {worst:.2g} of their"
            " spread; use replay, or another version of Transformers and its kernels"
        )


def _deviation(left: Tensor, right: Tensor) -> float:
    """Relative root mean square difference; not a number counts as infinite."""
    spread = (right - right.mean(-1, keepdim=True)).square().mean().sqrt()
    value = ((left - right).square().mean().sqrt() / spread.clamp_min(1e-12)).item()
    return value if value == value else float("inf")
