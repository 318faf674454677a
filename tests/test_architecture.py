"""Rules for the package's code, checked in its source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import your_ai
from your_ai.config import FIELDS

PACKAGE = Path(your_ai.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The modules of a line import only from lines above it and from their own package.
LAYERS = [
    ["errors", "rng", "files", "nets.mlx_types", "memory.sample"],
    ["gates"],
    ["config"],
    ["run"],
    ["hub", "nets.numerics"],
    ["data", "environments"],
    ["memory", "objectives"],
    ["nets"],
    ["dashboard", "trackers", "rewards"],
    ["memory.budget", "engine"],
    ["modelfiles", "publish.card"],
    ["generation"],
    ["soft"],
    ["evaluation"],
    ["export"],
    ["training"],
    ["publish"],
    ["session"],
    ["doctor", "api", "serving"],
    ["studio"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
WITHOUT_MLX = """
    cli config data.batches data.encode data.sources gates.token_ids run.events memory.facts
    memory.estimate memory.plan memory.limit memory.governor memory.costs memory.guess
    memory.corrections memory.estimate_kept memory.step_time doctor.recommend doctor.machine
    doctor.selftest memory.workload memory.mixer_facts hub.registry training.preview
    training.plan_without_files hub.download hub.local evaluation.record dashboard.live
    trackers.upload publish.after_training publish.push session.supervisor session.attach
    session.run_list session.new_run session.room serving.web serving.live_page serving.mcp_gate
    serving.mcp_tools session.tuning rewards.chosen export.transformers_names
    environments.pool studio.server
""".split()
OWN_NAMES = ("self", "cls", "os", "twin")  # twin: a copy of self under construction
HEAVY = "mlx mlx_lm transformers numpy yaml huggingface_hub starlette uvicorn".split()
NO_BEGINNINGS = "as by for how like of what where whether which why".split()


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    return module if module in LAYER_OF else module.split(".")[0]


@cache
def imports(path: Path) -> set[str]:
    """The modules of this package that a source imports, without the package's name."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.split(".")[0] != "your_ai":
                continue
            base = node.module.removeprefix("your_ai").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in MODULES else base)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("your_ai.")
                for alias in node.names
                if alias.name.startswith("your_ai.")
            }
    return found - {""}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a source: every rule walks through them."""
    return list(ast.walk(parse(path)))


MODULES = {module_name(path) for path in SOURCES}


def test_imports_only_go_to_lower_layers():
    for path in SOURCES:
        module = module_name(path)
        if module == "":
            continue
        here = room(module)
        for other in imports(path):
            there = room(other)
            same = here.split(".")[0] == there.split(".")[0]
            assert same or LAYER_OF[there] < LAYER_OF[here], f"{module} imports {other}"


def test_there_are_no_import_cycles():
    graph = {module_name(path): imports(path) for path in SOURCES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_top_of_the_package_has_few_modules():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or is_package(path)}
    assert len(names) <= 32


def is_package(path: Path) -> bool:
    return (path / "__init__.py").exists()


def test_the_dashboard_imports_only_events_and_foundations():
    allowed = {"config", "gates.console", "errors", "files", "run.events", "run", "gates.text"}
    for path in (PACKAGE / "dashboard").glob("*.py"):
        others = {o for o in imports(path) if not o.startswith("dashboard")}
        assert others <= allowed, path.name


def test_no_module_reads_private_names_of_another():
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
                private = [n for n in names if n.startswith("_") and not n.startswith("__")]
                assert not private, f"{path.name}:{node.lineno} imports {private}"
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                own = isinstance(node.value, ast.Name) and node.value.id in OWN_NAMES
                assert own or node.attr.endswith(("__", "_replace", "_make")), (
                    f"{path.name}:{node.lineno} reads {node.attr}"
                )


def test_no_class_is_patched():
    for path, node in ((p, node) for p in SOURCES for node in nodes(p)):
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
        if room(module_name(path)) != "config"
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
    }
    # these are read through rows_per_step, adapter and student_share
    through = {"grad_accumulation", "use_dora", "distill_on", "distill_student_share"}
    assert set(FIELDS) - read == through
    assert "rows_per_step" in read


IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"your_ai.{module}")
    if "mlx" in sys.modules:
        sys.exit(f"{module} loads MLX")
"""


def test_no_listed_module_imports_mlx():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *WITHOUT_MLX],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


LOAD_NONE_OF = """
import importlib, sys
modules, heavy = (argument.split() for argument in sys.argv[1:])
for module in modules:
    importlib.import_module(f"your_ai.{module}")
sys.exit(",".join(name for name in heavy if name in sys.modules) or 0)
"""


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("environments.host", "numpy asyncio psutil rich transformers"),
        ("dashboard.report", "jinja2 numpy transformers"),
        ("evaluation.record trackers.upload", "numpy mlx_lm transformers"),
        ("hub.download hub.local", "huggingface_hub yaml"),
        ("memory.estimate memory.plan serving.live_page", "numpy transformers"),
        ("session.run_list", "mlx_lm transformers numpy yaml huggingface_hub"),
        ("training.process session.supervisor session.attach", "starlette uvicorn"),
    ],
)
def test_modules_of_quick_commands_load_no_heavy_packages(modules, heavy):
    done = subprocess.run(
        [sys.executable, "-c", LOAD_NONE_OF, modules, heavy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_loads_no_heavy_packages():
    code = (
        "import sys\nfrom your_ai.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        f"sys.exit(','.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_class_names_are_unique():
    """Except events, which may be named like the classes they report on."""
    found: dict[str, str] = {}
    for path in SOURCES:
        module = module_name(path)
        if module == "run.events":
            continue
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in found, f"{node.name}: {found[node.name]} and {module}"
                found[node.name] = module


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Except those under attributes, which go on from the attribute's name."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.body[0].lineno} {text.splitlines()[0]}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and re.split(r"\W", text.lower(), maxsplit=1)[0] in NO_BEGINNINGS
    ]
    assert not found, "\n".join(found)
