"""The pages of the documentation: their Python blocks."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks_of(page):
    """The Python blocks of a page, each below as many lines as in the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    assert len(found) == text.count("```python") > 0
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run_page(page):
    """Runs the blocks of a page one after another, in one namespace; returns what they define."""
    names = {"__name__": Path(page).stem}
    for block in blocks_of(page):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, page, "exec"), names)
    return names
