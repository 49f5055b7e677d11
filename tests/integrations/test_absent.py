"""Without T5X and tunix: one line says how to get them, and nothing else asks for them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gin import config_parser

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "gin_configs" / "t5x").rglob("*.gin"))


def told_without(package):
    """What an import of the integration says where the package is absent."""
    code = f"""
import sys
sys.modules["{package}"] = None  # as if it were not there
import specjax.integrations, specjax.text, specjax.cli.main
try:
    import specjax.integrations.{package}
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    (line,) = ran.stdout.splitlines()
    return line


def test_without_t5x_one_line_says_how_to_get_it_and_nothing_else_imports_it():
    line = told_without("t5x")
    assert line.startswith("specjax.integrations.t5x needs T5X, which cannot be imported (")
    for needed in ("google-research/t5x", "google/airio", "jestimator", "'.[t5x]'"):
        assert needed in line


def test_without_tunix_one_line_says_how_to_get_it():
    line = told_without("tunix")
    assert line.startswith("tunix ") and line.endswith("run pip install '.[tunix]' in the checkout")


class _Names(config_parser.ParserDelegate):
    """Reads references and macros as their names."""

    def configurable_reference(self, scoped_name, evaluate):
        return f"@{scoped_name}{'()' if evaluate else ''}"

    def macro(self, scoped_name):
        return f"%{scoped_name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_gin_file_parses_and_gives_its_command(path):
    statements = list(config_parser.ConfigParser(path.read_text(), _Names()))
    for statement in statements:
        if isinstance(statement, config_parser.IncludeStatement):
            name = statement.filename
            # T5X's own run files are found beside T5X.
            assert (ROOT / "gin_configs" / name).is_file() or name.startswith("t5x/configs/runs/")
    # What a file binds of a module, it imports.
    imported = {
        statement.bound_name()
        for statement in statements
        if isinstance(statement, config_parser.ImportStatement)
    }
    for statement in statements:
        if isinstance(statement, config_parser.BindingStatement):
            module = statement.selector.split("/")[-1].split(".")[0]
            assert "." not in statement.selector or module in imported, statement.selector
    header = re.match(r"(?:#.*\n)+", path.read_text())[0]
    if path.parent.name == "models":
        assert f"include 't5x/models/{path.name}'" in header
    elif path.stem == "decoding":  # which the files of t5x/runs include
        assert "--gin_file=t5x/runs/" in header
    elif path.stem == "interactive":
        assert "gin_utils.parse_gin_flags(" in header
    else:
        assert re.search(rf"python -m t5x\.(infer|eval)\b(.|\n)*t5x/{path.parent.name}/", header)
        assert path.name in header


def test_scanned_layers_have_the_same_gin_file_with_another_import():
    folder = ROOT / "gin_configs" / "t5x" / "models"
    minimal, scalable = (
        re.sub(r"^#.*\n", "", (folder / f"{name}.gin").read_text(), flags=re.MULTILINE)
        for name in ("encoder_decoder", "scalable_encoder_decoder")
    )
    assert minimal.count("t5x.examples.t5 ") == 1
    assert {path.parent.name for path in FILES} == {"runs", "models", "pairs", "t5x"}
    assert scalable == minimal.replace("t5x.examples.t5 ", "t5x.examples.scalable_t5 ")
