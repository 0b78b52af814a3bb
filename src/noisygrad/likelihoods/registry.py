"""The likelihoods that a posterior's file can name."""

from __future__ import annotations

import inspect
import json
from typing import TypeVar

from noisygrad.likelihoods.base import Likelihood

Kind = TypeVar("Kind", bound=type[Likelihood])

_BY_NAME: dict[str, type[Likelihood]] = {}


def register_likelihood(kind: Kind) -> Kind:
    """Let posteriors with a likelihood of one's own be saved and loaded; also as a decorator, `@register_likelihood`.

    A file names the likelihood by its class's name and holds its `config()`, so a program that loads the file has to
    register the same class first.

    Raises:
        TypeError: `kind` is no subclass of `Likelihood`, leaves out a method that every likelihood has, or has
            constructor arguments without a `config()`.
        ValueError: another likelihood has that name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Likelihood)):
        raise TypeError(
            f"register_likelihood: expected a subclass of noisygrad.Likelihood; got {kind!r}. Give the class itself."
        )
    name = kind.__name__
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise TypeError(f"register_likelihood: {name} has no {missing}. Define what is missing in the class.")
    if kind.config is Likelihood.config and (arguments := _constructor_arguments(kind)):
        raise TypeError(
            f"register_likelihood: {name} takes {', '.join(arguments)}, which its config() leaves out, so a file "
            "would lose them. Define config() to return the constructor's arguments as a dict of numbers or strings"
        )
    if name in _BY_NAME and not _defined_again(kind, _BY_NAME[name]):
        raise ValueError(
            f"register_likelihood: a likelihood called {name!r} is registered already, and a file names it by that. "
            "Register each class once, and give another one another name"
        )
    _BY_NAME[name] = kind
    return kind


class UnknownLikelihoodError(ValueError):
    """No registered likelihood has that name."""


def by_name(name: str) -> type[Likelihood]:
    """The likelihood class of that name, e.g. "Gaussian"; raises `UnknownLikelihoodError` with the names there are."""
    if name not in _BY_NAME:
        raise UnknownLikelihoodError(
            f"no likelihood is called {name!r}; there are {', '.join(_BY_NAME)}. If it is one of your own, register "
            f"its class first: noisygrad.register_likelihood({name})"
        )
    return _BY_NAME[name]


def check_saveable(likelihood: Likelihood) -> None:
    """Raise ValueError where a file could not give this likelihood back."""
    kind, config = type(likelihood), likelihood.config()
    name = kind.__name__
    registered = by_name(name)
    if registered is not kind and not _defined_again(registered, kind):
        raise ValueError(
            f"the likelihood is of a class {name!r} that is not the registered one of that name. Register it under "
            "another name: a file would be read with the other class"
        )
    usual = getattr(kind.from_config, "__func__", None) is Likelihood.from_config.__func__  # type: ignore[attr-defined]
    if lost := [name for name in _constructor_arguments(kind) if usual and name not in config]:
        raise ValueError(f"{name}: config() leaves out {', '.join(lost)}, which a file would lose. Add them to it")
    advice = "It has to return the constructor's arguments, as numbers, strings, lists and dicts"
    try:
        stored = json.loads(json.dumps(config))
        again = kind.from_config(stored).config()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: config() gives {config!r}, which cannot be saved and read ({error}). {advice}"
        ) from error
    if json.loads(json.dumps(again)) != stored:
        raise ValueError(f"{name}: config() gives {config!r}, but after from_config it gives {again!r}. {advice}")


def _constructor_arguments(kind: type[Likelihood]) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _defined_again(kind: type, before: type) -> bool:
    """Whether this is the same class from a cell of a notebook that was run again."""
    same = kind.__qualname__ == before.__qualname__ and kind.__module__ == before.__module__ == "__main__"
    return same and kind is not before
