"""The target's head: what the trainer and the replay evaluator need instead of the target.

``embedding [V, d]`` is what the target's embedding module returns for every id (its scaling
included), ``lm_head [V, d]`` and the final ``norm [d]`` are its weights. ``capture_head`` proves on
a probe that ``lm_head @ final hidden`` is the target's logits, and refuses a target for which it is
not. Stored as ``head.safetensors``; a tied head is stored once (then ``lm_head`` is absent).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.data.checked_write import write_tensors
from drafttrain.data.errors import StoreError, TargetError
from drafttrain.data.files import publish
from drafttrain.data.rolling_reader import RollingStore
from drafttrain.data.store_format import REPAIR
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.tensor_map import map_tensors

from .spread import own_weights
from .target import Target

_EMBED_ROWS = 8192
_HEADER_BYTES = 1024
_PROBE_TOKENS = 32
# Large enough for any soft cap or clamp to show, small enough for every dtype.
_PROBE_LOGIT = 1000.0
# Largest relative error of logits that counts as the same computation.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_KNOWN_CAUSES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logit_soft_cap")


@dataclass(frozen=True, slots=True)
class Head:
    """Embedding ``[V, d]``, LM head ``[V, d]`` and final norm weight ``[d]`` of a target."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 ``[...]`` -> embeddings ``[..., d]`` in the head's dtype."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """States ``[..., d]`` -> logits float32 ``[..., V]``, computed in the head's dtype."""
        return F.linear(hidden.to(self.lm_head.dtype), self.lm_head).float()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Head":
        """The head on another device or in another dtype; a tied head stays one tensor."""
        embedding = self.embedding.to(device, dtype)
        tied = self.lm_head is self.embedding
        lm_head = embedding if tied else self.lm_head.to(device, dtype)
        return Head(embedding, lm_head, self.norm.to(device, dtype))

    def save(self, path: Path, owner: str = "", confirm: Callable[[], None] = lambda: None) -> None:
        """Write ``head.safetensors`` atomically; see ``files.publish``."""
        tensors = {"embedding": self.embedding, "norm": self.norm}
        if self.lm_head is not self.embedding:
            tensors["lm_head"] = self.lm_head
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        publish(path, lambda tmp: write_tensors(tmp, tensors), owner, confirm)


def load_head(store: FeatureStore | RollingStore) -> Head:
    """The head of the target that a store was made from, memory-mapped.

    Raises:
        StoreError: the file has changed or does not fit ``store.json``.
    """
    path = store.checked_head()
    tensors = map_tensors(path, REPAIR)
    rows, width = store.meta.vocab_size, store.meta.hidden_size
    tied = {"embedding": (rows, width), "norm": (width,)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found not in (tied, {**tied, "lm_head": (rows, width)}):
        raise StoreError(
            f"{path}: holds {found}, store.json says vocabulary {rows} and width {width}; {REPAIR}"
        )
    embedding = tensors["embedding"]
    return Head(embedding, tensors.get("lm_head", embedding), tensors["norm"])


def head_bytes(target: Target) -> int:
    """An upper bound of the size of a target's ``head.safetensors``."""
    tied = target.model.get_output_embeddings().weight is target.embedding_weight
    values = ((1 if tied else 2) * target.vocab_rows + 1) * target.hidden_size
    return values * target.dtype.itemsize + _HEADER_BYTES


@torch.no_grad()
def capture_head(target: Target) -> Head:
    """Take the head from a target, to the CPU, and prove that it reproduces the target's logits.

    Raises:
        TargetError: the logits are not ``lm_head @ final hidden`` (soft cap, scale, bias, or a
            final hidden state before the norm).
    """
    _check_logits(target)
    ids = torch.arange(target.vocab_rows, device=target.device)
    embedding = torch.cat([target.embed(part).cpu() for part in ids.split(_EMBED_ROWS)])
    lm_head = _weight(target.model.get_output_embeddings()).cpu()
    tied = torch.equal(embedding, lm_head)
    norm = _weight(target.norm).cpu()
    return Head(embedding, embedding if tied else lm_head, norm)


def _weight(module: nn.Module) -> Tensor:
    """The weight of a module, also of one that loads it for each call only."""
    with own_weights(module):
        return module.get_parameter("weight").detach()


def _check_logits(target: Target) -> None:
    """Compare the target's logits with ``lm_head @ final``, as they are and scaled up.

    The scaled pass multiplies the input of the LM head, so that a cap which hardly bends small
    logits shows too.
    """
    output = target.model.get_output_embeddings()
    config = target.model.config.get_text_config()
    causes = {k: getattr(config, k) for k in _KNOWN_CAUSES if getattr(config, k, None) is not None}
    named = f" (its configuration has {causes})" if causes else ""
    with own_weights(output):
        weight, bias = output.weight.detach(), getattr(output, "bias", None)
        if bias is not None and bool(bias.any()):
            raise TargetError(
                f"{target.name}: its LM head has a bias, which drafters of serving engines cannot"
                " use"
            )
    tolerance = _TOLERANCE[target.dtype]
    step = max(1, target.vocab_rows // _PROBE_TOKENS)
    ids = torch.arange(0, target.vocab_rows, step, device=target.device)[None, :_PROBE_TOKENS]
    final = target.decoder(input_ids=ids, use_cache=False).last_hidden_state.to(weight.device)
    natural = F.linear(final, weight).float()
    if not torch.isfinite(natural).all():
        raise TargetError(
            f"{target.name}: its logits on a probe are NaN or infinite in {target.dtype}; use the"
            " dtype that its config.json names"
        )
    for factor in (1.0, _PROBE_LOGIT / float(natural.abs().max())):
        with _scaled_input(output, factor):
            real = target.model(input_ids=ids, use_cache=False).logits.float().to(weight.device)
        ours = F.linear(final * factor, weight).float()
        if _same(real, ours, tolerance):
            continue
        normed = F.linear(target.norm(final).to(weight.device), weight).float()
        if factor == 1.0 and _same(real, normed, tolerance):
            raise TargetError(
                f"{target.name}: its last hidden state is before the final norm; drafttrain stores"
                " the state after it, so this architecture cannot be extracted"
            )
        ratio = float((real * ours).sum() / ours.square().sum())
        uniform = _same(real, ours * ratio, tolerance)
        how = f"they are scaled by {ratio:.4g}" if uniform else "they are capped or transformed"
        raise TargetError(
            f"{target.name}: its logits are not lm_head @ final hidden{named}:"
            f" {how};"
            " a drafter trained on this head would learn another distribution"
        )


def _same(real: Tensor, ours: Tensor, tolerance: float) -> bool:
    return bool((real - ours).abs().max() <= tolerance * real.abs().max())


@contextmanager
def _scaled_input(module: nn.Module, factor: float) -> Iterator[None]:
    def scale(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * factor, *args[1:])

    handle = module.register_forward_pre_hook(scale)
    try:
        yield
    finally:
        handle.remove()
