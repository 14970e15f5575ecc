"""The errors a user can meet. Each message says what was found, where, and what to do about it.

The command line prints the message alone and exits with code 2; anything else is a defect of ours
and shows its traceback.
"""


class DraftTrainError(Exception):
    """Base of every error that the user can act on."""


class RecipeError(DraftTrainError):
    """A recipe key is unknown, has the wrong type, or cannot be combined with another."""


class DataError(DraftTrainError):
    """A source file, row or sample table cannot be used."""


class TemplateError(DataError):
    """The tokenizer's chat template cannot be trusted to mark what the target produced."""


class TargetError(DraftTrainError):
    """The target model cannot be loaded, tapped or decoded exactly."""


class StoreError(DraftTrainError):
    """A feature store or one of its shards is missing, damaged or made from something else."""


class TrainingError(DraftTrainError):
    """Training cannot go on: what it computes is not finite any more."""


class CheckpointError(DraftTrainError):
    """A checkpoint or exported drafter is missing, incomplete or does not fit."""
