"""Sources to the two sample tables of a run: ``train.parquet`` and ``eval.parquet``.

For every record: render and mark (or take the ids as they are), check ids against the target,
truncate to ``max_length``, require an anchor and a next token among what is left, drop exact
duplicates, and drop train samples whose prompt occurs in eval.

Guarantee: what is dropped is counted by reason in the manifest and in the log; a source that gives
no sample is an error; both tables are replaced together after both are complete; if nothing that
decides their content has changed they are kept. Cost: one pass over the sources, streaming (ids of
one row group, a 16-digit id per sample, and hashes of the eval prompts in memory).
"""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .chat import ChatTemplate, tokenizer_hash
from .config import DataConfig, SourceConfig
from .drops import RowDropped
from .errors import DataError
from .files import content_hash, file_checksum, fsync_path
from .loss_mask import LossMarker, Marked
from .prepare_checks import CorpusRules, SourceStats, no_samples_error, prompt_keys, text_keys
from .samples import ID_DTYPE, Sample, make_sample, manifest_path, read_table, write_table
from .sources import Record, TokenRecord, read_source

log = logging.getLogger(__name__)

# Raised whenever the same inputs would give other tables than before.
_PREPARE_VERSION = 1
SPLITS = ("eval", "train")


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    vocab_rows: int,
    mask_token_id: int,
    stop_ids: list[int],
    out_dir: Path,
) -> None:
    """Write ``train`` and ``eval`` tables (see ``samples.py``) into ``out_dir``.

    Args:
        config: the recipe's data section.
        tokenizer: the target's tokenizer.
        vocab_rows: rows of the target's embedding; every id must be below it. This is not the
            tokenizer's base vocabulary size, which excludes added tokens.
        mask_token_id: the drafter's mask token, which must not occur in the corpus.
        stop_ids: every id at which the target stops (generation config and tokenizer).
        out_dir: the run's ``samples`` folder.

    Raises:
        DataError: a file cannot be read, an id does not exist in the target, the mask token occurs
            in the corpus, or a source gives no sample.
        TemplateError: the chat template fails on every row of a source.
    """
    rules = CorpusRules(config.max_length, vocab_rows, mask_token_id, frozenset(stop_ids))
    rules.check()
    template = ChatTemplate(tokenizer, config.template_kwargs)
    identity = _identity(config, template, rules)
    if _is_current(out_dir, identity["inputs_hash"]):
        log.info("sample tables in %s are up to date, kept", out_dir)
        return
    building = out_dir / "building"
    shutil.rmtree(building, ignore_errors=True)
    preparation = _Preparation(LossMarker(template, stop_ids), rules, identity)
    preparation.write("eval", config.eval, building)
    preparation.write("train", config.train, building)
    for split in SPLITS:
        for name in (f"{split}.parquet", manifest_path(Path(f"{split}.parquet")).name):
            os.replace(building / name, out_dir / name)
    fsync_path(out_dir)
    building.rmdir()


def _identity(config: DataConfig, template: ChatTemplate, rules: CorpusRules) -> dict[str, Any]:
    """Everything that decides the tables' content, and the hash of it."""
    sources = {split: [_source_identity(s) for s in getattr(config, split)] for split in SPLITS}
    identity = {
        "prepare_version": _PREPARE_VERSION,
        "tokenizer_hash": tokenizer_hash(template.tokenizer),
        "template_hash": template.hash,
        "template_kwargs": config.template_kwargs,
        "max_length": rules.max_length,
        "vocab_rows": rules.vocab_rows,
        "mask_token_id": rules.mask_token_id,
        "stop_ids": sorted(rules.stop_ids),
        "inputs": sources,
    }
    return {"inputs_hash": content_hash(identity), **identity}


def _source_identity(source: SourceConfig) -> dict[str, Any]:
    if not source.path.is_file():
        raise DataError(f"source '{source.name}': {source.path} is not a file; check its path")
    return {**source.model_dump(mode="json"), "checksum": file_checksum(source.path)}


def _is_current(out_dir: Path, inputs_hash: str) -> bool:
    """Whether both tables are complete and made from exactly these inputs."""
    try:
        tables = [read_table(out_dir / f"{split}.parquet") for split in SPLITS]
    except DataError:
        return False
    return all(table.manifest.get("inputs_hash") == inputs_hash for table in tables)


class _Preparation:
    """State over one run: hashes of the eval prompts, and ids seen in the current split."""

    def __init__(self, marker: LossMarker, rules: CorpusRules, identity: dict[str, Any]) -> None:
        self._marker = marker
        self._rules = rules
        self._identity = identity
        self._eval_prompts: set[bytes] = set()
        self._seen: set[str] = set()

    def write(self, split: str, sources: list[SourceConfig], folder: Path) -> None:
        """Write one split's table; eval must come first, because train is checked against it."""
        manifest: dict[str, Any] = {"split": split, **self._identity, "sources": {}, "drops": {}}
        self._seen = set()
        write_table(folder / f"{split}.parquet", self._split(split, sources, manifest), manifest)

    def _split(
        self, split: str, sources: list[SourceConfig], manifest: dict[str, Any]
    ) -> Iterator[Sample]:
        for source in sources:
            stats = SourceStats()
            for sample in self._source(split, source, stats):
                stats.add(sample)
                yield sample
            if not stats.samples:
                raise no_samples_error(split, source, stats)
            log.info("%s %s: %s", split, source.name, stats.describe())
            for reason, count in stats.drops.counts.items():
                manifest["drops"][reason] = manifest["drops"].get(reason, 0) + count
            # Two sources may share a name: reports group by it, the manifest keeps them apart.
            name = source.name
            while name in manifest["sources"]:
                name += "+"
            manifest["sources"][name] = stats.entries()

    def _source(self, split: str, source: SourceConfig, stats: SourceStats) -> Iterator[Sample]:
        for record in read_source(source, stats.drops):
            stats.records += 1
            try:
                for marked in self._mark(record):
                    yield from self._sample(split, source, record, marked, stats)
            except RowDropped as dropped:
                stats.drops.add(dropped, record.row_ref)

    def _mark(self, record: Record) -> list[Marked]:
        if not isinstance(record, TokenRecord):
            return self._marker.mark(record.messages, record.tools)
        prompt, response = record.prompt_ids.tolist(), record.response_ids.tolist()
        mask = [False] * len(prompt) + [True] * len(response)
        return [Marked(prompt + response, mask, self._marker.record_mode(record))]

    def _sample(
        self, split: str, source: SourceConfig, record: Record, marked: Marked, stats: SourceStats
    ) -> Iterator[Sample]:
        """The finished sample, or nothing where it is dropped (counted)."""
        try:
            ids, mask = self._rules.apply(marked, record.row_ref)
            sample = make_sample(
                ids.astype(ID_DTYPE),
                mask,
                source=source.name,
                mode=marked.mode,
                greedy=isinstance(record, TokenRecord) and record.greedy,
            )
            if sample.sample_id in self._seen:
                raise RowDropped("duplicate", f"sample {sample.sample_id}")
            keys = prompt_keys(sample) | text_keys(record.messages)
            if split == "train" and keys & self._eval_prompts:
                raise RowDropped("prompt_in_eval")
        except RowDropped as dropped:
            stats.drops.add(dropped, record.row_ref)
            return
        if split == "eval":
            self._eval_prompts |= keys
        self._seen.add(sample.sample_id)
        stats.truncated += len(sample.input_ids) < len(marked.input_ids)
        yield sample
