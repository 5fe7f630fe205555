"""Imports run one way (see "Where things are" in the README): a folder sees only the folders listed here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAF = {"config", "axes"}
SEES = {
    "config": set(),
    "axes": set(),
    "allocator": set(),
    "command": LEAF,
    "kernels": LEAF,
    "model": LEAF | {"kernels"},
    "optim": LEAF | {"kernels"},
    "parallel": LEAF | {"kernels", "model", "optim"},
    "data": LEAF,
    "scaling": LEAF | {"kernels"},
    "infer": LEAF | {"kernels", "model", "data"},
    "train": LEAF | {"allocator", "kernels", "model", "optim", "parallel", "data", "scaling", "command"},
    "plan": LEAF | {"command", "kernels", "model", "optim", "parallel", "scaling"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            if parts[0] == "k2jax" and len(parts) > 1:
                yield parts[1]
            elif parts[0] in ("experiments", "configs"):
                yield parts[0]


@pytest.mark.parametrize("path", sorted((ROOT / "k2jax").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    room = path.relative_to(ROOT / "k2jax").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    foreign = set(imported(path)) - SEES[room] - {room}
    assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}; {room} may see {sorted(SEES[room])}"


def test_import_of_the_package_is_fast():
    import subprocess
    import sys
    import time

    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import k2jax, k2jax.config"], check=True)
    assert time.perf_counter() - start < 2
