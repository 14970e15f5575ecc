"""Random faults against extraction: after each, the same command gives the undisturbed bytes.

    python -m tests.benchmarks.soak [--faults 200] [--seed 0] [--folder DIR]

``faults.py`` has the kinds. A fault that did not hit (the process had ended) is tried again.
``detected``: an error says what to do, or ``store verify`` flags it, where that must be so;
``recovered``: after doing that, or after the rerun, store and undisturbed store are equal byte by
byte and nothing else is in the folder. Prints a table and exits with 1 if anything else happened.
Cost: about two seconds a fault.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafttrain.data.errors import StoreError

from .faults import KINDS, Missed, Soak, Wrong

_ATTEMPTS = 50


def soak(faults: int, seed: int, folder: Path, console: Console, mount: bool = True) -> bool:
    """Inject so many faults, each kind equally often; print the table; True if all was well.

    Args:
        faults: how many.
        seed: of everything random.
        folder: an empty folder to work in.
        console: where the table goes.
        mount: fill a small file system of its own, if allowed.
    """
    rows = {kind: Counter[str]() for kind in KINDS}
    began = time.monotonic()
    run = Soak(folder, seed, mount)
    order = [list(KINDS)[i % len(KINDS)] for i in range(faults)]
    run.rng.shuffle(order)
    try:
        for number, kind in enumerate(order, start=1):
            _inject(run, kind, rows[kind], number, console)
    finally:
        run.close()
    table = Table("fault", "injected", "detected", "recovered", "undetected or different")
    total = sum(rows.values(), Counter[str]())
    for kind, row in [*rows.items(), ("all", total)]:
        if kind == "all":
            table.add_section()
        shown = "" if kind in KINDS and not KINDS[kind][1] else str(row["detected"])
        table.add_row(kind, str(row["injected"]), shown, str(row["recovered"]), str(row["bad"]))
    disk = "a tmpfs" if run.mounted else "a limit on file sizes"
    console.print(table)
    console.print(f"{faults} faults in {time.monotonic() - began:.0f} s, seed {seed}, disk: {disk}")
    return not total["bad"] and total["recovered"] == total["injected"] == faults


def _inject(run: Soak, kind: str, row: Counter[str], number: int, console: Console) -> None:
    fault, told = KINDS[kind]
    for _ in range(_ATTEMPTS):
        before = run.detected
        try:
            fault(run)
            if told and run.detected == before:
                raise Wrong("nothing told of it")
        except Missed:
            run.detected = before
            continue
        except (Wrong, StoreError) as exc:
            console.print(f"fault {number}, {kind}: {exc}", style="red")
            row["bad"] += 1
        else:
            row["recovered"] += 1
        row["injected"] += 1
        row["detected"] += run.detected - before
        return
    console.print(f"fault {number}, {kind}: never hit in {_ATTEMPTS} attempts", style="red")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="[a temporary folder]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        fine = soak(given.faults, given.seed, Path(folder), Console(width=110))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
