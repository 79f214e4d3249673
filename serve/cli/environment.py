"""Defaults that come from the process's environment."""

import pathlib
from collections.abc import Mapping


def default_compilation_cache(environment: Mapping[str, str]) -> str:
    """Return where programs are kept if no flag says so: where JAX is told to, else a cache."""
    if environment.get("JAX_COMPILATION_CACHE_DIR"):
        return "auto"
    return str(compilation_cache_dir(environment))


def compilation_cache_dir(environment: Mapping[str, str]) -> pathlib.Path:
    """Return where compiled programs are kept between runs, by the XDG convention."""
    root = environment.get("XDG_CACHE_HOME", "")
    # The convention has relative paths ignored.
    base = pathlib.Path(root) if pathlib.PurePath(root).is_absolute() else _home_cache(environment)
    return base / "qwen-hybrid" / "compiled"


def _home_cache(environment: Mapping[str, str]) -> pathlib.Path:
    """Return the cache folder of the user's home."""
    home = environment.get("HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home()) / ".cache"
