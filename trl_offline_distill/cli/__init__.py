"""Command line: `trl-offline-distill COMMAND`. Thin commands over the package, one module each."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


# Command -> what it does; `cli/<command>_command.py` does it.
COMMANDS = {
    "demo": "the whole story on a laptop: cache a small teacher, heal a student, compare",
    "build": "run the teacher once over a text dataset and store its top-K",
    "train": "train a student on a cached dataset (through `accelerate launch`)",
    "inspect": "what a cached dataset holds: teacher, tokens, bytes, captured mass",
    "estimate": "memory, disk and time of a run, from a model's configuration alone",
    "recipes": "list, show, copy or run the shipped recipes",
    "drop-layers": "make a student by dropping layers of a model",
    "import": "turn another tool's cached teacher into this format",
    "export": "write a cached dataset with typed columns, for people and other tools",
    "plot": "draw a run's curves to a PNG",
}
# Whose errors are about what was asked of them.
_CLIENTS = ("huggingface_hub", "httpx", "httpx2", "httpcore", "requests", "safetensors")
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}")


def main(argv: list[str] | None = None) -> int:
    """
    Runs one command.

    Returns:
        `int`: 0 when it succeeded, 1 when the run failed, 2 when the command line or a file it names is wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from .. import __version__

        print(f"trl-offline-distill {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        print(f"error: unknown command {command!r}{nearest(command, COMMANDS)}\n\n{_help()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{command.replace('-', '_')}_command", __name__)
    if os.environ.get("TRL_OFFLINE_DISTILL_TRACEBACK"):
        return module.run(rest) or 0
    try:
        return module.run(rest) or 0
    except BrokenPipeError:
        # The reader of our output has seen enough (`| head`); what is left to flush at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return report(error)


class UsageError(Exception):
    """The command line, or a file it names, is wrong."""


def report(error: Exception) -> int:
    """
    Prints an error that a user can do something about.

    Returns:
        `int`: The exit code, 2 for a [`UsageError`], else 1.

    Raises:
        Exception: `error` itself, if it is a bug.
    """
    if isinstance(error, UsageError):
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    package = type(error).__module__.partition(".")[0]
    if not isinstance(error, (ValueError, OSError, RuntimeError, ImportError)) and package not in _CLIENTS:
        raise error
    print(f"error: {redact(_describe(error))}", file=sys.stderr)
    print("(TRL_OFFLINE_DISTILL_TRACEBACK=1 shows where)", file=sys.stderr)
    return 1


@contextlib.contextmanager
def reading(argument: str, value: str, hint: str = "") -> Iterator[None]:
    """
    Names `argument` and its `value`, a model or dataset by folder or Hub name, in whatever reading it raises.

    Args:
        argument (`str`): Name of the option.
        value (`str`): What it says.
        hint (`str`, *optional*): A last sentence.

    Raises:
        UsageError: at once for a path that does not exist, else for what the Hub or a loader says of `value`.
    """
    hint = f" {hint}" if hint else ""
    looks_like_a_path = value.startswith((".", "/", "~")) or value.count("/") > 1
    if looks_like_a_path and not Path(value).exists():
        raise UsageError(f"`{argument}={value}`: there is no such folder or file. Give one, or a Hub name.{hint}")
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, (ValueError, OSError)) and package not in _CLIENTS:
            raise
        here = "" if Path(value).exists() else " It is no folder here, so it was looked for on the Hub."
        raise UsageError(f"`{argument}={value}` cannot be read.{here}{hint} {_describe(error)}") from error


def check_output(argument: str, value: str | None) -> None:
    """
    Refuses a place that cannot be written, before any work is done.

    Raises:
        UsageError: names the argument, the value, the reason and the fix.
    """
    if value is None:
        return
    place = Path(value)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        raise UsageError(f"`{argument}={value}`: {place} cannot be written to. Choose another place.")
    if not place.is_dir() and place != Path(value):
        raise UsageError(f"`{argument}={value}`: {place} is a file, not a folder. Choose another place.")


def check_new_folder(argument: str, value: str, overwrite: bool) -> None:
    """
    Refuses a folder that holds something already, unless `overwrite` says that it may go.

    Raises:
        UsageError: names the argument, the value and the fix.
    """
    check_output(argument, value)
    if Path(value).is_file():
        raise UsageError(f"`{argument}={value}` is a file. Name a folder.")
    if not overwrite and Path(value).is_dir() and any(Path(value).iterdir()):
        raise UsageError(f"`{argument}={value}` is not empty: name another folder, or pass `--overwrite`.")


def nearest(word: str, words) -> str:
    """`": did you mean ...?"`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def redact(text: str) -> str:
    """`text` without Hub tokens: those of the environment, and whatever looks like one."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        value = os.environ.get(name)
        if value:
            text = text.replace(value, "<hidden>")
    return _SECRET.sub("<hidden>", text)


def _describe(error: Exception) -> str:
    """The message, and what to do about the failures that a message from below does not explain."""
    import errno

    message = str(error) or type(error).__name__
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in message:
        known = "Free some space" in message
        return message if known else f"{message}. The disk is full: free some space, or write to another disk."
    if kinds & {"LocalTokenNotFoundError"}:
        return f"{message} Log in with `hf auth login`, or set HF_TOKEN."
    if kinds & {"GatedRepoError", "RepositoryNotFoundError"}:
        return (
            f"{message}\nCheck the name. If the repository is private or gated: `hf auth login`, and ask for access."
        )
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}:
        return f"{message}\nThe Hub cannot be reached: check the network, or give a local path instead of a Hub name."
    return message


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trl-offline-distill COMMAND [options]",
            "",
            "Offline top-K distillation: cache the teacher once, train students at the price of fine-tuning.",
            "",
            *lines,
            "",
            "trl-offline-distill COMMAND --help lists a command's options, which are named like the Python arguments.",
            "They may stand in a YAML file, --config FILE; build, train and drop-layers take --recipe NAME as well.",
            "-V, --version prints the version.",
        ]
    )
