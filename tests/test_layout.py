"""Who may import whom, and the public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_offline_distill


ROOT = Path(trl_offline_distill.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
EDGE_ONLY = {"deepspeed", "gguf", "matplotlib", "peft", "triton", "vllm"}

# Part of the package -> parts it may import. A prefix ends at a dot or at the name's end.
INTERNAL = {
    "_compat": set(),
    "cache_report": {"teacher_cache"},
    "callbacks": {"_compat"},
    "capture": {"_compat", "capture", "loss.head", "loss.logit_transform", "teacher_cache"},
    "data_collator": {"_compat", "teacher_cache"},
    "estimate": {"teacher_cache"},
    "healing": set(),
    "loss": {"loss"},
    "loss.head": {"_compat", "loss"},
    "offline_distillation_config": {"_compat", "loss.divergences"},
    "teacher_cache": {"_compat", "teacher_cache"},
}
EXTERNAL = {
    "loss": {"torch"},
    "loss.fused_triton": {"torch", "triton"},
    "loss.head": {"deepspeed", "torch", "transformers"},
    "teacher_cache": {"datasets", "fsspec", "huggingface_hub", "numpy", "pyarrow", "torch", "tqdm"},
    "teacher_cache.hub": {"datasets", "huggingface_hub", "matplotlib"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_rule(name: str, rules: dict[str, set[str]]) -> set[str] | None:
    """Rule of the module itself or of the nearest package above it."""
    while name:
        if name in rules:
            return rules[name]
        name = name.rpartition(".")[0]
    return None


def is_within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def imports(path: Path) -> list[tuple[str, bool, bool]]:
    """(absolute dotted name, is inside the package, is executed when the module is imported) of each import."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    package = [part for part in package if part]
    tree = ast.parse(path.read_text())
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in annotations:  # names for type checkers, never imported
            continue
        at_import = id(node) not in deferred
        if isinstance(node, ast.Import):
            found += [(alias.name, False, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + ([node.module] if node.module else [])
            if node.module:
                found.append((".".join(base), True, at_import))
            else:
                found += [(".".join([*base, alias.name]), True, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module, False, at_import))
    prefix = "trl_offline_distill."
    return [(n.removeprefix(prefix), inside or n.startswith(prefix), now) for n, inside, now in found]


def exists_inside(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).with_suffix(".py").exists() or (ROOT / Path(*name.split("."))).is_dir()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_import_direction(path):
    name = module_name(path)
    allowed_inside, allowed_outside = longest_rule(name, INTERNAL), longest_rule(name, EXTERNAL)
    for imported, inside, _ in imports(path):
        if inside:
            if allowed_inside is not None and exists_inside(imported):
                assert is_within(imported, allowed_inside), f"{name} may not import {imported}"
        elif allowed_outside is not None:
            top = imported.split(".")[0]
            assert top in sys.stdlib_module_names or top in allowed_outside, f"{name} may not import {imported}"


def test_the_trainer_knows_no_capture_and_nothing_below_imports_the_cli():
    for path in MODULES:
        name = module_name(path)
        inside = [imported for imported, is_inside, _ in imports(path) if is_inside]
        if name == "offline_distillation_trainer":
            assert not any(is_within(imported, {"capture"}) for imported in inside)
        if not is_within(name, {"cli"}):
            assert not any(is_within(imported, {"cli"}) for imported in inside), f"{name} imports the command line"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_optional_packages_are_imported_only_where_they_are_used(path):
    name = module_name(path)
    for imported, inside, at_import in imports(path):
        top = imported.split(".")[0]
        if not inside and at_import and top in EDGE_ONLY:
            assert (name, top) == ("loss.fused_triton", "triton"), f"{name} imports {top} when it is imported"


def test_every_module_imports_without_optional_packages():
    names = [f"trl_offline_distill.{module_name(p)}".rstrip(".") for p in MODULES]
    names = [n for n in names if not n.endswith((".fused_triton", ".__main__"))]
    code = (
        "import importlib, sys\n"
        # As if not installed, for `import` and for `find_spec` alike
        f"sys.modules.update(dict.fromkeys({sorted(EDGE_ONLY - {'peft'})}))\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)


def test_importing_the_package_is_cheap():
    code = (
        "import sys, trl_offline_distill, trl_offline_distill.cli; "
        "print([m for m in ('torch', 'trl') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_public_names():
    assert trl_offline_distill.__all__ == [
        "DataCollatorForOfflineDistillation",
        "OfflineDistillationConfig",
        "OfflineDistillationTrainer",
        "TeacherTopK",
        "__version__",
        "build_distillation_dataset",
        "decode_topk",
        "drop_layers",
        "encode_topk",
        "fused_distillation_loss",
    ]
    for name in trl_offline_distill.__all__:
        assert getattr(trl_offline_distill, name) is not None
    with pytest.raises(AttributeError, match="public names: DataCollator"):
        trl_offline_distill.teacher_forcing  # noqa: B018


def test_public_classes_extend_the_ones_users_know():
    from trl import SFTConfig, SFTTrainer

    assert issubclass(trl_offline_distill.OfflineDistillationConfig, SFTConfig)
    assert issubclass(trl_offline_distill.OfflineDistillationTrainer, SFTTrainer)


def test_version_is_the_one_of_the_metadata():
    pyproject = ROOT.parent / "pyproject.toml"
    if pyproject.exists():
        assert f'version = "{trl_offline_distill.__version__}"' in pyproject.read_text()
