"""What is in the wheel, and that an editable install is found from everywhere."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Modules that are installed with an extra only.
EXTRAS = [
    "sacrebleu",
    "qwix",
    "gguf",
    "rouge_score",
    "matplotlib",
    "seqio",
    "tensorflow",
    "torch",
    "transformers",
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Calls a hook of setuptools on a copy of the checkout; without weights, which take time."""
    directory = tmp_path_factory.mktemp("copy") / "specjax"
    directory.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("specjax", "gin_configs", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=ignore)

    def call(hook, output):
        code = f"from setuptools import build_meta as b; print(b.{hook}({str(output)!r}))"
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return directory, output / done.stdout.splitlines()[-1]

    return call


def names_in(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_has_the_recipes_and_the_pair_and_no_more(build, tmp_path):
    _, wheel = build("build_wheel", tmp_path)
    names = names_in(wheel)
    recipes = {str(p.relative_to(ROOT)) for p in ROOT.glob("gin_configs/**/*.gin")}
    assert "gin_configs/runs/infer.gin" in recipes
    assert {f"specjax/{name}" for name in recipes} <= names
    modules = {str(p.relative_to(ROOT)) for p in ROOT.glob("specjax/**/*.py")}
    assert modules <= names
    assert "specjax/pairs/multi30k_ende/verifier/spiece.model" in names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"specjax"}
    # Its command finds the recipes without any checkout, and what it imports is in no extra.
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); "
        "from specjax.cli.main import main; sys.exit(main(['infer']))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert "required but not given: INPUT, OUTPUT_DIR" in out.stderr


def test_an_editable_install_is_found_from_the_directory_above_the_checkout(build, tmp_path):
    """The checkout itself is named specjax: an import hook would come after that directory."""
    directory, wheel = build("build_editable", tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    code = (
        f"import site; site.addsitedir({str(site)!r}); import importlib.util; "
        "print(importlib.util.find_spec('specjax').origin)"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the packages of this environment
        cwd=directory.parent,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str(directory / "specjax" / "__init__.py")
