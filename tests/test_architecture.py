"""The house rules, read off the source: imports run strictly downward, without cycles, and what must not need torch does not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

# Higher may import lower, never the reverse. Of equal rank: neither imports the other.
RANK = {
    "cli": 14, "api": 13, "ray": 13, "simulation": 13,
    "deploy": 12, "router": 12, "server": 11, "frontend": 10, "profiling": 9, "builder": 8,
    "runtime": 8, "models": 7, "engine": 7, "layers": 6, "quant": 5, "kernels": 4, "distributed": 3, "core": 2, "base": 1,
}  # fmt: skip

# Each protocol imports `common` and nothing of the others, except (importer, imported) for the reason given.
PROTOCOL_IMPORTS = {
    ("sagemaker", "openai"): "LMI containers answer OpenAI's chat requests on /invocations",
    ("truss", "openai"): "a Truss forwards OpenAI's requests on its predict route",
}

# What protocols may import of `frontend`: the service, the models by name, and the functions that make token ids of text.
FRONTEND_OF_PROTOCOLS = {f"stoker.frontend.{name}" for name in ("service", "repository", "prompts", "bad_words", "stopwatch")}

TORCH_FREE = (
    "stoker.base", "stoker.frontend", "stoker.server", "stoker.deploy", "stoker.router", "stoker.simulation", "stoker.runtime.request",
    "stoker.runtime.client", "stoker.runtime.expected_devices", "stoker.runtime.weight_prefetch",
    "stoker.runtime.worker_group.follower_process", "stoker.engine.config_file",
    "stoker.runtime.kv", "stoker.runtime.schedule", "stoker.runtime.transport.zmq_mailbox", "stoker.runtime.transport.zmq_client",
)  # fmt: skip
# In those, modules that run an engine in their own process; nothing torch-free imports them at its top.
RUNS_AN_ENGINE = {"stoker.frontend.in_process_engine"}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted((SOURCE / "stoker").rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[tuple[str, bool]]:
    """Every import of a module, those under TYPE_CHECKING and inside functions included; True when it runs on import."""
    tree = ast.parse(MODULES[module].read_text())
    found: set[tuple[str, bool]] = set()

    def walk(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.update((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update((name if name in MODULES else node.module or "", at_import) for name in names)
        for child in ast.iter_child_nodes(node):
            walk(child, at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _for_types_only(node))

    walk(tree, True)
    return frozenset(found)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def stoker_imports(module: str) -> set[str]:
    return {name for name, _ in imports(module) if name in MODULES and name != module}


def area(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_folder_has_a_rank() -> None:
    folders = {path.name for path in (SOURCE / "stoker").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(RANK)


def test_imports_run_downward() -> None:
    wrong = [
        f"{module} ({area(module)}) imports {name} ({area(name)})"
        for module in MODULES
        if area(module) in RANK
        for name in sorted(stoker_imports(module))
        if area(name) in RANK and area(name) != area(module) and RANK[area(name)] >= RANK[area(module)]
    ]
    assert wrong == []


def test_protocols_import_common_code_only() -> None:
    """`server.protocols.NAME` is one protocol; the registry imports all of them."""
    prefix = "stoker.server.protocols."

    def protocol(module: str) -> str:
        return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else ""

    edges = {
        (protocol(module), protocol(name))
        for module in MODULES
        for name in stoker_imports(module)
        if protocol(module) not in ("", "registry") and protocol(name) not in ("", "common", protocol(module))
    }
    assert edges == set(PROTOCOL_IMPORTS)


def test_protocols_render_and_tokenize_through_the_frontend() -> None:
    """Chat templates, tokenizers and truncation are in `frontend`; a protocol calls the functions of `FRONTEND_OF_PROTOCOLS` only."""
    protocols = [module for module in MODULES if module.startswith("stoker.server.protocols.")]
    imported = {name for module in protocols for name in stoker_imports(module)}
    assert {area(name) for name in imported} == {"base", "frontend", "server"}
    assert {name for name in imported if area(name) == "frontend"} == FRONTEND_OF_PROTOCOLS
    libraries = {name.split(".")[0] for module in protocols for name, _ in imports(module)}
    assert not libraries & {"tokenizers", "jinja2", "transformers"}


def test_each_protocol_is_a_package_with_one_row_in_the_registry() -> None:
    folder = SOURCE / "stoker" / "server" / "protocols"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"common"}
    rows = set(re.findall(r'PROTOCOLS\.add\("(\w+)"', (folder / "registry.py").read_text()))
    assert rows == packages


def test_no_module_imports_itself_in_a_circle() -> None:
    """Depth-first over modules; packages count as their __init__ only."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for name in sorted(stoker_imports(module)):
            if name != "stoker":  # the package's own version and lazy LLM; it imports base alone when imported
                visit(name)
        done.add(path.pop())

    for module in MODULES:
        visit(module)


def test_torch_free_modules_import_no_torch_on_the_way() -> None:
    """Followed through everything that runs on import, packages' __init__ included."""

    def reaches(module: str, seen: set[str]) -> list[str]:
        for name, at_import in sorted(imports(module)):
            if not at_import:
                continue
            if name.split(".")[0] in ("torch", "triton", "transformers"):
                return [module, name]
            parents = [".".join(name.split(".")[: i + 1]) for i in range(name.count(".") + 1)]
            for parent in parents:
                if parent in MODULES and parent not in seen:
                    seen.add(parent)
                    if found := reaches(parent, seen):
                        return [module, *found]
        return []

    free = [module for module in MODULES if module.startswith(TORCH_FREE) and module not in RUNS_AN_ENGINE]
    assert len(free) > 50
    assert [" > ".join(found) for module in free if (found := reaches(module, {module}))] == []


def test_a_frontend_process_never_loads_torch() -> None:
    """The same, as Python sees it."""
    code = "import sys, stoker.server.processes.frontend, stoker.runtime.schedule.scheduler; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_only_one_file_reads_the_environment() -> None:
    """base/env.py, and code that is copied out to run elsewhere."""
    readers = [
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert set(readers) == {"stoker.base.env"}


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []
