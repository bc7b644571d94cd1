"""The recipes shipped with the package: folders of `build.yaml` and `train.yaml`."""

from pathlib import Path


def recipes_folder() -> Path:
    """Where the recipes lie: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parent
    checkout = package.parent / "recipes"
    return checkout if checkout.is_dir() and (package.parent / "pyproject.toml").is_file() else package / "_recipes"


def list_recipes() -> dict[str, str]:
    """Name of each recipe -> its first comment line."""
    found = {}
    for folder in sorted(recipes_folder().iterdir()):
        if folder.is_dir() and list(folder.glob("*.yaml")):
            first = (folder / "train.yaml").read_text(encoding="utf-8").splitlines()[0]
            found[folder.name] = first.lstrip("# ").rstrip()
    return found


def find_recipe(name: str, file: str) -> Path:
    """
    A recipe's file.

    Raises:
        ValueError: There is no such recipe, or it has no such file; what there is, is named.
    """
    import difflib

    names = list(list_recipes())
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`recipe={name!r}` is not shipped; these are: {', '.join(names)}.{hint}")
    path = recipes_folder() / name / file
    if not path.is_file():
        files = ", ".join(sorted(item.name for item in path.parent.glob("*.yaml")))
        raise ValueError(f"The recipe {name!r} has no {file}; it has {files}.")
    return path
