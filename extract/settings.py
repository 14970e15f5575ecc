"""A store's settings: target, recipe and sample table -> ``StoreMeta``, before anything is written.

Equal settings mean equal bytes; what differs is named by ``changed_settings``.
"""

from drafttrain.data.samples import SampleTable
from drafttrain.data.store_format import StoreMeta, plan_shards
from drafttrain.data.stream import Stream

from .config import ExtractConfig
from .taps import resolve_taps
from .target import Target


def store_settings(
    target: Target, config: ExtractConfig, table: SampleTable | Stream, head_checksum: str
) -> StoreMeta:
    """The settings of the store that an extraction writes.

    Args:
        target: the frozen target.
        config: what to take and how to store it.
        table: the samples; a stream makes a rolling store.
        head_checksum: of ``head.safetensors``.

    Raises:
        TargetError: the taps do not fit.
    """
    return StoreMeta(
        target=target.name,
        target_revision=target.revision,
        target_dtype=str(target.dtype).removeprefix("torch."),
        target_fingerprint=target.fingerprint,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=table.manifest.get("template_hash"),
        stop_ids=target.stop_ids,
        rope_theta=target.rope_theta,
        max_positions=target.max_positions,
        taps=resolve_taps(config.taps, target.num_layers),
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_rows,
        final_hidden=config.final_hidden,
        codec=config.codec,
        table_hash=table.table_hash,
        shard_tokens=config.shard_tokens,
        num_samples=len(table),
        num_tokens=int(table.lengths.sum()),
        num_shards=len(plan_shards(table.lengths, config.shard_tokens)),
        head_checksum=head_checksum,
        order_seed=table.seed if isinstance(table, Stream) else None,
    )
