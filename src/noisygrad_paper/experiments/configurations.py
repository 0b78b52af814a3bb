"""Names of classification runs: a method, the configuration of Table 2 it ran in, and what else was changed."""

CONFIGURATIONS: dict[str, str] = {
    "plain": "no augmentation, no batch norm",
    "D": "with augmentation",
    "B": "with batch norm",
    "D+B": "with augmentation and batch norm",
}
"""The columns of Table 2, with what they mean."""

PLAIN = "plain"
LEARNED_NORM = "learned-norm"
"""Suffix of a method whose batch norm has learned scales and shifts."""
BF16 = "bf16"
"""Suffix of a method whose network computes in bfloat16."""


def has(configuration: str, letter: str) -> bool:
    """Whether a configuration has augmented data ("D") or batch norm ("B")."""
    return letter in configuration.split("+")


def parts(name: str) -> tuple[str, str]:
    """Method and configuration; ("noisy-K-FAC/learned-norm", "B") of "noisy-K-FAC/B/learned-norm"."""
    method, *suffixes = name.split("/")
    if suffixes and suffixes[0] != PLAIN and suffixes[0] in CONFIGURATIONS:
        return "/".join((method, *suffixes[1:])), suffixes[0]
    return name, PLAIN


def heading(configuration: str) -> str:
    """With what it means, such as "B: with batch norm"."""
    return f"{configuration[:1].upper()}{configuration[1:]}: {CONFIGURATIONS[configuration]}"


def full_name(method: str, configuration: str) -> str:
    """The name that `parts` takes apart."""
    base, *suffixes = method.split("/")
    return "/".join((base, *([] if configuration == PLAIN else [configuration]), *suffixes))
