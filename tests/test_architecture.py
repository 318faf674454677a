"""The house's rules, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import your_ai
from your_ai.config import FIELDS

PACKAGE = Path(your_ai.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Each line imports only from lines above it, and a package from itself.
LAYERS = [
    ["errors", "rng", "files", "numerics", "text"],
    ["yaml_files", "foreign", "console"],
    ["config", "blocks", "head", "vocabulary", "run.events"],
    ["losses", "dora"],
    ["run.checkpoint", "run.folder", "run.stopping", "run.exits", "run.parent"],
    ["run.requests", "run.child"],
    ["hub", "shapes", "data", "memory"],
    ["model", "objectives", "optimizer", "dashboard", "trackers"],
    ["trained"],
    ["engine", "budget"],
    ["writing"],
    ["quantize"],
    ["generate", "fuse"],
    ["evaluation"],
    ["chat", "export", "serving"],
    ["prepare"],
    ["govern", "saving", "measure", "preview", "pausing"],
    ["calibrate"],
    ["train", "bench"],
    ["tracking", "publish"],
    ["supervisor"],
    ["doctor"],
    ["recommend"],
    ["shelf"],
    ["front", "listing"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
WITHOUT_MLX = [
    *("memory.facts", "memory.estimate", "memory.plan", "memory.limit", "memory.governor"),
    *("memory.calibration", "memory.measurements"),
    *("supervisor", "front", "listing", "tracking", "recommend", "hub.download", "hub.local"),
    "config",
    "cli",
    "data.batches",
    "data.encode",
    "vocabulary",
    "evaluation.record",
    "dashboard.live",
    "publish.after",
    "publish.push",
    "run.events",
]
HEAVY = ["mlx", "mlx_lm", "transformers", "numpy", "yaml", "huggingface_hub"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    return module if module in LAYER_OF else module.split(".")[0]


def imports(tree: ast.AST) -> set[str]:
    """The modules of this package that a source imports, without the package's name."""
    known = {module_name(path) for path in SOURCES}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.split(".")[0] != "your_ai":
                continue
            base = node.module.removeprefix("your_ai").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("your_ai.")
                for alias in node.names
                if alias.name.startswith("your_ai.")
            }
    return found - {""}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_one_way(path):
    module = module_name(path)
    if module in ("", "run"):
        return
    here = room(module)
    for other in imports(parse(path)):
        there = room(other)
        same = here.split(".")[0] == there.split(".")[0]
        assert same or LAYER_OF[there] < LAYER_OF[here], f"{module} imports {other}"


def test_the_dashboard_knows_the_events_alone():
    for path in (PACKAGE / "dashboard").glob("*.py"):
        others = {o for o in imports(parse(path)) if not o.startswith("dashboard")}
        assert others <= {"config", "console", "errors", "files", "run.events", "run", "text"}, (
            path.name
        )


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_module_reads_the_privates_of_another(path):
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            private = [a.name for a in node.names if a.name.startswith("_") and a.name[1] != "_"]
            assert not private, f"{path.name}:{node.lineno} imports {private}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in (
                "self",
                "cls",
                "os",
                "twin",
            )  # a copy in the making
            assert own or node.attr.endswith(("__", "_replace")), (
                f"{path.name}:{node.lineno} reads {node.attr}"
            )


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_class_is_patched(path):
    for node in ast.walk(parse(path)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            assert not (isinstance(target, ast.Attribute) and target.attr == "__call__"), path.name
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            assert "__call__" not in names, path.name


def test_every_setting_is_read_somewhere():
    read = {
        node.attr
        for path in SOURCES
        if module_name(path) != "config"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
    }
    # grad_accumulation is read through rows_per_step
    assert set(FIELDS) - read == {"grad_accumulation"}
    assert "rows_per_step" in read


def test_modules_can_be_read_in_one_sitting():
    lines = {module_name(p): len(p.read_text().splitlines()) for p in SOURCES}
    assert max(lines.values()) <= 600
    assert lines["train"] < 330


@pytest.mark.parametrize("module", WITHOUT_MLX)
def test_what_must_not_load_mlx_does_not(module):
    code = f"import sys, your_ai.{module}; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom your_ai.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        f"sys.exit(','.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
