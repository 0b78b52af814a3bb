"""The figures the paper prints, as data: regression on the UCI sets, CIFAR-10, HMC's variances, active learning.

`quoted("NNG-MVG", "boston")["rmse"]` is Table 1's 2.742 ± 0.125. A printed standard error of 0.000 is read as 0.0005,
the most that rounds to it; "NA" has none. The paper's naval row holds two tasks: its own columns predict the turbine's
decay from 17 features (our `naval-turbine`), those taken from other papers the compressor's from 16 (our `naval`).
`quoted("noisy-K-FAC/D+B", "cifar10")["accuracy"]` is Table 2's 92.01; that table has no standard errors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name
from noisygrad_paper.report.comparison import (
    ACCURACY,
    CORRELATION,
    LOG_LIKELIHOOD,
    RMSE,
    RMSE_ACTIVE,
    RMSE_RANDOM,
    Estimate,
    Metric,
)

TABLE_1_METHODS = ("BBB", "PBP", "NNG-FFG", "NNG-MVG")
SUPPLEMENT_METHODS = ("PBP_MV", "VMG")
METHODS = (*TABLE_1_METHODS, *SUPPLEMENT_METHODS)
TABLE_2_METHODS = ("SGD", "K-FAC", "K-FAC+WD", "BBB", "noisy-Adam", "noisy-K-FAC")
TABLE_2_DATA = "cifar10"
TABLE_3_METHODS = ("PBP", "NNG-FFG", "NNG-MVG", "NNG-BlkTri")
TABLE_4_METHODS = ("PBP", "NNG-FFG", "NNG-MVG", "HMC")

DATA: dict[str, str] = {
    "boston": "boston",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval-turbine": "naval (turbine, 17 features)",
    "naval": "naval (compressor, 16 features)",
    "power": "power",
    "protein": "protein",
    "wine": "wine",
    "yacht": "yacht",
    "year": "year",
}
"""The tables' rows under our names for them, with the label that a reader sees."""

_OWN_NAVAL = ("BBB", "NNG-FFG", "NNG-MVG")
_REPLICATES = {"protein": 5, "year": 1}
_ROUNDED_TO_NOTHING = 0.0005

# Table 1: test RMSE of BBB, PBP, NNG-FFG and NNG-MVG, then the test log-likelihood of the same four.
_TABLE_1 = """
boston   3.171±0.149 3.014±0.180 3.031±0.155 2.742±0.125 -2.602±0.031 -2.574±0.089 -2.558±0.032 -2.446±0.029
concrete 5.678±0.087 5.667±0.093 5.613±0.113 5.019±0.127 -3.149±0.018 -3.161±0.019 -3.145±0.023 -3.039±0.025
energy   0.565±0.018 1.804±0.048 0.839±0.046 0.485±0.023 -1.500±0.006 -2.042±0.019 -1.629±0.020 -1.421±0.005
kin8nm   0.080±0.001 0.098±0.001 0.079±0.001 0.076±0.001  1.111±0.007  0.896±0.006  1.112±0.008  1.148±0.007
naval    0.000±0.000 0.006±0.000 0.001±0.000 0.000±0.000  6.143±0.032  3.731±0.006  6.231±0.041  7.079±0.034
power    4.023±0.036 4.124±0.035 4.002±0.039 3.886±0.041 -2.807±0.010 -2.837±0.009 -2.803±0.010 -2.776±0.011
protein  4.321±0.017 4.732±0.013 4.380±0.016 4.097±0.009 -2.882±0.004 -2.973±0.003 -2.896±0.004 -2.836±0.002
wine     0.643±0.012 0.635±0.008 0.644±0.011 0.637±0.011 -0.977±0.017 -0.968±0.014 -0.976±0.016 -0.969±0.014
yacht    1.174±0.086 1.015±0.054 1.289±0.069 0.979±0.077 -2.408±0.007 -1.634±0.016 -2.412±0.006 -2.316±0.006
year     9.076±NA    8.879±NA    9.071±NA    8.885±NA    -3.614±NA    -3.603±NA    -3.620±NA    -3.595±NA
"""

# The supplement's table: test RMSE of PBP_MV and VMG, then the test log-likelihood of the same two.
_SUPPLEMENT = """
boston   3.137±0.155 2.810±0.110 -2.666±0.081 -2.540±0.080
concrete 5.397±0.130 4.700±0.140 -3.059±0.029 -2.980±0.030
energy   0.556±0.016 1.160±0.030 -1.151±0.016 -1.450±0.030
kin8nm   0.088±0.001 0.080±0.001  1.053±0.012  1.140±0.010
naval    0.002±0.000 0.000±0.000  4.935±0.051  5.840±0.000
power    4.030±0.036 3.880±0.030 -2.830±0.008 -2.780±0.010
protein  4.490±0.012 4.140±0.010 -2.917±0.003 -2.840±0.000
wine     0.641±0.006 0.610±0.010 -0.969±0.013 -0.930±0.020
yacht    0.676±0.054 0.770±0.060 -1.024±0.025 -1.290±0.020
year     9.450±NA    8.780±NA    -3.392±NA    -3.589±NA
"""

# Table 2: test accuracy in per cent, plain, with D, with B, with both. K-FAC with weight decay is in the text only.
_TABLE_2 = """
SGD         81.79 88.35 85.75 91.39
K-FAC       82.39 88.89 86.86 92.13
K-FAC+WD    83.51 N/A   N/A   N/A
BBB         82.82 88.31 N/A   N/A
noisy-Adam  82.68 88.23 N/A   N/A
noisy-K-FAC 85.52 89.35 88.22 92.01
"""

# Table 3: correlation with HMC of PBP, NNG-FFG, NNG-MVG and NNG-BlkTri.
_TABLE_3 = """
boston   0.761±0.032 0.718±0.035 0.891±0.021 0.889±0.024
concrete 0.817±0.028 0.811±0.028 0.913±0.010 0.922±0.006
energy   0.471±0.076 0.438±0.075 0.617±0.087 0.646±0.088
kin8nm   0.587±0.021 0.659±0.015 0.731±0.021 0.759±0.023
naval    0.270±0.098 0.321±0.087 0.596±0.073 0.598±0.070
power    0.509±0.068 0.618±0.050 0.829±0.020 0.853±0.020
wine     0.883±0.042 0.918±0.014 0.957±0.009 0.964±0.006
yacht    0.620±0.053 0.597±0.063 0.717±0.072 0.727±0.070
"""

# Table 4: test RMSE of PBP, NNG-FFG, NNG-MVG and HMC, each after random acquisitions and after active ones.
_TABLE_4 = """
boston    6.716±0.500  5.480±0.175  5.911±0.250  5.435±0.132  5.831±0.177  5.220±0.132  5.750±0.222  5.156±0.150
concrete 12.417±0.392 11.894±0.254 12.583±0.168 12.563±0.142 12.301±0.203 11.671±0.175 10.564±0.198 11.484±0.191
energy    3.743±0.121  3.399±0.064  4.011±0.087  3.761±0.068  3.635±0.084  3.211±0.076  3.264±0.067  3.118±0.062
kin8nm    0.259±0.006  0.254±0.005  0.246±0.004  0.252±0.003  0.243±0.003  0.244±0.003  0.226±0.004  0.223±0.003
naval     0.015±0.000  0.016±0.000  0.013±0.000  0.013±0.000  0.010±0.000  0.009±0.000  0.013±0.000  0.012±0.000
power     5.312±0.108  5.068±0.082  5.812±0.119  5.423±0.111  5.377±0.133  4.974±0.078  5.229±0.097  4.800±0.074
wine      0.945±0.044  0.809±0.011  0.730±0.011  0.748±0.008  0.752±0.014  0.746±0.009  0.740±0.011  0.749±0.010
yacht     5.388±0.339  4.508±0.158  7.381±0.309  6.583±0.264  7.192±0.280  6.371±0.204  4.644±0.237  3.211±0.120
"""


@dataclass(frozen=True)
class Quoted(Estimate):
    """A figure of the paper, which is shown as printed: 0.000 ± 0.000 even where we reckon with ±0.0005."""

    printed: str

    def text(self, digits: int | None = None) -> str:
        """As the paper prints it, whatever decimals are asked for."""
        return self.printed.replace("±", " ± ").replace("-", "\N{MINUS SIGN}")


def _quoted(printed: str) -> Quoted:
    mean, _, error = printed.partition("±")
    return Quoted(float(mean), None if error in ("", "NA") else float(error) or _ROUNDED_TO_NOTHING, printed)


def _read(table: str, columns: Iterable[tuple[str, Metric]]) -> Iterator[tuple[str, str, Metric, str]]:
    """Every printed figure with its row, and the name and metric of its column."""
    columns = list(columns)
    for line in table.strip().splitlines():
        row, *printed = line.split()
        for (name, metric), figure in zip(columns, printed, strict=True):
            if figure != "N/A":
                yield row, name, metric, figure


_QUOTED: dict[tuple[str, str], dict[str, Quoted]] = {}
_MEASURES = (RMSE, LOG_LIKELIHOOD)
for _row, _name, _metric, _figure in (
    *_read(_TABLE_1, ((method, metric) for metric in _MEASURES for method in TABLE_1_METHODS)),
    *_read(_SUPPLEMENT, ((method, metric) for metric in _MEASURES for method in SUPPLEMENT_METHODS)),
    *_read(_TABLE_3, ((method, CORRELATION) for method in TABLE_3_METHODS)),
    *_read(_TABLE_4, ((method, metric) for method in TABLE_4_METHODS for metric in (RMSE_RANDOM, RMSE_ACTIVE))),
):
    _turbine = _row == "naval" and _name in _OWN_NAVAL and _metric in _MEASURES
    _QUOTED.setdefault((_name, "naval-turbine" if _turbine else _row), {})[_metric.key] = _quoted(_figure)
for _row, _name, _metric, _figure in _read(_TABLE_2, ((name, ACCURACY) for name in CONFIGURATIONS)):
    _QUOTED[full_name(_row, _name), TABLE_2_DATA] = {_metric.key: _quoted(_figure)}


def quoted(method: str, data: str) -> Mapping[str, Quoted]:
    """What the paper prints for a method on a data set, by metric; empty where it prints nothing."""
    return _QUOTED.get((method, data), {})


def rows_of(methods: tuple[str, ...]) -> tuple[str, ...]:
    """The data sets for which the paper has a test RMSE of one of these methods in Table 1 or its supplement."""
    return tuple(data for data in DATA if any(RMSE.key in quoted(method, data) for method in methods))


def replicates_of(data: str) -> int:
    """How often the paper repeats a data set: 20 splits, 5 of protein, one of year."""
    return _REPLICATES.get(data, 20)
