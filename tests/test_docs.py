"""The site's links (`make docs`, which `make test` runs, builds the site and checks them all), the
commands of the pages, and the code of the first ones."""

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import specjax
from specjax import drafting, rules
from specjax.cli.main import COMMANDS
from tests import tiny_pair
from tests.pages import blocks_of

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
        ("docs/scaling.md#experts", "README.md", "readme.md", "scaling.md#experts"),
        ("LICENSE", "README.md", "readme.md", "https://host/us/blob/main/LICENSE"),
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
    assert hooks.site_link(link, source, place, "https://host/us") == expected


def test_a_link_to_no_file_stops_the_build(hooks):
    with pytest.raises(hooks.PluginError, match=r"leads to docs/README\.md, which is not there"):
        hooks.site_link("../README.md", "docs/api/index.md", "api/index.md", "https://host/us")


def test_code_is_left_alone(hooks):
    text = "[a](x.md)\n\n```python\nf[0](y.md)\n```\n\n[b](https://z) [c](#d)"
    found = hooks.LINK.findall("".join(hooks.FENCE.split(text)[::2]))
    assert [target for _, target, _ in found] == ["x.md"]


def test_every_page_of_the_api_stands_under_its_module():
    """The strict build refuses a page without a place, and not one under another's name."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api/*.md")}
    named = re.findall(r"- specjax\.(\S+): api/(\S+)$", text, re.M)
    assert {name for _, name in named} == {*pages} - {"index.md", "specjax.md"}
    for module, name in named:
        assert f"::: specjax.{module}" in pages[name], name


def test_the_architecture_says_where_is_what():
    """Its table is how a stranger finds a place in the code."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where is what")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "specjax" / name).is_file()] == []


def test_the_commands_that_gin_configures_are_listed():
    told = (ROOT / "docs/gin.md").read_text(encoding="utf-8").split("are configured by")[0]
    modules = {
        name: importlib.util.find_spec(f"specjax.cli.{name.replace(' ', '_')}") for name in COMMANDS
    }
    configured = {
        name
        for name, spec in modules.items()
        if "gin_config.add_arguments" in Path(spec.origin).read_text(encoding="utf-8")
    }
    assert set(re.findall(r"`([\w ]+)`", told)) == configured


PROGRAMS = "specjax|python -m|pip|launch/tpu.sh|export|docker|sky|gcloud|make"
COMMAND = rf"(?:[A-Z_]+=\S* )*(?:(?:{PROGRAMS}) |--gin\.)"
# What `bash -n` minds after a quote that is not closed, of either kind, and not otherwise.
END = """
: '")'
: '")'
"""


def commands_of(text):
    """The commands of a page: blocks that are indented, and code within lines."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for block in re.findall(rf"(?:^    +{COMMAND}.*\n)(?:^    .*\n)*", text, re.M):
        if not re.search(r"\S {3,}[^# ]", block):  # a list of commands and what they do
            yield block
    yield from re.findall(rf"`({COMMAND}[^`]*)`", text)


def commands_in_head(text):
    """The commands in the comments of a gin file."""
    comments = "".join(f"{line[2:]}\n" for line in text.splitlines() if line[:1] == "#")
    return re.findall(rf"(?:^  +{COMMAND}.*\n)(?:^    .*\n)*", comments, re.M)


def what_bash_minds(commands):
    """What bash says of the first command that it cannot read; none is run."""
    script = "".join(command + END for command in commands)
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr


def test_a_shell_can_read_the_commands_of_the_pages():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("specjax/**/README.md")]
    files = list(ROOT.glob("gin_configs/**/*.gin"))
    texts = {path: path.read_text(encoding="utf-8") for path in (*pages, *files)}
    commands = [
        *(command for path in pages for command in commands_of(texts[path])),
        *(command for path in files for command in commands_in_head(texts[path])),
    ]
    assert len(commands) > 150
    assert not what_bash_minds(commands)
    unquoted = [path for path in texts if re.search(r"--gin\.\S+=@\w+\(", texts[path])]
    assert not unquoted
    lines = "\n".join(commands).replace("\\\n", "")
    assert not [word for word in shlex.split(lines, comments=True) if "\n" in word]  # nor can gin


@pytest.mark.parametrize("wrong", ["--gin.A=@B()", "--gin.A='b", '--gin.A="b', "--gin.A=('b',)"])
def test_a_command_that_a_shell_cannot_read_is_seen(wrong):
    page = f"The page.\n\n    specjax infer \\\n      {wrong}\n\nThen `specjax demo`.\n"
    head = f"# A file:\n#\n#   specjax infer \\\n#     {wrong}\n#\n\nA = 1\n"
    assert len(list(commands_of(page))) == 2
    for commands in (commands_of(page), commands_in_head(head), [wrong, "specjax --gin.A='b'"]):
        assert what_bash_minds(commands)
    assert not what_bash_minds(["specjax infer --gin.A='b' --gin.B=\"(@C(), 'd')\""])


def test_the_code_of_the_readme_runs_as_it_is_written():
    """One block after another, as a reader pastes them; comments say what `print` prints."""
    names, blocks = {"__name__": "readme"}, blocks_of("README.md")
    assert len(blocks) >= 3
    told = 0
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), names)
        lines = printed.getvalue().splitlines()
        prints = [line for line in block.splitlines() if line.startswith("print(")]
        assert len(lines) == len(prints)
        for line, shown in zip(prints, lines, strict=True):
            comment = line.partition("  # ")[2]
            assert not comment or comment == shown
            told += bool(comment)
    assert told >= 2


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_what_the_tables_write_makes_what_they_say(page):
    """Each row with what the page imports and names."""
    table = (ROOT / page).read_text(encoding="utf-8").split("| to | write |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.*?) \| `(.*)` \|$", table, re.M)
    assert len(rows) == table.count("\n") - 1
    names = {"__name__": "table"}
    exec("import specjax\nfrom specjax import Decoder, drafting, processors, rules", names)
    pair = specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))
    names |= {"pair": pair, "prompts": ["ba"], "schema": {"type": "integer"}}
    names["smaller"] = tiny_pair.tabular(3)
    shape = {"max_new_tokens": 4, "buckets": (32,), "batch_size": 1}
    names["decoder"] = specjax.Decoder(pair, max_draft=2, **shape)
    for _, code in rows:
        if ".chat()" not in code:  # it needs a tokenizer with a chat template
            exec(code.replace('"path/to/smaller"', "smaller"), names)


FIELD = re.compile(r'([A-Z_]+)=(?:"([^"]*)"|(\d+))')
PARTS_OF_A_SETTING = ("rule", "verification", "stopping", "drafting", "method")


def parts_of(fields):
    """What a setting is made of; equal for equivalent texts."""
    setting = specjax.Setting(**fields)
    made = tuple(repr(setting.part(name)) for name in PARTS_OF_A_SETTING)
    return *made, setting.max_draft, setting.min_draft


def settings_of(page):
    """The parts of each row of the table, by what the row says to write."""
    table = page.split("| what it does | write |")[1].split("\n\n")[0]
    rows = table.splitlines()[2:]
    written = [re.search(r"\| `([A-Z_]+=.*?)` \|", row)[1] for row in rows]
    fields = {
        text: {m[1].lower(): m[2] or int(m[3]) for m in FIELD.finditer(text)} for text in written
    }
    assert len(fields) == len(rows)
    for text in written:
        assert not FIELD.sub("", text).strip(), f"{text} is not NAME=value"
    return {text: parts_of(one) for text, one in fields.items()}


def test_the_table_of_methods_offers_every_part_and_each_way_to_decode_once():
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    written = settings_of(page)
    assert len(set(written.values())) == len(written) == 44
    kinds = {*rules.ALL_RULES, *rules.SEQUENTIAL_RULES, rules.Budgeted}
    kinds |= {*drafting.ALL_POLICIES} - {drafting.FixedLength}
    parts = {kind.__name__ for kind in kinds} | {"Lookup", "Cascade", "Tree", "Walk"}
    parts |= {"TokenCascade", "BiLDCascade", "OracleCascade", "SequenceCascade"}
    parts |= {"VerifierAlone", "DrafterAlone", "OnlineEstimate"}
    assert parts - set(re.findall(r"\w+", " ".join(written))) == set()
