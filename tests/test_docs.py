"""The site's links; `make docs`, which `make test` runs, builds the site and checks them all."""

import importlib.util
import re
from pathlib import Path

import pytest

from specjax.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks():
    place = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "source", "place", "expected"),
    [
        ("docs/scaling.md#replicas", "README.md", "readme.md", "scaling.md#replicas"),
        ("LICENSE", "README.md", "readme.md", "https://host/us/blob/main/LICENSE"),
        ("../README.md", "docs/api/index.md", "api/index.md", "../docs/README.md"),
        ("../../README.md", "docs/api/index.md", "api/index.md", "../readme.md"),
        (
            "../gin_configs/runs",
            "docs/gin.md",
            "gin.md",
            "https://host/us/tree/main/gin_configs/runs",
        ),
        ("round.svg", "docs/concepts.md", "concepts.md", "round.svg"),
        ("../t5x.md", "docs/api/t5x.md", "api/t5x.md", "../t5x.md"),
    ],
)
def test_links_of_github_become_links_of_the_site(hooks, link, source, place, expected):
    if "docs/README" in expected:  # there is no such file: the build stops
        with pytest.raises(
            hooks.PluginError, match=r"leads to docs/README\.md, which is not there"
        ):
            hooks.site_link(link, source, place, "https://host/us")
    else:
        assert hooks.site_link(link, source, place, "https://host/us") == expected


def test_code_is_left_alone(hooks):
    text = "[a](x.md)\n\n```python\nf[0](y.md)\n```\n\n[b](https://z) [c](#d)"
    found = hooks.LINK.findall("".join(hooks.FENCE.split(text)[::2]))
    assert [target for _, target, _ in found] == ["x.md"]


def test_every_page_is_in_the_navigation():
    """The strict build refuses a page without a place; here that the places are those promised."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for module in ("rules", "verification", "drafting", "decoding", "text", "models", "types"):
        assert f"specjax.{module}: api/{module}.md" in text
        assert f"::: specjax.{module}" in (ROOT / f"docs/api/{module}.md").read_text()


def test_no_page_waits_for_a_figure():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    assert len(pages) > 20
    for page in pages:
        found = re.search(r"\bMEASURED_[A-Z]+", page.read_text(encoding="utf-8"))
        assert not found, f"{page}: {found}"


def test_the_commands_that_gin_configures_are_listed():
    told = (ROOT / "docs/gin.md").read_text(encoding="utf-8").split("are configured by")[0]
    modules = {name: importlib.util.find_spec(module) for name, (module, _) in COMMANDS.items()}
    configured = {
        name
        for name, spec in modules.items()
        if "gin_config.add_arguments(" in Path(spec.origin).read_text(encoding="utf-8")
    }
    assert set(re.findall(r"`(\w+)`", told)) == configured
