"""Swapping AdamW for noisygrad with nothing but the required arguments: how often is training level or better.

    python benchmarks/dropin.py --half tune --seeds 3 --output results/dropin.jsonl
    python benchmarks/dropin.py --methods noisy-kfac --set kl_clip=0.001 --label clip
    python benchmarks/dropin.py --table

Some dozens of small real tasks, each trained by every method from the same initial weights on the same batches. Each
finished training is a line of the output, and running again does what is missing. Half of the tasks are for tuning
defaults, the other half only for reporting.

Data come from scikit-learn, Python's own texts, the folder NOISYGRAD_DATA (UCI, MNIST, CIFAR-10 by Pillow, SVHN) and
files that statsmodels and river carry; a task whose data are missing is skipped with a note, and so is IVON. They are
kept as .npz files in a folder of their own: `--prepare DIR` writes all of them, and `--prepared DIR` reads them on a
machine that has none of these packages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dropin_tasks import progress, results
from dropin_tasks.listing import listing
from dropin_tasks.methods import NAMES, USUAL, choose, method_named
from dropin_tasks.runner import Order, run
from dropin_tasks.store import Store, UnavailableError, default_folder
from dropin_tasks.table import comparison
from dropin_tasks.tasks import TASKS
from dropin_tasks.variation import Variation

QUICK = ("digits-gru", "concrete-regression", "mnist-lenet")


def setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` with a value as in JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--half", choices=["tune", "report"], help="all tasks unless said")
    found.add_argument("--tasks", nargs="+", metavar="PATTERN", help="names of tasks, perhaps with wildcards")
    found.add_argument("--methods", nargs="+", metavar="PATTERN", help=f"of {', '.join(NAMES)}; all but the last")
    found.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N−1")
    found.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="for ours only")
    found.add_argument("--label", help="what ours is called with these settings")
    found.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of one thread each")
    found.add_argument("--output", type=Path, default=Path("results/dropin.jsonl"))
    found.add_argument("--quick", action="store_true", help="three tasks, one seed, a fifth of the steps")
    found.add_argument("--list", action="store_true", help="print the tasks")
    found.add_argument("--table", action="store_true", help="print the comparison from the output")
    found.add_argument("--prepare", type=Path, metavar="DIR", help="write all data into a folder, and stop")
    found.add_argument("--prepared", type=Path, metavar="DIR", help="read all data from there, and nowhere else")
    for name, what in (
        ("batch", "of the batch; epochs stay"),
        ("epoch", "of the number of epochs"),
        ("width", "of the widths of networks"),
    ):
        found.add_argument(f"--{name}-factor", type=float, default=1.0, metavar="F", help=f"a factor {what}")
    found.add_argument("--input-scale", type=float, default=1.0, metavar="F", help="multiplies real inputs")
    found.add_argument(
        "--outliers", type=float, default=0.0, metavar="SHARE", help="of targets to learn from, replaced"
    )
    return found


def prepare(folder: Path, names: list[str]) -> None:
    """Write what the tasks read; says what cannot be made here."""
    store = Store(folder)
    for source in dict.fromkeys(source for name in names for source in TASKS[name].sources):
        try:
            store.arrays(source)
        except UnavailableError as why:
            print(f"{source} is left out: {why}", file=sys.stderr)
    size = sum(path.stat().st_size for path in folder.glob("*.npz"))
    print(f"{folder}: {len(list(folder.glob('*.npz')))} files, {size / 1e6:.1f} MB")


def main() -> None:
    command = parser()
    arguments = command.parse_args()
    try:
        names = [name for name, task in TASKS.items() if arguments.half in (None, task.half)]
        names = choose(arguments.tasks or (QUICK if arguments.quick else ("*",)), names, "task")
        chosen = choose(arguments.methods or USUAL, NAMES, "method")
        variation = Variation(
            batch_factor=arguments.batch_factor,
            epoch_factor=arguments.epoch_factor * (0.2 if arguments.quick else 1.0),
            width_factor=arguments.width_factor,
            input_scale=arguments.input_scale,
            outliers=arguments.outliers,
        )
    except ValueError as error:
        command.error(str(error))
    if arguments.seeds < 1 or arguments.jobs < 1:
        command.error("--seeds and --jobs must be at least 1")
    folder = arguments.prepared or default_folder()
    if arguments.prepare:
        prepare(arguments.prepare, names)
    elif arguments.list:
        print(listing(names, Store(folder, only_prepared=arguments.prepared is not None)))
    elif arguments.table:
        print(comparison(results.read(arguments.output), names, variation.label))
    else:
        settings = dict(arguments.set)
        order = Order(
            tasks=names,
            methods=[method_named(name, settings, arguments.label) for name in chosen],
            seeds=1 if arguments.quick else arguments.seeds,
            variation=variation,
            output=arguments.output,
            folder=folder,
            only_prepared=arguments.prepared is not None,
            jobs=arguments.jobs,
        )
        try:
            with progress.bar() as tell:
                skipped = run(order, tell)
        except ValueError as error:
            command.error(str(error))
        except KeyboardInterrupt:
            sys.exit(f"\ninterrupted; what was finished is in {arguments.output}, run again for the rest")
        for what, why in skipped.items():
            print(f"skipped {what}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
