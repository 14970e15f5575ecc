"""The ``drafttrain`` command: one verb per stage, each reading the artifact of the one before.

Every verb takes ``--recipe FILE`` and ``key=value`` overrides. A mistake of the user is one line on
stderr and exit code 2. Heavy libraries are imported inside the verbs, so ``--help`` is instant.
"""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from drafttrain.data.errors import DraftTrainError

Command = Callable[..., Any]


def with_recipe(command: Command) -> Command:
    """Add ``--recipe`` and overrides; pass the validated recipe as first argument."""

    @click.option(
        "-r",
        "--recipe",
        "path",
        required=True,
        type=click.Path(path_type=Path),
        help="YAML file that describes the run",
    )
    @click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
    @functools.wraps(command)
    def wrapped(path: Path, overrides: tuple[str, ...], **options: Any) -> Any:
        from drafttrain.messages import set_up_logging
        from drafttrain.recipe import load_recipe

        set_up_logging()
        return command(load_recipe(path, overrides), **options)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="drafttrain")
def cli() -> None:
    """Train a speculative-decoding drafter for your own target model.

    \b
    conversations -> data prepare -> extract -> train -> eval -> export
    """


@cli.command()
@with_recipe
def check(recipe: Any) -> None:
    """Validate a recipe and print it with every default filled in."""
    click.echo(recipe.to_yaml(), nl=False)


def _size(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Parse a size such as ``2TB``."""
    from drafttrain.data.sizes import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None


_RATE = click.FloatRange(min=0, min_open=True)


@cli.command()
@click.option(
    "--probe",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="measure extraction and training on this machine, for so long each",
)
@click.option("--extract-rate", type=_RATE, help="tokens/s of one GPU in extraction")
@click.option("--train-rate", type=_RATE, help="tokens/s of one GPU in training")
@click.option("--replay-rate", type=_RATE, help="tokens/s of one GPU in replay")
@click.option("--live-rate", type=_RATE, help="tokens/s of live decoding")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--space", metavar="SIZE", callback=_size, help="the run may take so much, as 2TB")
@click.option("--json", "file", type=click.Path(path_type=Path), help="also write the plan there")
@with_recipe
def plan(recipe: Any, **options: Any) -> None:
    """Say what a run costs, per stage, and refuse what does not fit the disk (exit code 2)."""
    from drafttrain import stages

    stages.plan(recipe, _given_recipe(), **options)


@cli.group()
def data() -> None:
    """Conversations to sample tables."""


@data.command()
@with_recipe
def prepare(recipe: Any) -> None:
    """Render conversations with the target's template into samples/{train,eval}.parquet."""
    from drafttrain import stages

    stages.prepare(recipe)


@data.command()
@with_recipe
def regenerate(recipe: Any) -> None:
    """Let the target answer the prompts of data.regenerate.prompts (resumable)."""
    from drafttrain import stages

    stages.regenerate(recipe)


def _share(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    """Parse ``I/N``."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"'{text}' is not I/N with I from 0 to N-1, such as 0/4 or 3/4")
    return int(match[1]), int(match[2])


@cli.command()
@click.option(
    "--worker",
    "share",
    metavar="I/N",
    callback=_share,
    help="do shards I, I+N, I+2N, ... only, and wait for nobody  [any shard that is free]",
)
@with_recipe
def extract(recipe: Any, share: tuple[int, int] | None) -> None:
    """Run the target over the sample tables and write store/{train,eval} (resumable).

    Any number of these may run at once, on any machines that share the output folder.
    """
    from drafttrain import stages

    stages.extract(recipe, share)


@cli.command()
@click.option("--ranks", type=click.IntRange(min=1), help="processes on this machine  [one a GPU]")
@with_recipe
def train(recipe: Any, ranks: int | None) -> None:
    """Train the drafter under DeepSpeed on this machine (resumable)."""
    from drafttrain.launch import launch_training

    path, overrides = _given_recipe()
    sys.exit(launch_training(recipe, path, overrides, ranks))


@cli.command("eval")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="checkpoint or exported drafter folder  [the newest checkpoint]",
)
@with_recipe
def evaluate(recipe: Any, checkpoint: Path | None) -> None:
    """Measure acceptance length: replay, and live decoding where eval.live_prompts is set.

    Exit code 1 if live decoding changed what the target says.
    """
    from drafttrain import stages

    if not stages.evaluate(recipe, checkpoint):
        sys.exit(1)


@cli.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), help="[the newest checkpoint]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder to create")
@with_recipe
def export(recipe: Any, checkpoint: Path | None, out: Path) -> None:
    """Copy a checkpoint's drafter to a folder that vLLM and SGLang load."""
    from drafttrain import stages

    stages.export(recipe, checkpoint, out)


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), help="also save the screen as a picture")
def report(file: Path, svg: Path | None) -> None:
    """Show a finished report (reports/step-NNNNNN.json) on the screen."""
    from drafttrain import stages

    stages.show_report(file, svg)


@cli.group()
def store() -> None:
    """Feature stores."""


@store.command()
@click.argument("folder", type=click.Path(path_type=Path))
def info(folder: Path) -> None:
    """Show what a store holds, finished or not."""
    from drafttrain import store_tools

    store_tools.info(folder)


@store.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-r",
    "--recipe",
    "path",
    type=click.Path(path_type=Path),
    help="whose target computes states again",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="let the recipe's target compute so many random tokens again  [64 with --recipe]",
)
@click.option("--seed", default=0, show_default=True, help="which tokens")
def verify(folder: Path, path: Path | None, tokens: int | None, seed: int) -> None:
    """Check every shard: sizes, headers, checksums, norms; with --recipe also the states."""
    from drafttrain import store_tools
    from drafttrain.recipe import load_recipe

    if tokens is not None and path is None:
        raise click.UsageError("--tokens needs --recipe, which names the target")
    recipe = None if path is None else load_recipe(path)
    store_tools.verify(folder, recipe, tokens or 64, seed)


@store.command()
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="of whole stores, also compute so many random tokens again",
)
@with_recipe
def repair(recipe: Any, tokens: int) -> None:
    """Extract again exactly the shards of store/{train,eval} that verify refuses (resumable)."""
    from drafttrain import store_tools

    store_tools.repair(recipe, tokens)


@store.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument(
    "sources", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="IN..."
)
def merge(out: Path, sources: tuple[Path, ...]) -> None:
    """Make one store of the parts of one extraction that lie in several folders (resumable)."""
    from drafttrain import store_tools

    store_tools.merge(out, sources)


def _given_recipe() -> tuple[Path, tuple[str, ...]]:
    """The recipe file and overrides as the user typed them, for the training processes."""
    given = click.get_current_context().params
    return given["path"], given["overrides"]


def main() -> None:
    """Run the command line; a DraftTrainError is one line on stderr and exit code 2."""
    try:
        cli(standalone_mode=True)
    except DraftTrainError as exc:
        click.echo(f"error: {exc}", err=True)
        sys.exit(2)
