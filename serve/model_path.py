"""Where a model's files are: a directory, or one of the two models that ship with the package."""

import pathlib
from importlib import resources

PACKAGED_MODELS = ("demo", "demo-dense")
PACKAGED_DRAFTS = ("demo-dspark", "demo-dense-dspark")


def resolve_model_path(model_path: str | pathlib.Path) -> pathlib.Path:
    """Return the directory that `model_path` means.

    Args:
        model_path: `demo` or `demo-dense`, which always mean the packaged models (write `./demo`
            for a folder of that name), or a directory. No other name is looked up anywhere, and
            nothing is downloaded.

    Raises:
        ValueError: it is empty, or no path.
        FileNotFoundError: there is no such directory, or it holds no `config.json`.
        NotADirectoryError: it is a file.
    """
    # An empty Path is the folder it is used in.
    if not isinstance(model_path, (str, pathlib.Path)) or model_path == "":
        raise ValueError(
            f"model_path must be {', '.join(PACKAGED_MODELS)} or a model directory, got "
            f"{model_path!r}"
        )
    if str(model_path) in PACKAGED_MODELS:
        directory = _packaged(str(model_path))
    else:
        directory = pathlib.Path(model_path).expanduser()
        if directory.is_file():
            raise NotADirectoryError(f"{directory} is a file; a model is a directory")
        if not directory.is_dir():
            raise FileNotFoundError(
                f"no model directory {str(model_path)!r}; the only bare names are "
                f"{' and '.join(PACKAGED_MODELS)}, and nothing is downloaded"
            )
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {directory}")
    return directory


def resolve_draft_path(draft_model_path: str | pathlib.Path | None) -> pathlib.Path:
    """Return the directory of a draft model: a packaged one by its name, or a directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    if str(draft_model_path) in PACKAGED_DRAFTS:
        return _packaged(str(draft_model_path))
    directory = pathlib.Path(str(draft_model_path)).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(
            f"no draft model directory {str(draft_model_path)!r}; the only bare names are "
            f"{' and '.join(PACKAGED_DRAFTS)}, and nothing is downloaded"
        )
    return directory


def _packaged(name: str) -> pathlib.Path:
    """Return where the package keeps one of its models."""
    directory = pathlib.Path(str(resources.files("qwen_hybrid"))) / "demos" / name
    if not directory.is_dir():
        raise FileNotFoundError(f"the package came without its model {name!r}: install it again")
    return directory
