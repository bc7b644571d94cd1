"""Options from the command line and from YAML, by TRL's own parser, with errors that name the nearest valid one."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import UsageError, nearest


if TYPE_CHECKING:
    from trl import TrlParser


def make_parser(dataclass_types: Iterable[type], command: str, description: str) -> "TrlParser":
    """TRL's parser of these dataclasses."""
    from trl import TrlParser

    return TrlParser(
        list(dataclass_types),
        prog=f"trl-offline-distill {command}",
        usage=f"trl-offline-distill {command} [--config FILE.yaml | --recipe NAME] [--option value ...]",
        description=description,
        allow_abbrev=False,
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
    options = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    known = {name.replace("-", "_") for name in options} | set(extra) | {"config"}
    for word in argv:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and name not in known:
            raise UsageError(f"unknown option `{word}`{nearest(name, known)}")
    if "--config" in argv:
        _check_keys(argv[argv.index("--config") + 1], known - {"config"} | {"env"})
    *parsed, from_config, from_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
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
    unknown = [str(key) for key in config if key not in known]
    if unknown:
        raise UsageError(
            f"unknown key{'s' * (len(unknown) > 1)} in {path}: "
            + "; ".join(f"`{key}`{nearest(key, known)}" for key in unknown)
        )


def help_text(parser: "TrlParser", groups: dict[str, Iterable[str]], rest: str | None = None) -> str:
    """
    Help that reads from the important to the rest.

    Args:
        parser (`TrlParser`): Its options.
        groups (`dict[str, Iterable[str]]`): Title -> option names, in the order to show.
        rest (`str`, *optional*): Title of all other options; `None` leaves them out.
    """
    # `--no_X` has the name of the `--X` it turns off, and a default of its own.
    actions = {
        action.dest: action
        for action in parser._actions
        if action.dest != "help" and not any(option.startswith("--no_") for option in action.option_strings)
    }
    shown, listed = {}, set()
    for title, names in groups.items():
        shown[title] = [actions[name] for name in names if name in actions and name not in listed]
        listed |= {action.dest for action in shown[title]}
    if rest is not None:
        shown[rest] = [action for name, action in actions.items() if name not in listed]
    width = min(shutil.get_terminal_size().columns, 119)
    lines = [f"usage: {parser.usage}", "", *textwrap.wrap(parser.description, width)]
    for title, group in shown.items():
        lines += ["", f"{title}:"]
        for action in group:
            default = "" if action.default in (None, [], "") or not action.option_strings else f" [{action.default}]"
            required = " (required)" if action.required else ""
            choices = f" ({', '.join(map(str, action.choices))})" if action.choices and len(action.choices) < 8 else ""
            text = " ".join((action.help or "").replace("%%", "%").split()) + choices + default + required
            head = f"  --{action.dest}"
            column = 30
            if len(head) > column - 2:
                lines.append(head)
                head = ""
            lines += textwrap.wrap(
                text, width, initial_indent=head.ljust(column), subsequent_indent=" " * column, break_long_words=False
            ) or [head]
    return "\n".join(lines)


def field_names(dataclass_type: type, without: type | None = None) -> list[str]:
    """Names of a dataclass's options, less those of another one."""
    inherited = {item.name for item in dataclasses.fields(without)} if without else set()
    return [item.name for item in dataclasses.fields(dataclass_type) if item.init and item.name not in inherited]
