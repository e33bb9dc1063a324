"""Layers of the package: imports point down, files are small and documented, and transformers is not patched.

Imports are read from syntax trees, including those inside functions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from paths import HELPERS, ROOT

import hf_parallel
from hf_parallel.generation import MODES

SCHEMA = (ROOT / "hf_parallel/engine/server/openai/schema.py").read_text(encoding="utf-8")
REQUEST_FIELDS = set(re.findall(r"^    (\w+): ", SCHEMA, re.MULTILINE))
"""Names that OpenAI's API defines; a mode may have the same."""
WORDS = {"search"}
"""Modes whose name is a word that the rest of the package uses with its own meaning."""
MODE_NAMES = {name for name, mode in MODES.items() if mode.__module__.startswith("hf_parallel.")}
MODE_NAMES -= REQUEST_FIELDS | WORDS
"""Modes of the package, without those of other tests. A look-up of an unknown name would search installed packages."""
PACKAGE = "hf_parallel"

GROUND = {"files", "detokenizer", "lazy", "progress", "registration"}
"""Modules that import no others of the package, and that any other may import."""

LAYERS: dict[str, set[str]] = {
    "kernels": set(),
    "cache": {"kernels"},
    "models": {"kernels", "cache"},
    "transcript": set(),
    "generation": {"kernels", "cache", "models", "transcript"},
    "generation.modes": {"kernels", "cache", "models", "transcript", "generation"},
    "engine": {"kernels", "cache", "models", "transcript", "generation", "generation.modes"},
    "agents": {"kernels", "cache", "models", "transcript", "generation", "generation.modes", "engine"},
}
"""Layers that each layer may import besides itself and the ground; layers that are not listed may import any.

`generation` stands for the files in that folder, without its sub-packages.
"""

OPTIONAL = [
    *("accelerate", "datasets", "evaluate", "fastapi", "flash_attn", "gguf", "hypothesis", "llguidance"),
    *("lm_eval", "math_verify", "matplotlib", "peft", "prometheus_client", "psutil", "pytest", "triton"),
    *("trl", "uvicorn"),
]
"""Packages that the core does not need."""
LOADED_LATE = ("triton", "gguf_reader")
"""Parts of names of modules that are imported on a GPU, or where a GGUF file is read."""


def python_files(folder: Path = ROOT) -> list[Path]:
    """Return all Python files of the repository, without environments and builds."""
    found = sorted(folder.rglob("*.py"))
    skipped = ("build", "dist")
    return [path for path in found if not any(p.startswith(".") or p in skipped for p in path.relative_to(ROOT).parts)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files(ROOT / PACKAGE)}


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, also under TYPE_CHECKING."""
    for node in _import_nodes(syntax_tree(MODULES[name])):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{name}: imports are absolute"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in MODULES else node.module or "" for target in full]
        yield from (target for target in targets if target in MODULES)


def _import_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def layer(name: str) -> str:
    """Return the innermost layer of a module, or the first part of its name inside the package."""
    inside = name.removeprefix(PACKAGE).lstrip(".")
    layers = [layer for layer in LAYERS if inside == layer or inside.startswith(layer + ".")]
    return max(layers, key=len, default=inside.split(".")[0])


def test_all_layers_exist() -> None:
    assert {layer(name) for name in MODULES} >= LAYERS.keys() | GROUND


def test_imports_point_down() -> None:
    for name in MODULES:
        if layer(name) in LAYERS.keys() | GROUND:
            allowed = LAYERS[layer(name)] | GROUND | {layer(name)} if layer(name) in LAYERS else set()
            upwards = sorted(target for target in imports(name) if layer(target) not in allowed)
            assert not upwards, f"{name} imports {upwards}, but may import {sorted(allowed)} only"


def test_no_class_name_occurs_twice() -> None:
    """A name stands for one thing; an underscore does not tell two things apart."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not twice, f"several classes have these names: {twice}"


def test_the_package_imports_neither_tests_nor_benchmarks() -> None:
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {PACKAGE}
    for name, path in MODULES.items():
        for node in _import_nodes(syntax_tree(path)):
            roots = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not beside & {root.split(".")[0] for root in roots}, f"{name} imports {roots}"


def test_no_two_files_import_each_other() -> None:
    graph = {name: set(imports(name)) - {name} for name in MODULES}
    assert not (cycle := find_cycle(graph)), " -> ".join(cycle)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of a directed graph, or an empty list."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph[node]):
            if found := walk(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def test_modes_are_named_in_generation_modes_alone() -> None:
    """Neither in strings (except docstrings), nor as identifiers, nor by imports of a mode's files."""
    for name in MODULES:
        if layer(name) != "generation.modes":
            assert not (found := mode_names_in(name)), f"{name} names modes: {found}"


def mode_names_in(name: str) -> list[str]:
    """Return the names and files of modes that a module uses."""
    tree = syntax_tree(MODULES[name])
    word = re.compile(rf"(?<![\w.])({'|'.join(MODE_NAMES)})(?!\w)")
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found += word.findall(node.value)
        elif isinstance(node, ast.Name | ast.Attribute | ast.keyword | ast.arg):
            identifier = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            found += [identifier] if identifier in MODE_NAMES else []
    return found + [target for target in imports(name) if target.startswith(f"{PACKAGE}.generation.modes.")]


def test_files_have_a_docstring() -> None:
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        assert re.match(r'(#[^\n]*\n)*r?"""', text), f"{path} has no docstring"


def test_public_functions_and_classes_are_documented() -> None:
    trees = {module: syntax_tree(path) for module, path in MODULES.items()}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    missing = [name for module, tree in trees.items() for name in undocumented(tree, module, classes)]
    assert not missing, f"no docstring: {missing}"


def undocumented(node: ast.AST, name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield public functions, classes and methods without a docstring; nested functions are private.

    A method that overrides one of `classes` inherits its docstring.
    """
    inherited = set(documented_methods(node, classes)) if isinstance(node, ast.ClassDef) else set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name[0] != "_":
            if not ast.get_docstring(child) and child.name not in inherited:
                yield f"{name}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{name}.{child.name}", classes)
        elif isinstance(child, ast.If | ast.Try):
            yield from undocumented(child, name, classes)


def documented_methods(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the documented methods of the base classes of a class."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if (above := classes.get(name)) is not None:
            yield from (child.name for child in above.body if hasattr(child, "name") and ast.get_docstring(child))  # type: ignore[arg-type]
            yield from documented_methods(above, classes)


def run(script: str) -> None:
    """Run a script in a new process with the repository and the test helpers on its path."""
    path = f"import sys\nsys.path[:0] = {[str(ROOT), str(HELPERS)]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


def test_the_directory_of_the_package_lists_public_names_that_exist() -> None:
    assert dir(hf_parallel) == hf_parallel.__all__
    assert all(hasattr(hf_parallel, name) for name in dir(hf_parallel))
    assert {*hf_parallel.generation.modes.__all__} <= {*hf_parallel.__all__}


def test_the_core_imports_no_extras() -> None:
    for name in MODULES:
        is_core = layer(name) in LAYERS.keys() - {"engine", "agents"} | GROUND
        if is_core and not any(part in name for part in LOADED_LATE):
            nodes = [node for node in syntax_tree(MODULES[name]).body if isinstance(node, ast.Import | ast.ImportFrom)]
            modules = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
            modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            assert not (found := {*OPTIONAL} & {module.split(".")[0] for module in modules}), f"{name} imports {found}"


def test_importing_the_package_imports_no_torch() -> None:
    run("import hf_parallel\nassert 'torch' not in sys.modules")


@pytest.mark.parametrize(
    "imports",
    ["import hf_parallel\nfrom transformers import pipeline", "import transformers.pipelines\nimport hf_parallel"],
)
def test_importing_the_package_registers_its_pipeline(imports: str) -> None:
    check = "assert transformers.pipelines.PIPELINE_REGISTRY.check_task('parallel-text-generation')"
    run(f"{imports}\nimport transformers\n{check}")


def test_a_pipeline_that_cannot_be_registered_is_a_warning() -> None:
    run(_PIPELINE_THAT_FAILS)


@pytest.mark.slow
def test_core_needs_torch_and_transformers_only() -> None:
    run(f"HIDDEN = set({OPTIONAL!r})" + _WITHOUT_EXTRAS)


@pytest.mark.slow
def test_importing_and_enabling_patch_nothing_in_transformers() -> None:
    run(_PATCHES_NOTHING)


_GENERATE = """
import torch
torch.set_num_threads(1)
from tiny import build, make_prompts
model = build("llama")
arguments = {"input_ids": make_prompts([6])[0][None], "max_new_tokens": 3, "do_sample": False}
plain = model.generate(**arguments)
"""

_PIPELINE_THAT_FAILS = """
import warnings
import hf_parallel
sys.modules["hf_parallel.pipelines"] = None  # importing it raises an error
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.pipelines
texts = [str(warning.message) for warning in caught]
assert any("hf_parallel is not registered with transformers.pipelines: " in text for text in texts), texts
"""

_WITHOUT_EXTRAS = f"""
class Hiding:
    # Wraps a module finder and hides modules from it.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for name in HIDDEN:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(name + " is not hidden")

import hf_parallel
{_GENERATE}
shared = hf_parallel.enable(model).generate(**arguments, generation_mode="shared_prefix")
assert torch.equal(shared, plain)
assert not HIDDEN & {{name.split(".")[0] for name in sys.modules}}
"""

_PATCHES_NOTHING = f"""
import transformers
import transformers.cache_utils, transformers.generation.utils, transformers.masking_utils, transformers.modeling_utils
import transformers.integrations.sdpa_attention, transformers.models.llama.modeling_llama
{_GENERATE}
def snapshot():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "transformers" and module is not None:
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and value.__module__.startswith("transformers"):
                    found.update(((value, attribute), what) for attribute, what in list(vars(value).items()))
    return found

def changes(before, after):
    # Modules get new names as others are imported: new attributes count on existing classes only.
    classes = {{owner for owner, _ in before if isinstance(owner, type)}}
    new = [key for key in after if key not in before and key[0] in classes]
    return new + [key for key in before if key not in after or before[key] is not after[key]]

def registered():
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    return [dict(interface._global_mapping) for interface in interfaces]

for name in ("eager", "sdpa"):  # transformers caches on the class that they are available
    model.set_attn_implementation(name)
before, functions = snapshot(), registered()
mixin = dict(vars(transformers.GenerationMixin))
from hf_parallel import enable
assert not changes(before, snapshot()), changes(before, snapshot())
assert dict(vars(transformers.GenerationMixin)) == mixin
for old, new in zip(functions, registered()):
    assert set(new) - set(old) == {{"hf_parallel"}}
    assert all(new[name] is old[name] for name in old)

import hf_parallel
enable(model).generate(**arguments, generation_mode="shared_prefix")
assert type(model) is not transformers.LlamaForCausalLM
assert not changes(before, snapshot()), changes(before, snapshot())
assert dict(vars(transformers.GenerationMixin)) == mixin
hf_parallel.disable(model)
assert type(model) is transformers.LlamaForCausalLM
assert torch.equal(model.generate(**arguments), plain)
"""


# Runs are generators


def steps_functions(tree: ast.AST) -> set[str]:
    """Return the names of a module's functions and methods that return `Steps`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns is not None and "Steps[" in ast.unparse(node.returns):
            found.add(node.name)
    return found


def test_what_a_run_wants_is_yielded() -> None:
    """A call of a function of a run without `yield from` would do nothing. As a value, mypy finds it."""
    package = [path for path in python_files() if path.is_relative_to(ROOT / PACKAGE)]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package}
    everywhere = set().union(*map(steps_functions, trees.values()))
    for path, tree in trees.items():
        here = steps_functions(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                continue
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            receiver = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
            is_run = receiver.split(".")[-1] in ("loop", "runner", "reader", "_run") or (
                name in here and receiver in ("", "self")
            )
            assert not (name in everywhere and is_run), f"{path}:{node.lineno}: {name} without `yield from`"
