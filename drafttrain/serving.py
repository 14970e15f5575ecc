"""How an exported drafter is served: engines count the block differently, so it is written down."""

from .drafter.config import DrafterConfig

_NOTES = """\
# DFlash drafter for {target}

{layers} layers, block size {block} (the anchor and {drafts} drafted tokens), taps {taps}
(layer ids; id L is the output of decoder layer L), mask token {mask}.

vLLM counts drafted tokens (block size - 1):

    vllm serve {target} --speculative-config \\
      '{{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": {drafts}}}'
{v2}
SGLang counts the block, anchor included:

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
      --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {block}
{trained}"""
_TRAINED = """
Its longest training sample had {length} tokens: expect fewer accepted tokens behind that position.
"""
_V2 = """
This drafter mixes sliding and full layers: vLLM needs `VLLM_USE_V2_MODEL_RUNNER=1` for it.
"""


def serving_notes(config: DrafterConfig, target: str) -> str:
    """Markdown with launch settings for vLLM and SGLang."""
    return _NOTES.format(
        target=target,
        layers=config.num_hidden_layers,
        block=config.block_size,
        drafts=config.num_draft_tokens,
        taps=config.target_layer_ids,
        mask=config.mask_token_id,
        v2=_V2 if len(set(config.layer_types)) > 1 else "",
        trained=_TRAINED.format(length=config.trained_length) if config.trained_length else "",
    )
