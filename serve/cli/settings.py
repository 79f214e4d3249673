"""Where an option's value comes from: the command line, the environment, a file, its default."""

import argparse
import difflib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from serve.cli.errors import UsageError
from serve.cli.flags import Flag
from serve.sglang_flags import refusal

ENVIRONMENT_PREFIX = "QWEN_HYBRID_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")

CONFIG_FLAG = Flag(
    name="config",
    metavar="FILE",
    help="YAML file of option names and values; the environment and the command line come first",
)


def merge(
    given: argparse.Namespace,
    flags: Iterable[Flag],
    *,
    environment: Mapping[str, str],
    known: Iterable[str],
) -> argparse.Namespace:
    """Return the value of every option of a command.

    Args:
      given: what the command line says, options that it does not name left out.
      flags: the command's options.
      environment: variables are `QWEN_HYBRID_` and an option's name in capitals.
      known: option names of all commands, which share one file.

    Raises:
      UsageError: a name or value that there is not, with where it stands.
    """
    flags, known = list(flags), set(known)
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    from_environment = _values(variables, flags, known, where="the environment")
    path = getattr(given, "config", None) or from_environment.get("config")
    from_file = _values(_read(path), flags, known, where=str(path)) if path else {}
    defaults = {flag.name: flag.default for flag in flags}
    return argparse.Namespace(**{**defaults, **from_file, **from_environment, **vars(given)})


def _read(path: str) -> dict[str, Any]:
    """Return the options in a YAML file, by name."""
    try:
        content = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold names and values, got {type(content).__name__}")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    if "config" in options:
        raise UsageError(f"{path}: config cannot name another file")
    return options


def _values(
    options: Mapping[str, Any], flags: list[Flag], known: set[str], *, where: str
) -> dict[str, Any]:
    """Return those options that are the command's, read and checked."""
    by_name = {flag.name: flag for flag in flags}
    for alias, name in [(a, flag.name) for flag in flags for a in flag.aliases]:
        by_name[alias.lstrip("-").replace("-", "_")] = by_name[name]
    values = {}
    for name, value in options.items():
        if name in by_name:
            flag = by_name[name]
            if value is not None:
                values[flag.name] = _value(flag, value, where=f"{where}: {name}")
        elif name not in known:
            if problem := refusal(name, spelling=name):
                raise UsageError(f"{where}: {problem}")
            guess = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {guess[0]!r}?" if guess else ""
            raise UsageError(f"{where}: unknown option {name!r}{hint}")
    return values


def _value(flag: Flag, value: Any, *, where: str) -> Any:
    """Return an option's value as the command line would have read it."""
    if not flag.is_list:
        return _single(flag, value, where=where)
    if isinstance(value, str) and value.startswith("["):
        # The environment has no lists of its own.
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"{where}: not a JSON list: {value!r}") from error
    return [_single(flag, item, where=where) for item in _listed(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _single(flag: Flag, value: Any, *, where: str) -> Any:
    """Return one value, read and checked."""
    if flag.read is bool:
        is_on = _switch(value, where=where)
        if flag.choices and not is_on:
            raise UsageError(f"{where}: can only be true: {flag.help}")
        return is_on
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, bool | list) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: invalid value {value!r}")
    try:
        return flag.parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{where}: {error}") from error


def _switch(value: Any, *, where: str) -> bool:
    """Return a truth value."""
    text = str(value).lower()
    if text not in (*TRUE, *FALSE):
        raise UsageError(f"{where}: must be true or false, got {value!r}")
    return text in TRUE
