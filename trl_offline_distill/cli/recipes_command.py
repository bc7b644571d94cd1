"""`trl-offline-distill recipes list|show|copy|run`."""

import shutil
from pathlib import Path

from . import UsageError, nearest
from .recipe_run import STEPS, run_recipe, run_tiny_recipe


USAGE = """usage: trl-offline-distill recipes list
       trl-offline-distill recipes show NAME          print its files
       trl-offline-distill recipes copy NAME [FOLDER] copy them, to be changed
       trl-offline-distill recipes run NAME           run all its steps
       trl-offline-distill recipes run NAME --tiny    the same on a random tiny model of the family, on any CPU

Use one as it is: trl-offline-distill build --recipe NAME, then train --recipe NAME; options given beside it win."""


def run(argv: list[str]) -> int:
    from ..recipes import find_recipe, list_recipes

    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    action, *rest = argv
    if action == "list" and not rest:
        names = list_recipes()
        width = max(map(len, names))
        for name, title in names.items():
            print(f"{name:<{width}}  {title}")
    elif action == "show" and len(rest) == 1:
        for file in sorted(find_recipe(rest[0], "train.yaml").parent.glob("*.*")):
            print(f"--- {file.name}\n{file.read_text(encoding='utf-8').rstrip()}\n")
    elif action == "copy" and len(rest) in (1, 2):
        target = Path(rest[1] if rest[1:] else rest[0])
        if target.exists():
            raise UsageError(f"`{target}` exists: name another folder.")
        shutil.copytree(find_recipe(rest[0], "train.yaml").parent, target)
        print(f"Copied to {target}. What each file needs before it stands in its first lines; then, in this order:")
        for step in STEPS:
            if (target / f"{step}.yaml").is_file():
                print(f"trl-offline-distill {step.replace('_', '-')} --config {target / f'{step}.yaml'}")
    elif action == "run" and len([word for word in rest if word != "--tiny"]) == 1:
        (name,) = [word for word in rest if word != "--tiny"]
        if "--tiny" in rest:
            kl = run_tiny_recipe(name)
            print(f"{name}, tiny: KL to the teacher {kl['before']:.3f} before, {kl['after']:.3f} after training")
        else:
            run_recipe(name)
    else:
        unknown = next((word for word in argv if word.startswith("-") and word != "--tiny"), action)
        raise UsageError(
            f"`recipes {' '.join(argv)}` is not understood"
            f"{nearest(unknown, ('list', 'show', 'copy', 'run', '--tiny'))}\n{USAGE}"
        )
    return 0
