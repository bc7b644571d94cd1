"""Options from the command line and from YAML, through TRL's own parser, with errors that name the nearest valid key."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import UsageError, nearest


if TYPE_CHECKING:
    from trl import TrlParser


def make_parser(dataclass_types: Iterable[type], command: str, description: str) -> "TrlParser":
    """TRL's parser of these dataclasses, with `--config` and `--recipe` in its help."""
    from trl import TrlParser

    return TrlParser(
        list(dataclass_types),
        prog=f"trl-offline-distill {command}",
        description=description,
        epilog="Also: --config FILE.yaml (the same options as keys; the command line wins) or --recipe NAME "
        "(a shipped one: `trl-offline-distill recipes list`).",
    )


def parse(parser: "TrlParser", argv: list[str], extra: Iterable[str] = ()) -> tuple:
    """
    Dataclasses filled from `--config` and the command line.

    Args:
        parser (`TrlParser`): Made by [`make_parser`].
        argv (`list[str]`): What follows the command, [`expand`]ed.
        extra (`Iterable[str]`): Names that another program reads, without their dashes.

    Returns:
        `tuple`: The dataclasses, then the options of `extra` as a list of strings.

    Raises:
        UsageError: An option or a key is unknown, or the file cannot be read.
    """
    known = {action.dest for action in parser._actions} | set(extra)
    if "--config" in argv:
        _check_keys(argv[argv.index("--config") + 1], known | {"env"})
    try:
        *parsed, from_config, from_line = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    for word in from_line:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known:
            raise UsageError(f"unknown option `{word}`{nearest(name, known - {'help'})}")
    if from_line and not extra:
        raise UsageError(f"what is {from_line[0]!r}? Options start with --; see --help.")
    return *parsed, from_config + from_line


def expand(argv: list[str], recipe_file: str) -> list[str]:
    """`argv` with `--config=FILE` split and `--recipe NAME` turned into the `--config` of that recipe's file."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name in ("--config", "--recipe") else [word]
    for name in ("--config", "--recipe"):
        if words.count(name) > 1 or (name in words and words.index(name) + 1 == len(words)):
            raise UsageError(f"`{name}` takes one value.")
    if "--recipe" in words:
        from ..recipes import find_recipe

        if "--config" in words:
            raise UsageError("`--recipe` and `--config` both name a file: give one.")
        at = words.index("--recipe")
        words[at : at + 2] = ["--config", str(find_recipe(words[at + 1], recipe_file))]
    return words


def _check_keys(path: str, known: set[str]) -> None:
    import yaml

    if not Path(path).is_file():
        raise UsageError(f"`--config {path}`: there is no such file.")
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"`--config {path}` is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"`--config {path}` must hold `key: value` lines.")
    unknown = [key for key in config if key not in known]
    if unknown:
        raise UsageError(
            f"unknown key{'s' * (len(unknown) > 1)} in {path}: "
            + "; ".join(f"`{key}`{nearest(str(key), known - {'help'})}" for key in unknown)
        )
