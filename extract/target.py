"""The frozen target: a Transformers causal language model -> ``Target``, with its facts checked.

``target.decoder(ids [batch, tokens])`` gives the final hidden state ``[batch, tokens, hidden]``
after the final norm; ``target.layers[L]`` is decoder layer L; ``target.logits(hidden)`` applies the
LM head. Guarantee: the weights are complete, causal, frozen and in evaluation mode; positions,
stop tokens and rotary base come from the model itself, never from a default of ours.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.errors import TargetError

from .config import TargetConfig
from .rope import resolve_rope_theta
from .spread import device_of, is_spread, own_weights, placement, say_where, unhook_whole_layers
from .target_path import resolve_folder
from .vocabulary import merge_stop_ids

_FINGERPRINT_VALUES = 64  # per parameter, evenly spread
_PROBE_TOKENS = 12
# Experts see batches of other sizes when one token changes, so rounding may differ.
_CAUSAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target and what the other stages need to know of it.

    Attributes:
        model: the causal language model, in evaluation mode, without gradients.
        tokenizer: its tokenizer.
        name: path or hub id.
        revision: hub commit, or None.
        decoder: the model without its LM head.
        layers: the decoder layers, in order.
        norm: the final norm.
        num_layers: how many.
        hidden_size: width of the hidden state.
        vocab_rows: rows of the embedding; valid ids are 0 .. vocab_rows - 1.
        stop_ids: ascending; all end tokens that generation config, tokenizer and config name.
        rope_theta: rotary base of the live table.
        max_positions: positions it was made for.
        fingerprint: hash of names, shapes and spread values of all weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    num_layers: int
    hidden_size: int
    vocab_rows: int
    stop_ids: list[int]
    rope_theta: float
    max_positions: int
    fingerprint: str

    @property
    def device(self) -> torch.device:
        """Where ids go in and states come out; of a spread target the device of its embedding."""
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """The raw embedding matrix ``[vocab_rows, hidden]`` (without any scaling)."""
        return self.model.get_input_embeddings().get_parameter("weight")

    @property
    def tokenizer_hash(self) -> str:
        """Hash of what decides how text becomes ids, as in a sample table's manifest."""
        return tokenizer_hash(self.tokenizer)

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 ``[...]`` -> embeddings ``[..., hidden]``, as the target scales them."""
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states ``[..., hidden]`` -> logits float32 ``[..., vocab_rows]``."""
        return self.model.get_output_embeddings()(hidden).float()


def load_target(config: TargetConfig, device: torch.device | None = None) -> Target:
    """Load and check the target of a recipe.

    Args:
        config: ``target:`` of the recipe.
        device: where it goes; None means where the recipe says.

    Raises:
        TargetError: it is missing, of an unusable kind, incomplete, or contradicts itself.
    """
    folder, revision = resolve_folder(config)
    device, placed = device or _device(config), placement(config)
    dtype: torch.dtype = getattr(torch, config.dtype)
    options: dict[str, Any] = {"local_files_only": True}
    try:
        model_config = AutoConfig.from_pretrained(folder, **options)
        _refuse(model_config, dtype, config.path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **placed, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except TargetError:
        raise
    except Exception as exc:  # Transformers raises many kinds for a folder it cannot use
        if placed and "offload_folder" in str(exc):
            raise TargetError(
                f"target '{config.path}' does not fit the GPUs and the memory, and weights of its"
                " kind are changed while they are loaded, so that its files cannot stand in: raise"
                " target.max_memory, or use more GPUs"
            ) from None
        reason = " ".join(str(exc).split())[:400]
        raise TargetError(
            f"target '{config.path}' cannot be loaded ({type(exc).__name__}: {reason}); it must be"
            " a decoder-only model with its tokenizer, as save_pretrained() writes them"
        ) from exc
    model, loading = loaded
    absent = sorted(loading["missing_keys"]) + sorted(str(k) for k in loading["mismatched_keys"])
    if absent:
        raise TargetError(
            f"target '{config.path}': the checkpoint lacks or misshapes {len(absent)} weights"
            f" ({', '.join(absent[:4])}): it is incomplete"
        )
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return build_target(
        model if config.device == "spread" else model.to(device),
        tokenizer,
        name=config.path,
        revision=revision,
        written_config=written,
    )


def build_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "target",
    revision: str | None = None,
    written_config: dict[str, Any] | None = None,
) -> Target:
    """Wrap a loaded model; checks everything but the files.

    Args:
        model: any decoder-only causal language model; it is frozen and put in evaluation mode.
        tokenizer: its tokenizer.
        name: path or hub id, for messages and artifacts.
        revision: hub commit.
        written_config: ``config.json`` as on disk; None takes the model's configuration.

    Raises:
        TargetError: parts cannot be found, or it is not causal.
    """
    model.eval().requires_grad_(False)
    text_config = model.config.get_text_config()
    decoder = model.get_decoder()
    layers, norm = _find_parts(decoder, text_config, name)
    if is_spread(model):
        say_where(model, layers, name)
        unhook_whole_layers(layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not isinstance(embedding, nn.Embedding):
        raise TargetError(f"{name}: no embedding or no LM head found; use a causal language model")
    if head.weight.shape[0] != embedding.weight.shape[0]:
        raise TargetError(
            f"{name}: {embedding.weight.shape[0]} embedding rows but {head.weight.shape[0]} rows in"
            " the LM head; resize them to the same vocabulary"
        )
    max_positions = getattr(text_config, "max_position_embeddings", None)
    if not max_positions:
        raise TargetError(f"{name}: config.json has no max_position_embeddings; add it")
    _check_causal(decoder, device_of(embedding), len(embedding.weight), name)
    written = written_config if written_config is not None else model.config.to_dict()
    return Target(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        decoder=decoder,
        layers=layers,
        norm=norm,
        num_layers=len(layers),
        hidden_size=text_config.hidden_size,
        vocab_rows=len(embedding.weight),
        stop_ids=merge_stop_ids(
            getattr(model.generation_config, "eos_token_id", None),
            tokenizer.eos_token_id,
            written.get("eos_token_id"),
            getattr(text_config, "eos_token_id", None),
        ),
        rope_theta=resolve_rope_theta(decoder, text_config, written, name),
        max_positions=int(max_positions),
        fingerprint=_fingerprint(model),
    )


def _device(config: TargetConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("target.device is 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if config.device in ("auto", "spread"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _refuse(config: PretrainedConfig, dtype: torch.dtype, name: str) -> None:
    """What can be refused before the weights are read."""
    if config.is_encoder_decoder:
        raise TargetError(
            f"target '{name}' is an encoder-decoder model ({config.model_type}); drafttrain needs a"
            " decoder-only one"
        )
    kept = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if dtype == torch.float16 and kept in (torch.bfloat16, "bfloat16"):
        raise TargetError(
            f"target.dtype: float16 for '{name}', whose config.json says bfloat16: its activations"
            " overflow float16 into NaN; use bfloat16 or float32"
        )


def _find_parts(
    decoder: nn.Module, config: PretrainedConfig, name: str
) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers and the final norm, by shape rather than by name."""
    children = list(decoder.children())
    stacks = [
        child
        for child in children
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    norms = [child for child in children if _is_vector(child, config.hidden_size)]
    if len(stacks) != 1 or not norms:
        raise TargetError(
            f"{name}: {type(decoder).__name__} is not a plain stack of"
            f" {config.num_hidden_layers} layers with a final norm; it cannot be tapped"
        )
    return stacks[0], norms[-1]


def _is_vector(module: nn.Module, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and tuple(weight.shape) == (width,)


@torch.inference_mode()
def _check_causal(decoder: nn.Module, device: torch.device, rows: int, name: str) -> None:
    """Changing the last token must not change any state before it."""
    ids = torch.arange(_PROBE_TOKENS, device=device)[None] * 7 % rows
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % rows
    a, b = (decoder(input_ids=x, use_cache=False).last_hidden_state[:, :-1] for x in (ids, other))
    moved = float((a - b).float().abs().mean() / a.float().abs().mean())
    if moved > _CAUSAL_TOLERANCE[a.dtype]:
        raise TargetError(
            f"{name}: a state depends on a later token; drafttrain needs a causal (decoder-only)"
            " model"
        )


def _fingerprint(model: PreTrainedModel) -> str:
    """Hash of every parameter's name, shape, dtype and ``_FINGERPRINT_VALUES`` spread values."""
    digest = xxhash.xxh3_128()
    # One weight under two names is two parameters once it is loaded for each call.
    again = set(model.all_tied_weights_keys) if is_spread(model) else set()
    for key, parameter in sorted(model.named_parameters()):
        if key in again:
            continue
        owner, _, name = key.rpartition(".")
        module = model.get_submodule(owner)
        with own_weights(module):
            flat = module.get_parameter(name).detach().reshape(-1)
            values = flat[:: max(1, len(flat) // _FINGERPRINT_VALUES)][:_FINGERPRINT_VALUES]
            digest.update(f"{key} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
