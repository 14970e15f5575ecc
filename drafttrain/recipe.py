"""One YAML file describes a whole run: loading, overrides, validation, and where artifacts go.

    recipe.yaml + ["train.lr=1e-3", ...] -> Recipe (typed, frozen, resolved)

Unknown keys, wrong types and impossible combinations raise RecipeError before any work; each
problem is one line that names the dotted key and, for a misspelt key, the nearest known one.
Paths are relative to the current folder. Cost: a few milliseconds, no torch.
"""

import contextlib
import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from drafttrain.acceptance.config import EvalConfig
from drafttrain.data.config import DataConfig, StrictModel
from drafttrain.data.errors import RecipeError
from drafttrain.data.files import content_hash
from drafttrain.drafter.config import DrafterRecipe
from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.train_config import TrainConfig

SPLITS = ("train", "eval")


class Recipe(StrictModel):
    """The whole recipe; sections belong to the stage that reads them."""

    output: Path = Field(description="folder of all artifacts of this run")
    seed: int = Field(default=0, ge=0, description="initial weights, order and anchors")
    target: TargetConfig
    data: DataConfig
    extract: ExtractConfig = ExtractConfig()
    drafter: DrafterRecipe
    train: TrainConfig
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "Recipe":
        if self.drafter.block_size > self.data.max_length:
            raise ValueError(
                f"drafter.block_size {self.drafter.block_size} exceeds data.max_length "
                f"{self.data.max_length}"
            )
        if self.extract.features == "online" and self.target.device == "spread":
            raise ValueError(
                "extract.features online runs the target on the device of each rank, so it cannot"
                " be spread: set target.device to auto, or extract.features to rolling"
            )
        return self

    def table(self, split: str) -> Path:
        """The sample table of ``train`` or ``eval``."""
        return self.output / "samples" / f"{split}.parquet"

    @property
    def stored_splits(self) -> tuple[str, ...]:
        """Splits whose features are stored as a whole."""
        return SPLITS if self.extract.features == "stored" else ("eval",)

    def store(self, split: str) -> Path:
        """The feature store of ``train`` or ``eval``."""
        return (self.extract.store or self.output / "store") / split

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.output / "checkpoints"

    @property
    def reports(self) -> Path:
        """Folder of acceptance reports."""
        return self.output / "reports"

    def resolved(self) -> dict[str, Any]:
        """Plain values of every key, defaults included, ready for YAML or JSON."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as a recipe file, stored with every artifact."""
        return yaml.safe_dump(self.resolved(), sort_keys=False)

    @property
    def hash(self) -> str:
        """Identity of all settings except where artifacts go."""
        values = self.resolved()
        del values["output"], values["extract"]["store"]
        return content_hash(values)


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path: a YAML file.
        overrides: ``dotted.key=value`` with YAML values; they win over the file.

    Raises:
        RecipeError: one line per problem.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist") from None
    except IsADirectoryError:
        raise RecipeError(f"recipe {path} is a folder; name the YAML file in it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        detail = " ".join(str(exc).split())
        raise RecipeError(f"recipe {path} is not valid YAML: {detail}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"recipe {path} holds {type(raw).__name__}, not a mapping of sections")
    for override in overrides:
        _apply(raw, override)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as exc:
        lines = [_explain(dict(error), exc.title) for error in exc.errors()]
        raise RecipeError(f"recipe {path}: " + "\n  ".join(lines)) from None


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override '{override}' is not of the form key.subkey=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"override '{override}': the value is not valid YAML") from None
    # YAML 1.1 reads 1e-3 as text; people write it for learning rates.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    *parents, last = key.split(".")
    node: Any = raw
    for parent in parents:
        if isinstance(node, dict):
            node = node.setdefault(parent, {})
        elif isinstance(node, list) and parent.isdigit() and int(parent) < len(node):
            node = node[int(parent)]
        else:
            node = None
    if not isinstance(node, dict):
        raise RecipeError(f"override '{override}': '{'.'.join(parents)}' is not a section")
    node[last] = value


def _explain(error: dict[str, Any], title: str) -> str:
    """One line for one pydantic error."""
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *parents, last = error["loc"]
        known = _known_keys(parents)
        near = difflib.get_close_matches(str(last), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"{location}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{location}: required key is missing"
    message = error["msg"].removeprefix("Value error, ")
    prefix = f"{location}: " if location else ""
    given = error["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{prefix}{message}{shown}"


def _known_keys(parents: list[Any]) -> list[str]:
    """Field names of the model at a location, following lists."""
    model: Any = Recipe
    for part in parents:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        arguments = getattr(annotation, "__args__", ())
        candidates = [annotation, *arguments]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(model.model_fields)
