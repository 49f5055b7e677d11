"""Notebooks are valid, cleared, open in Colab from where they are, and run top to bottom."""

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests import notebook_runner
from tests.xla_flags import quick_flags

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# mkdocs.yml is the one place that says where the repository is.
REPOSITORY = re.search(r"^repo_url: https://(\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)[1]
HERE = f"https://{REPOSITORY}/blob/main/"


def contents(path):
    return json.loads(path.read_text(encoding="utf-8"))


def faults(notebook, name):
    """What is wrong with a notebook, as the nbformat of version 4.5 and the project want it."""
    cells = notebook["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    ids = [cell["id"] for cell in cells]
    colab = (
        f"https://colab.research.google.com/{REPOSITORY.replace('.com', '')}/blob/main/notebooks/"
    )
    # The first text has the badge, the first code installs, and in Colab alone.
    first = "".join(code[0]["source"])
    return [
        *(["the version"] * ((notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5))),
        *(["the kernel"] * (notebook["metadata"]["kernelspec"]["name"] != "python3")),
        *(["the ids"] * (len(set(ids)) < len(ids))),
        *[f"the id {i}" for i in ids if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i)],
        *[f"the outputs of {cell['id']}" for cell in code if cell["outputs"]],
        *[f"the count of {cell['id']}" for cell in code if cell["execution_count"] is not None],
        *(["the badge"] * (f"]({colab}{name})" not in texts[0])),
        *(["the installation"] * (f"git+https://{REPOSITORY}" not in first)),
        *(["its condition"] * ('if "google.colab" in sys.modules:' not in first)),
        *[
            f"a magic in {c['id']}"
            for c in code[1:]
            if re.search(r"^\s*[%!]", "".join(c["source"]), re.M)
        ],
        *(["the number of cells"] * (not 5 <= len(code) - 1 <= 9)),
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_cleared_and_opens_in_colab(path):
    assert faults(contents(path), path.name) == []


def test_faults_are_seen():
    notebook, name = contents(NOTEBOOKS[0]), NOTEBOOKS[0].name
    assert faults(notebook, "elsewhere.ipynb") == ["the badge"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code[1] |= {"outputs": [{"output_type": "stream"}], "execution_count": 3}
    code[2] |= {"id": code[1]["id"], "source": ["%matplotlib inline"]}
    found = faults(notebook, name)
    assert len(found) == 4 and "the ids" in found and f"a magic in {code[2]['id']}" in found


def links(text):
    """The links of a notebook to files of the repository, and whether each leads somewhere."""
    for page, anchor in re.findall(rf"{re.escape(HERE)}([^)#\s]+)(#[^)\s]+)?", text):
        yield page + anchor, (ROOT / page).is_file() and (not anchor or anchor in anchors(page))
    for other in re.findall(r"`(\w+\.ipynb)`", text):
        yield other, (ROOT / "notebooks" / other).is_file()


def anchors(page):
    """The places of a page that a link can lead to, as the repository's site names them."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return ["#" + re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings]


def test_links_lead_to_pages():
    """Notebooks link to docs by the repository's address, which the strict build does not see."""
    texts = ["".join("".join(c["source"]) for c in contents(path)["cells"]) for path in NOTEBOOKS]
    assert len(texts) == 6
    found = {link: leads for text in texts for link, leads in links(text)}
    assert {Path(link).suffix for link in found} == {".md", ".ipynb"} and len(found) > 5
    assert [link for link, leads in found.items() if not leads] == []


def test_links_that_lead_nowhere_are_seen():
    page = "docs/extending.md"
    text = f"[a]({HERE}{page}#a-language-model) [b]({HERE}{page}#none) [c]({HERE}docs/none.md)"
    assert list(links(f"{text} `none.ipynb`")) == [
        (f"{page}#a-language-model", True),
        (f"{page}#none", False),
        ("docs/none.md", False),
        ("none.ipynb", False),
    ]


@pytest.mark.exhaustive
def test_notebooks_run_top_to_bottom():
    """All in one process, which compiles a program once; warnings are errors."""
    # As in conftest.py, but on one device, as a notebook has it.
    env = os.environ | {"XLA_FLAGS": quick_flags(1)}
    # tests/integrations/test_tunix.py runs the other one.
    paths = [path for path in NOTEBOOKS if path.stem != "rollouts"]
    command = [sys.executable, "-W", "error", "-m", "tests.notebook_runner", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert [one["name"] for one in told] == [path.name for path in paths]
    assert all(one["figures"] >= 1 for one in told)


def test_the_runner_sees_a_failure(tmp_path):
    cell = {"cell_type": "code", "source": ["%pip install nothing\n", "x = 1\n", "1 / 0"]}
    (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ZeroDivisionError) as raised:
        notebook_runner.run(tmp_path / "wrong.ipynb")
    last = traceback.extract_tb(raised.tb)[-1]
    assert (last.filename, last.lineno) == ("wrong.ipynb, cell 1", 3)
