"""Prompts to the target's own responses: a drafter learns what its target says, not what others do.

In: a ``.jsonl`` of conversations (a final assistant turn is cut off and answered anew). Out: a
``.jsonl`` of token records (``responses.py``), which is a source of the data stage as it is.

Guarantee: every prompt is answered or has a tombstone exactly once, however often the command is
interrupted and repeated; finished work is found by id, so the order in which answers arrive does
not matter. Cost: one generation per prompt.
"""

import logging
from collections import Counter
from functools import partial
from typing import Any

from rich.progress import MofNCompleteColumn, TextColumn

from .chat import ChatTemplate, Tools
from .config import RegenerateConfig, SourceConfig
from .drops import DropLog, RowDropped
from .errors import DataError
from .files import content_hash
from .generation import Engine, Generation, Prompt
from .messages import Message, split_reasoning
from .progress import make_progress
from .responses import ResponseLog
from .sources import Conversation, Record, TokenRecord, read_source

log = logging.getLogger(__name__)

# So many discards without one response mean that the set-up is wrong, not the prompts.
_HOPELESS = 64


def regenerate(
    config: RegenerateConfig,
    tokenizer: Any,
    *,
    template_kwargs: dict[str, Any],
    stop_ids: list[int],
    target_name: str,
    model: Any = None,
) -> Counter[str]:
    """Answer every prompt of ``config.prompts`` that ``config.output`` does not yet hold.

    Args:
        config: files, engine and sampling.
        tokenizer: the target's tokenizer.
        template_kwargs: variables for the chat template, as in the data stage.
        stop_ids: every id at which the target stops.
        target_name: recorded beside the output; a later run must name the same target.
        model: the loaded target for the ``local`` engine, None for ``server``.

    Returns:
        Counts of this run: ``responses``, ``discarded``, ``tokens``, ``kept`` (done before).

    Raises:
        DataError: unusable prompts or output file, or an engine that cannot answer.
    """
    if config.prompts is None or config.output is None:
        raise DataError("regeneration needs data.regenerate.prompts and data.regenerate.output")
    template = ChatTemplate(tokenizer, template_kwargs)
    settings = {
        "target": target_name,
        "template_hash": template.hash,
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "stop_ids": sorted(stop_ids),
    }
    engine = _engine(config, model, template_kwargs, stop_ids)
    with ResponseLog(config.output, settings) as output:
        prompts = _read_prompts(config, template)
        waiting = [prompt for prompt in prompts if prompt.prompt_id not in output.done]
        counts = Counter(kept=len(prompts) - len(waiting))
        log.info("%d prompts: %d done before, %d to do", len(prompts), counts["kept"], len(waiting))
        writer = _Writer(output, template, config.temperature, frozenset(stop_ids), counts)
        _run(engine, waiting, writer)
    log.info(
        "%d responses (%d tokens), %d discarded in %s",
        counts["responses"],
        counts["tokens"],
        counts["discarded"],
        config.output,
    )
    if counts["other_prompt_ids"]:
        log.warning(
            "%d prompts have other ids at the server than here; the server's are kept: compare its "
            "tokenizer, chat template and thinking mode with the target's",
            counts["other_prompt_ids"],
        )
    return counts


def _engine(
    config: RegenerateConfig, model: Any, template_kwargs: dict[str, Any], stop_ids: list[int]
) -> Engine:
    # Imported where used: a server run needs no torch, a local one no HTTP client.
    if config.engine == "server":
        from .generate_server import generate_on_server

        return partial(generate_on_server, config=config, template_kwargs=template_kwargs)
    from .generate_local import generate_locally

    assert model is not None, "the local engine needs a loaded model"
    return partial(generate_locally, model, config=config, stop_ids=stop_ids)


def _run(engine: Engine, waiting: list[Prompt], writer: "_Writer") -> None:
    """Drive the engine, with a progress line."""
    columns = (MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with make_progress(*columns) as progress:
        task = progress.add_task("regenerate", total=len(waiting), rate="")
        for generation in engine(waiting):
            writer.add(generation)
            elapsed = progress.tasks[0].elapsed or 1e-9
            rate = f"{writer.counts['tokens'] / elapsed:.0f} tokens/s"
            progress.update(task, advance=1, rate=rate)
    writer.close()


class _Writer:
    """Turns generations into records; holds discards back until one response shows that it works.

    A wrong setting can make a server refuse every prompt. Tombstones for all of them would end the
    job for good, so none is written before the first response.
    """

    def __init__(
        self,
        output: ResponseLog,
        template: ChatTemplate,
        temperature: float,
        stop_ids: frozenset[int],
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        self._output = output
        self._template = template
        self._sampling = {"temperature": temperature} if temperature else "greedy"
        self._stop_ids = stop_ids
        self._held: list[dict[str, Any]] = []

    def add(self, generation: Generation) -> None:
        """Write a response, or a tombstone where there is none."""
        record = self._record(generation)
        if "discarded" in record:
            self.counts["discarded"] += 1
            self._held.append(record)
            if len(self._held) >= _HOPELESS:
                self.close()
        else:
            self.counts["responses"] += 1
            self.counts["tokens"] += len(record["response_ids"])
            self._output.append(record)
        if self._output.responses:
            self._flush()

    def close(self) -> None:
        """Check that something came of it.

        Raises:
            DataError: no prompt has a response.
        """
        if self._held and not self._output.responses:
            raise DataError(
                f"none of {len(self._held)} prompts was answered, the first because of "
                f"{self._held[0]['discarded']}: correct the set-up and run again (no prompt was "
                "marked as done)"
            )
        self._flush()

    def _flush(self) -> None:
        for record in self._held:
            self._output.append(record)
        self._held.clear()

    def _record(self, generation: Generation) -> dict[str, Any]:
        prompt, ids = generation.prompt, generation.response_ids
        if generation.discarded is not None:
            return {"id": prompt.prompt_id, "discarded": generation.discarded}
        end = next((i for i, token in enumerate(ids) if token in self._stop_ids), None)
        stopped = end is not None
        body = ids[:end]
        if not body:
            return {"id": prompt.prompt_id, "discarded": "empty_response"}
        self.counts["other_prompt_ids"] += generation.prompt_ids != prompt.prompt_ids
        tools = {"tools": prompt.tools} if prompt.tools else {}
        return {
            "id": prompt.prompt_id,
            "messages": [*prompt.messages, _assistant_message(self._template, body)],
            **tools,
            "prompt_ids": generation.prompt_ids,
            "response_ids": ids[: end + 1] if end is not None else ids,
            "finish": "stop" if stopped else "length",
            "sampling": self._sampling,
        }


def _assistant_message(template: ChatTemplate, body: list[int]) -> Message:
    """The response as a message, for readers; the ids are what is trained on."""
    text = template.decode(body)
    try:
        reasoning, answer = split_reasoning(text)
    except RowDropped:
        reasoning, answer = None, text
    field = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": answer, **field}


def _read_prompts(config: RegenerateConfig, template: ChatTemplate) -> list[Prompt]:
    assert config.prompts is not None
    drops = DropLog()
    prompts: dict[str, Prompt] = {}
    places: dict[str, str] = {}
    for record in read_source(SourceConfig(path=config.prompts, name="prompts"), drops):
        try:
            prompt = _prompt(record, template)
        except RowDropped as dropped:
            drops.add(dropped, record.row_ref)
            continue
        same = prompts.get(prompt.prompt_id)
        if same is not None and same.prompt_ids != prompt.prompt_ids:
            raise DataError(
                f"{record.row_ref} has the id {prompt.prompt_id!r} of another prompt "
                f"({places[prompt.prompt_id]}): give each prompt its own id"
            )
        prompts[prompt.prompt_id] = prompt
        places.setdefault(prompt.prompt_id, record.row_ref)
    if drops.total:
        log.warning("%s: dropped %s", config.prompts, drops.describe())
    if not prompts:
        raise DataError(f"{config.prompts} has no usable prompt: dropped {drops.describe()}")
    return list(prompts.values())


def _prompt(record: Record, template: ChatTemplate) -> Prompt:
    if isinstance(record, TokenRecord):
        raise DataError(f"{record.row_ref} holds token ids: prompts are rows with messages")
    messages = _without_answer(record)
    row_id = record.row_id or content_hash([messages, record.tools])
    tools: Tools = record.tools
    return Prompt(row_id, messages, tools, template.prompt_ids(messages, tools))


def _without_answer(record: Conversation) -> list[Message]:
    messages = record.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowDropped("empty_prompt", "only assistant messages")
    return messages
