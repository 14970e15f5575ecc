"""What an acceptance number depends on besides the drafter: stored with it, compared before it is.

The same drafter accepts two or three times as much in one mode as in another, so numbers measured
under unlike settings are never set side by side.
"""

import platform
from importlib.metadata import version
from typing import Any

from drafttrain.data.config import StrictModel
from drafttrain.data.errors import RecipeError
from drafttrain.data.store_format import StoreMeta

from .config import EvalConfig

_PACKAGES = ("drafttrain", "torch", "transformers")
# These may differ between drafters that are worth comparing; they are shown, not required equal.
_INFORMATIONAL = (
    "target", "recipe_hash", "store_hash", "codec", "taps", "tree_budgets", "live_prompts",
    "bootstrap_resamples", "versions",
)  # fmt: skip


class EvalSettings(StrictModel):
    """Everything that decides an acceptance number, except the drafter."""

    target: str
    target_fingerprint: str
    dtype: str
    """Of the target."""
    tokenizer_hash: str
    template_hash: str | None
    """Unset if all samples are token records that were never rendered."""
    template_kwargs: dict[str, Any]
    """Passed to the chat template: thinking on or off, among others."""
    table_hash: str
    """The evaluation samples."""
    temperatures: list[float]
    max_new_tokens: int
    """Of live responses."""
    seed: int
    context_buckets: list[int]
    tree_budgets: list[int]
    live_prompts: int
    bootstrap_resamples: int
    codec: str
    taps: list[int]
    store_hash: str
    recipe_hash: str
    versions: dict[str, str]


def settings_of(
    meta: StoreMeta, config: EvalConfig, template_kwargs: dict[str, Any], recipe_hash: str
) -> EvalSettings:
    """Collect the settings of an evaluation.

    Args:
        meta: of the evaluation store.
        config: of the evaluation.
        template_kwargs: what the sample table was rendered with.
        recipe_hash: of the whole recipe.
    """
    return EvalSettings(
        target=meta.target,
        target_fingerprint=meta.target_fingerprint,
        dtype=meta.target_dtype,
        tokenizer_hash=meta.tokenizer_hash,
        template_hash=meta.template_hash,
        template_kwargs=template_kwargs,
        table_hash=meta.table_hash,
        codec=meta.codec,
        taps=meta.taps,
        store_hash=meta.identity(),
        recipe_hash=recipe_hash,
        versions={"python": platform.python_version()}
        | {package: version(package) for package in _PACKAGES},
        **config.model_dump(),
    )


def differing_settings(left: EvalSettings, right: EvalSettings) -> list[str]:
    """``field: left, not right`` for every field that makes two results unlike."""
    return [
        f"{name}: {getattr(left, name)!r}, not {getattr(right, name)!r}"
        for name in EvalSettings.model_fields
        if name not in _INFORMATIONAL and getattr(left, name) != getattr(right, name)
    ]


def require_alike(left: EvalSettings, right: EvalSettings, what: str) -> None:
    """Raise RecipeError naming every differing field unless the results can be compared."""
    if fields := differing_settings(left, right):
        raise RecipeError(
            f"{what} cannot be compared, they were measured under unlike settings "
            f"({'; '.join(fields)}): evaluate both with the same eval and data sections"
        )
