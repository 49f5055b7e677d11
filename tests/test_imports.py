"""Which module may import which: data and imports flow one way."""

import ast
import pathlib
import re
import subprocess
import sys

import specjax
from tests import house

ROOT = pathlib.Path(specjax.__file__).parent

# The floors, from the lowest. A package imports from lower floors alone.
FLOORS = (
    {"cpu_code", "errors", "writing"},
    {"checks", "compilation", "cpu_kernels", "memory", "platforms"},
    {"data", "environment", "kernel_choice", "theory", "tokenizers", "types"},
    {"acceptance_head", "evaluation", "fingerprints", "models", "partitioning", "sampling"},
    {"checkpoints", "processing", "processors", "rules", "verification"},
    {"decoding", "testing"},
    {"drafting"},
    {"text"},
    {"runs", "serving"},
    {"integrations", "study", "training"},
    {"__init__", "cli"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
ENTRY = "__main__"  # calls the command
# Third-party package -> the only subpackages that may import it.
ONLY_IN = {
    "t5x": {"integrations"},
    "tunix": {"integrations"},
    "lm_eval": {"integrations"},
    "ray": {"integrations"},
    "seqio": {"data"},
    "tensorflow": {"data"},
    "gin": {"cli"},
    "torch": set(),  # benchmarks compare with these
    "transformers": set(),
    "ctranslate2": set(),
    "llvmlite": {"cpu_code", "cpu_kernels"},
}


def _modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, parts[0]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if node.module == "specjax":
                yield from (f"specjax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def broken_borders(modules):
    for path, part in modules:
        for name in _imports(path):
            first, *rest = name.split(".")
            if first == "specjax" and rest:
                if part not in (rest[0], ENTRY) and FLOOR.get(rest[0], 99) >= FLOOR[part]:
                    yield f"{path.name} ({part}) imports {name}"
            elif first in ONLY_IN and part not in ONLY_IN[first]:
                yield f"{path.name} ({part}) imports {name}"


def test_imports_keep_the_borders():
    assert not list(broken_borders(_modules()))


def test_every_module_that_is_imported_exists():
    """Also where a function imports it, which mypy does not see."""
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "benchmarks").rglob("*.py")]:
        for name in _imports(path):
            place = ROOT.parent.joinpath(*name.split("."))
            within = place.with_suffix(".py").exists() or place.is_dir()
            if name.startswith("specjax.") and not within:
                # A name of the package itself.
                assert place.parent == ROOT and hasattr(specjax, place.name), f"{path}: {name}"


def test_every_package_has_a_floor_and_a_line():
    assert {part for _, part in _modules()} == {*FLOOR, ENTRY}
    assert len(FLOORS) <= 11
    assert [name for name, (about, *_) in house.packages().items() if not about] == []


def test_the_page_of_the_architecture_has_the_floors():
    page = (ROOT.parent / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page.split("## Eleven floors")[1], re.M)
    told = {int(floor): set(re.findall(r"`(\w+)`", names)) for floor, names in rows}
    assert told == {i: names - {"__init__"} for i, names in enumerate(FLOORS)}


def test_a_crossing_is_seen(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text(
        "from specjax.verification import Token\nimport t5x\nfrom specjax import types\n"
    )
    assert len(list(broken_borders([(module, "rules")]))) == 2


def test_packages_only_reexport():
    for path in ROOT.rglob("__init__.py"):
        if path.parent.name in ("cli", "bench"):
            continue
        kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
        if path.parent == ROOT:
            kinds += (ast.If,)  # it imports its modules when they are first used
        assert all(isinstance(n, kinds) for n in ast.parse(path.read_text()).body), path


def test_a_decoder_loads_no_library_that_it_does_not_need():
    code = """
import sys, specjax
specjax.Decoder
heavy = {"scipy.sparse.csgraph", "matplotlib", "qwix", "gguf", "outlines_core"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_module_is_an_attribute_after_import_specjax_alone():
    code = """
import sys, specjax
heavy = "orbax tensorflow seqio t5x torch transformers ctranslate2 matplotlib specjax.training"
assert not set(heavy.split()) & set(sys.modules)
for name in ("training", "evaluation", "checkpoints", "testing", "models", "types", "rules"):
    assert name in dir(specjax)
    assert getattr(specjax, name).__name__ == f"specjax.{name}"
assert set(specjax.__all__) <= set(dir(specjax))
try:
    specjax.trainings
except AttributeError as error:
    assert str(error) == "module 'specjax' has no attribute 'trainings'"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
