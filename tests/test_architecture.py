"""The structure holds: imports go down, modules stay small, heavy and impure things stay at their edges."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("compute", "resources", "assets", "pipelines", "megloom")  # from the ground up
COMPUTE = (  # from the ground up; a package may import those before it, and itself
    "closed",
    "policy",
    "workload",
    "importing",
    "graph",
    "algorithms",
    "scheduling",
    "store",
    "state",
    "cluster",
    "engines",
    "trainers",
    "rewards",
    "rollout",
    "gateway",
    "conductor",
    "simulation",
    "report",
)
HEAVY = {"torch", "numba", "llvmlite", "sglang", "deepspeed", "ray", "transformers"}
HEAVY_ALLOWED = {"engines", "trainers", "cluster"}
MAX_LINES = 400
PURE = ("graph", "algorithms", "scheduling", "conductor")
# The edges of the conductor's process touch the world: its clock, its sockets, its tokens.
EDGES = {"conductor/client.py", "conductor/service.py", "conductor/local_backend.py"}
# The report is drawn from records; it stands on top because nothing but the CLI and assets need it.

MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_fits_on_its_screens_and_says_what_it_owns(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, f"{name_of(path)}: split it by idea"
    assert ast.get_docstring(ast.parse(text)), f"{name_of(path)}: needs a module docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_only_go_down(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    for name, line in imports(path):
        parts = name.split(".")
        if parts[0] == "dagster":
            assert folder != "compute", f"{name_of(path)}:{line}: compute never imports Dagster"
        if parts[0] != "megloom" or len(parts) == 1:
            continue
        target = parts[1] if parts[1] in FOLDERS else "megloom"
        assert target in allowed, f"{name_of(path)}:{line}: {folder} must not import {name}"
        if folder == target == "compute" and len(parts) > 2:
            own = path.relative_to(ROOT).parts[1].removesuffix(".py")
            if own != "__init__":
                below = COMPUTE[: COMPUTE.index(own) + 1]
                assert parts[2] in below, f"{name_of(path)}:{line}: {own} must not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_packages_are_imported_only_where_they_belong(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "compute" and len(parts) > 2 and parts[1] in HEAVY_ALLOWED:
        return
    for name, line in imports(path, top_level_only=True):
        assert name.split(".")[0] not in HEAVY, f"{name_of(path)}:{line}: imports {name} at module level"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_pure_parts_take_time_and_randomness_from_outside(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    if parts[0] != "compute" or parts[1] not in PURE or "/".join(parts[1:]) in EDGES:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        where = f"{name_of(path)}:{node.lineno}"
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        assert owner != "time", f"{where}: takes the time itself"
        assert node.attr not in {"now", "utcnow", "uuid4"} or owner not in {"datetime", "uuid"}, where
        assert not (owner == "random" and node.attr != "Random"), f"{where}: draws from the global generator"
        assert not (owner == "asyncio" and node.attr == "to_thread"), f"{where}: use the injected Offload"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    text = path.read_text()
    assert "pickle.load" not in text and "torch.load(" not in text, (
        f"{name_of(path)}: safetensors or JSON only"
    )


def run_python(code: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_definitions_load_without_torch_and_without_bare_names() -> None:
    run_python(
        """
import sys
import megloom.pipelines.definitions
bare = {"assets", "resources", "compute", "pipelines"} & set(sys.modules)
assert not bare, bare
assert not {"torch", "numba"} & set(sys.modules)
""",
        ROOT,
    )


def test_the_conductors_modules_load_without_torch_or_dagster(tmp_path: Path) -> None:
    run_python(
        """
import sys
import megloom.compute.conductor.service
heavy = {"torch", "numba", "transformers", "dagster", "sglang", "deepspeed", "ray"} & set(sys.modules)
assert not heavy, heavy
""",
        tmp_path,
    )


def test_the_cli_answers_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    run_python(
        """
import sys
from megloom.cli import main
try:
    main(["train", "arithmetic_tea", "--steps", "1", "--run", "x"])
except SystemExit:
    pass
heavy = {"torch", "numba", "transformers", "dagster", "duckdb", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
""",
        tmp_path,
    )


def test_every_package_is_in_the_distribution() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for path in MODULES:
        if path.name == "__init__.py":
            dotted = ".".join(path.relative_to(ROOT).parent.parts)
            found.add(dotted if dotted.startswith("megloom") else f"megloom.{dotted}")
    assert found == listed


def test_the_checkouts_dagster_settings_are_those_that_ship() -> None:
    assert (ROOT / "dagster.yaml").read_text() == (ROOT / "megloom" / "dagster.yaml").read_text()
