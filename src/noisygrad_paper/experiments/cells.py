"""Results that survive: one JSON line per finished cell, in `<folder>/<experiment>.jsonl`.

A cell is one data set, one method and one replicate (a split or a seed). Lines are only ever added, under a lock of the
file, several at once in a single write, and end with a checksum of what stands before it. A run that is killed loses
the cells it was computing and, at worst, the end of the last line; processes that share a folder cannot spoil each
other's lines. A line that is cut off or damaged is named wherever it is read, counts as missing, and stays.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import reprlib
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from noisygrad.versions import versions
from noisygrad_paper.experiments.locked_files import BINARY, locked, write_all
from noisygrad_paper.experiments.plain_values import (
    LARGEST,
    Metric,
    check_name,
    check_text,
    is_finite,
    plain_config,
    plain_metrics,
    plain_number,
    replicate_number,
)
from noisygrad_paper.experiments.signed_lines import signed, unsigned

Key: TypeAlias = tuple[str, str, int]
"""What a cell is known by within its experiment: data, method, replicate."""
Report: TypeAlias = Callable[[float, str], None]
"""Called by a job at work: the fraction of it that is done, and a word on what it does."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""What an experiment may be called."""


class ResultsError(ValueError):
    """A results file that cannot be read; the message says where, and what to do."""


class ConfigurationError(ValueError):
    """A results file made by another configuration; the message shows the difference."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One finished cell. Raises ValueError when made with values that cannot be stored.

    A figure that is not finite, or beyond 1e100, is refused: it would spoil every mean it enters. A cell that could not
    be computed has an `error` instead of figures. Names are printable text of at most 200 letters. `config` and
    `metrics` are kept as JSON gives them back, tuples as lists.
    """

    experiment: str
    data: str
    method: str
    replicate: int
    config: dict[str, Any]
    metrics: dict[str, Metric]
    seconds: float
    device: str
    versions: dict[str, str] = field(default_factory=versions)
    error: str | None = None
    """Why there are no figures; None for a cell that has them."""

    def __post_init__(self) -> None:
        for name in ("experiment", "data", "method", "device"):
            check_name(getattr(self, name), f"{name} of a cell")
        for name in ("config", "metrics", "versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} of a cell must be a JSON object; got {reprlib.repr(getattr(self, name))}")
        for name, version in self.versions.items():
            check_name(name, f"{self.label}: a name among versions")
            check_name(version, f"{self.label}: the version of {name}")
        object.__setattr__(self, "replicate", replicate_number(self.replicate, self.label))
        object.__setattr__(self, "config", plain_config(self.config, self.label))
        object.__setattr__(self, "metrics", plain_metrics(self.metrics, self.label))
        object.__setattr__(self, "seconds", plain_number(self.seconds, f"{self.label}: seconds"))
        for name, value in {"seconds": self.seconds, **self.metrics}.items():
            if not is_finite(value):
                raise ValueError(
                    f"{self.label}: {name} must be finite and at most {LARGEST:g} in size; got {reprlib.repr(value)}. "
                    "Store a failed cell with an error"
                )
        if self.error is not None:
            check_text(self.error, f"{self.label}: error")
        if bool(self.metrics) != (self.error is None) or self.error == "":
            raise ValueError(
                f"{self.label}: a cell has metrics or an error; got {reprlib.repr(self.metrics)} and "
                f"{reprlib.repr(self.error)}"
            )

    @property
    def key(self) -> Key:
        """What the cell is known by within its experiment."""
        return self.data, self.method, self.replicate

    @property
    def label(self) -> str:
        """The cell in words, for messages."""
        return f"{self.data} {self.method} replicate {self.replicate}"

    def to_line(self) -> str:
        """The cell as one line of JSON, without a line end."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return signed(json.dumps(given, allow_nan=False, ensure_ascii=False))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """The cell that `to_line` wrote; raises ValueError for anything else, were it other by one bit."""
        text = unsigned(line)
        try:
            return cls._from_json(text)
        except (OverflowError, RecursionError, TypeError) as reason:
            raise ValueError(f"it is no cell: {reason}") from reason

    @classmethod
    def _from_json(cls, text: str) -> Self:
        values = json.loads(text)
        names = {each.name for each in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"a cell is a JSON object; got {text[:60]!r}")
        absent, unknown = names - {"error"} - values.keys(), values.keys() - names
        if absent or unknown:
            raise ValueError(f"a cell lacks {sorted(absent)} and has unknown {reprlib.repr(sorted(unknown))}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cells that are computed together, such as the splits of a data set trained as replicas."""

    data: str
    method: str
    replicates: tuple[int, ...]
    config: dict[str, Any]
    cost: float = 1.0
    """Expected cost of one replicate beside those of other jobs; only the time left is estimated from it."""

    def __post_init__(self) -> None:
        numbered = tuple(replicate_number(replicate, self.name) for replicate in self.replicates)
        if not numbered or len(set(numbered)) < len(numbered):
            raise ValueError(f"{self.name}: replicates must be one or more different numbers; got {self.replicates}")
        if not 0 < self.cost < math.inf:
            raise ValueError(f"{self.name}: cost must be positive and finite; got {self.cost}")
        object.__setattr__(self, "replicates", numbered)
        object.__setattr__(self, "config", plain_config(self.config, self.name))

    @property
    def name(self) -> str:
        """Data and method."""
        return f"{self.data} {self.method}"

    def cell(
        self,
        experiment: str,
        replicate: int,
        metrics: Mapping[str, Any],
        *,
        seconds: float,
        device: str,
        error: str | None = None,
    ) -> Cell:
        """The finished cell of one replicate; a failed one where there is an error or a figure is not finite."""
        found = plain_metrics(metrics, f"{self.name} replicate {replicate}")
        bad = [name for name, value in found.items() if not is_finite(value)]
        if bad and error is None:
            error = "not finite: " + ", ".join(f"{name} = {reprlib.repr(found[name])}" for name in bad)
        return Cell(
            experiment=experiment,
            data=self.data,
            method=self.method,
            replicate=replicate,
            config=self.config,
            metrics=found if error is None else {},
            seconds=seconds,
            device=device,
            error=error,
        )

    def cells(
        self, experiment: str, figures: Iterable[Mapping[str, Any]], *, seconds: float, device: str
    ) -> list[Cell]:
        """The finished cells of all replicates in their order, each with its share of the seconds."""
        share = seconds / len(self.replicates)
        return [
            self.cell(experiment, replicate, metrics, seconds=share, device=device)
            for replicate, metrics in zip(self.replicates, figures, strict=True)
        ]


class Results:
    """The stored cells of one experiment, in the file `folder`/`experiment`.jsonl, which the first of them makes."""

    def __init__(self, folder: str | Path, experiment: str) -> None:
        if not NAME.fullmatch(experiment):
            raise ValueError(f"an experiment's name has letters, digits, - and _; got {experiment!r}")
        self.experiment = experiment
        self.path = Path(folder) / f"{experiment}.jsonl"
        self._parsed: dict[bytes, Cell] = {}

    def load(self) -> list[Cell]:
        """The stored cells, one for each key; [] where there is no file.

        A failed cell is left out when the same cell was computed later. Bad lines are left out with a warning that
        names them.
        """
        stored = self._stored()
        if stored.bad:
            # From here, whoever asks: so Python shows it once in a process, not at every place that reads.
            warnings.warn(_complaint(self.path, stored.bad), UserWarning, stacklevel=1)
        return list(stored.cells.values())

    def complaint(self) -> str | None:
        """What to tell of lines that are cut off or damaged, or of something else; None where all are whole."""
        bad = self._stored().bad
        return _complaint(self.path.name, bad) if bad else None

    def append(self, cells: Iterable[Cell]) -> list[Cell]:
        """Store cells in one write, safe on the disk on return; gives back those that were new.

        A cell that is there already is dropped: the first wins, but a computed cell replaces a failed one.

        Raises ConfigurationError, and stores nothing, if stored cells of the same data and method have another
        configuration; OSError if the file cannot be written.
        """
        cells = list(cells)
        for cell in cells:
            if cell.experiment != self.experiment:
                raise ValueError(f"{cell.label} is of experiment {cell.experiment!r}, the file of {self.experiment!r}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        with locked(descriptor, self.path, "exclusive"):
            stored = self._read(descriptor)
            fresh: list[Cell] = []
            for cell in cells:
                self._same_config(stored.cells.values(), cell)
                if stored.add(cell):
                    fresh.append(cell)
            # What lacks its line end, an editor's work or the rest of a stopped write, stays a line of its own.
            start = "\n" if stored.is_open else ""
            write_all(descriptor, (start + "".join(f"{cell.to_line()}\n" for cell in fresh)).encode(), self.path)
        return fresh

    def missing(self, plan: Iterable[Job]) -> list[Job]:
        """The jobs of a plan with only the replicates that are not stored; failed cells count as not stored.

        Raises ConfigurationError for a cell of another configuration, which is neither there nor missing.
        """
        cells = self.load()
        done = {cell.key for cell in cells if cell.error is None}
        left = []
        for job in plan:
            self._same_config(cells, job)
            replicates = tuple(number for number in job.replicates if (job.data, job.method, number) not in done)
            if replicates:
                left.append(replace(job, replicates=replicates))
        return left

    def _same_config(self, cells: Iterable[Cell], new: Cell | Job) -> None:
        for cell in cells:
            # A failed cell has no figures that could be mixed with others, so it binds nobody.
            same = (cell.data, cell.method) == (new.data, new.method)
            if same and cell.error is None and cell.config != new.config:
                raise ConfigurationError(
                    f"{self.path} has cells of {new.data} {new.method} made by another configuration:\n"
                    f"{difference(cell.config, new.config)}\n"
                    "Choose another folder with --results, go back to the stored configuration, or delete the file."
                )

    def _stored(self) -> _Stored:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            return _Stored()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ResultsError(f"{self.path} is not a file: move it away, or choose another folder")
        with locked(descriptor, self.path, "shared"):
            return self._read(descriptor)

    def _read(self, descriptor: int) -> _Stored:
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            lines = file.read().split(b"\n")
        stored = _Stored(is_open=bool(lines[-1]))
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    stored.add(self._parse(line))
                except (ValueError, TypeError) as reason:
                    stored.bad[number] = f"{reason}: {line[:60]!r}"
        return stored

    def _parse(self, line: bytes) -> Cell:
        # Every append reads the file again; what was parsed before is only looked up.
        cell = self._parsed.get(line) or Cell.from_line(line.decode())
        if cell.experiment != self.experiment:
            raise ValueError(f"it is of the experiment {cell.experiment!r}")
        return self._parsed.setdefault(line, cell)


@dataclass(kw_only=True)
class _Stored:
    cells: dict[Key, Cell] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    """What is wrong with each line that is no cell of the experiment, by its number from 1."""
    is_open: bool = False
    """Whether the last line lacks its line end."""

    def add(self, cell: Cell) -> bool:
        """Whether the cell is news: the first of its key, or a better or another word after a failure."""
        known = self.cells.get(cell.key)
        if known is not None and (known.error is None or (known.error, known.config) == (cell.error, cell.config)):
            return False
        self.cells[cell.key] = cell
        return True


def _complaint(file: Path | str, bad: Mapping[int, str]) -> str:
    """The first ten bad lines by their numbers, and what is wrong with the first."""
    number, reason = next(iter(bad.items()))
    others = [str(other) for other in bad][1:10]
    more = f"; so are lines {', '.join(others)}" + ", …" * (len(bad) > 10) if others else ""
    return (
        f"line {number} of {file} is bad ({reason}){more}. The cell of a bad line counts as missing: bring the line "
        "back from a copy, or delete it once the same command has computed the cell again"
    )


def device_name(device: str) -> str:
    """The machine's processor or GPU in words, without anything that tells one machine from another of its kind."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"


def difference(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """One line for every setting that differs."""
    theirs, ours = dict(flat(stored)), dict(flat(given))
    return "\n".join(
        f"  {name}: stored {_shown(theirs, name)}, now {_shown(ours, name)}"
        for name in sorted(theirs.keys() | ours.keys())
        if _shown(theirs, name) != _shown(ours, name)
    )


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings under dotted names."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"
