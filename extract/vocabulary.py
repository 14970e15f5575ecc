"""What the data stage needs to know of a target, without loading its weights.

TargetConfig -> tokenizer, embedding rows, stop ids      (milliseconds, any size of target)
"""

from dataclasses import dataclass

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from drafttrain.data.errors import TargetError

from .config import TargetConfig
from .target_path import resolve_folder


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A target's tokenizer and id space.

    Attributes:
        tokenizer: with the chat template.
        rows: embedding rows; valid ids are 0 .. rows - 1.
        stop_ids: ascending; all end tokens that generation config, tokenizer and config name.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: int
    stop_ids: list[int]


def load_vocabulary(config: TargetConfig) -> Vocabulary:
    """Read tokenizer, configuration and generation configuration of a target.

    Raises:
        TargetError: the folder is missing or holds no usable tokenizer or configuration.
    """
    folder, _ = resolve_folder(config)
    try:
        config_found = AutoConfig.from_pretrained(folder, local_files_only=True)
        text_config = config_found.get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        generation = (
            GenerationConfig.from_pretrained(folder, local_files_only=True)
            if (folder / "generation_config.json").exists()
            else GenerationConfig.from_model_config(text_config)
        )
    except Exception as exc:  # Transformers raises many kinds for a folder it cannot use
        reason = " ".join(str(exc).split())[:400]
        raise TargetError(
            f"target '{config.path}': tokenizer or configuration cannot be loaded "
            f"({type(exc).__name__}: {reason})"
        ) from exc
    stop_ids = merge_stop_ids(
        generation.eos_token_id,
        tokenizer.eos_token_id,
        getattr(config_found, "eos_token_id", None),
        getattr(text_config, "eos_token_id", None),
    )
    return Vocabulary(tokenizer, int(text_config.vocab_size), stop_ids)


def merge_stop_ids(*ends: int | list[int] | None) -> list[int]:
    """All ids at which the target stops, ascending.

    Args:
        ends: what the generation config, the tokenizer, the configuration and its text part name.
            They need not agree: Qwen3.6 ends a chat turn with one id and a text with another, and
            names them in different places.
    """
    ids: set[int] = set()
    for end in ends:
        ids |= {end} if isinstance(end, int) else set(end or ())
    return sorted(ids)
