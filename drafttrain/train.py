"""Entry point of training: ``deepspeed drafttrain/train.py --recipe recipe.yaml [key=value ...]``.

``drafttrain train`` launches just this, after the checks that need no launcher. Exit code 2 means
a mistake in the recipe or its artifacts, explained in one line.
"""

import argparse
import os
import sys
from pathlib import Path

from drafttrain.data.errors import DraftTrainError
from drafttrain.messages import set_up_logging
from drafttrain.recipe import Recipe, load_recipe


def train(recipe: Recipe, measure_s: float | None) -> None:
    """Train, or only time steps, on this rank; the launcher has started one process per device."""
    import torch.distributed as dist

    from drafttrain.acceptance.checkpoints import replay_checkpoint
    from drafttrain.data.files import write_json
    from drafttrain.engine import init_distributed
    from drafttrain.launch import RATE_FILE
    from drafttrain.run_lock import hold_run
    from drafttrain.trainer import Trainer

    device = init_distributed()
    with hold_run(recipe.output, "training", rank=dist.get_rank()):
        trainer = Trainer(
            recipe, device, lambda folder, step: replay_checkpoint(recipe, folder, step, device)
        )
        if measure_s is None:
            trainer.run()
        else:
            rate = trainer.time_steps(measure_s)
            if dist.get_rank() == 0:
                write_json(recipe.output / RATE_FILE, {"tokens_per_s": rate})
        dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Parse, train, and turn a user's mistake into one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, help="set by the DeepSpeed launcher")
    parser.add_argument("--measure", type=float, help="seconds: only time steps; for the plan")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank)
    try:
        if "RANK" not in os.environ:
            raise DraftTrainError(
                "start training with `drafttrain train --recipe …` or `deepspeed "
                "drafttrain/train.py --recipe …`: it needs a launcher"
            )
        train(load_recipe(arguments.recipe, tuple(arguments.overrides)), arguments.measure)
    except DraftTrainError as exc:
        if rank == 0:
            print(f"error: {exc}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
