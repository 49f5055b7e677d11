"""gin files and overrides become a call, or are refused in one line."""

import argparse
import dataclasses
import itertools
import re
from pathlib import Path

import gin
import pytest

from specjax.checks import check_number
from specjax.cli import gin_config, infer, main
from specjax.errors import UserError

CONFIGS = Path(__file__).parents[2] / "gin_configs"


@dataclasses.dataclass(frozen=True)
class Wheel:
    size: float = 1.0

    def __post_init__(self):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tyre:
    width: int


def car(wheel, name, *, doors=4):
    if doors < 0:
        raise UserError(f"doors={doors} must not be negative")
    if name == "disk":
        raise OSError("disk is full")
    if name == "fields":
        raise UserError("`name` must be a name: a wheel has a name, doors= has a number")
    return wheel, name, doors


@pytest.fixture(autouse=True)
def registered():
    gin_config.register(Tyre, Wheel, vehicle=car)


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "gin_configs"
    (root / "parts").mkdir(parents=True)
    (root / "runs").mkdir()
    (root / "parts" / "wheel.gin").write_text("SIZE = 2.0\nWheel.size = %SIZE\n")
    run = root / "runs" / "car.gin"
    run.write_text(
        "include 'parts/wheel.gin'\nNAME = %gin.REQUIRED\nDOORS = 2\n"
        "vehicle.name = %NAME\nvehicle.doors = %DOORS\nvehicle.wheel = @Wheel()\n"
    )
    return [str(run)]


def call(files, *bindings):
    gin_config.configure(files, bindings)
    return gin_config.call(car)


def test_values_come_from_files_includes_and_overrides(files):
    assert call(files, "NAME=beetle") == (Wheel(2.0), "beetle", 2)
    assert call(files, "NAME='beetle'", "DOORS=5", "Wheel.size=3.5") == (Wheel(3.5), "beetle", 5)
    # Nothing is left over from an earlier call.
    assert call(files, "NAME=vw") == (Wheel(2.0), "vw", 2)


PATHS = ["/data/multi 30k", "a.b-c", "C:\\x", "it's", "", "(1", "5 a"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *zip(PATHS, PATHS, strict=True),
        *(("None", None), ("(1, 2)", (1, 2)), ("1e-3", 1e-3), ("True", True)),
    ],
)
def test_literals_are_parsed_and_paths_need_no_quotes(files, text, value):
    assert call(files, f"NAME={text}")[1] == value


BROKEN = "own.gin"
CIRCLE = "define a value by itself: change one"
# What a file of one's own has, beside the run's; what is typed; and what is told.
REFUSED = [
    ("", [], "required but not given: NAME; add a gin file that defines it, or --gin.NAME=..."),
    ("", ["NAM=x"], "--gin.NAM: no such name; did you mean NAME?"),
    ("", ["name=x"], "--gin.name: no such name; did you mean NAME?"),
    ("", ["ZZZ=x"], "--gin.ZZZ: no such name; the gin files define DOORS, NAME, SIZE"),
    ("", ["NAME"], "--gin.NAME: the form must be --gin.NAME=value"),
    ("", ["NAME=@"], "--gin.NAME: @ is not a valid gin reference"),
    ("", ["NAME=a\nDOORS = 5"], "--gin.NAME: the value has a line break: write it in one line"),
    ("", ["NAME=x", "vehicle.name=a\rb"], "--gin.vehicle.name: the value has a line break"),
    ("", ["NAME=x", "vehicle.dors=1"], "vehicle has no parameter dors; did you mean doors?"),
    (
        "",
        ["NAME=x", "boat.sail=1"],
        "boat is not a function or class for gin files; the known name",
    ),
    ("", ["NAME=x", "vehicle.wheel=@Whel()"], "for gin files; did you mean Wheel?"),
    ("", ["NAME=x", "vehicle.=1"], "--gin.vehicle.: Malformatted scope or selector"),
    ("", ["NAME=x", ".x=1"], "--gin..x: Unexpected token"),
    ("", ["NAME=x", "DOORS=" + "[" * 5000], "--gin.DOORS: the value is nested too deeply"),
    ("", ["NAME=x", "Tyre.width=3"], "--gin.Tyre.width: Tyre is not used: leave it out"),
    ("", ["NAME=x", "front/Wheel.size=3"], "Wheel in the scope front is not used: leave it out"),
    # The name of the gin file in the place of Python's, where one is bound to the parameter.
    ("", ["NAME=x", "DOORS=-1"], "DOORS=-1 must not be negative"),
    ("", ["NAME=x", "vehicle.doors=-1"], "doors=-1 must not be negative"),
    ("", ["NAME=fields"], "`NAME` must be a name: a wheel has a name, DOORS= has a number"),
    ("", ["NAME=disk"], "disk is full"),
    ("DOOR = 5", ["NAME=x"], "define but do not use DOOR; did you mean DOORS?"),
    ("X = 5", ["NAME=x"], "define but do not use X; delete it"),
    ("A = %B\nB = %A\nvehicle.wheel = %A", ["NAME=x"], CIRCLE),
    ("vehicle.wheel = @vehicle()", ["NAME=x"], CIRCLE),
    ("vehicle.wheel = [{'a': (%NONE,)}]", ["NAME=x"], "use but do not define %NONE; add the file"),
    ("\nvehicle.wheel = @Whel()", ["NAME=x"], "own.gin:2: Whel is not "),
    ("NAME = = 3", [], BROKEN),
    ("NAME = '\xff'", [], BROKEN),
    ('"""', [], BROKEN),
    ("NAME = (1,", [], BROKEN),
    ("A = {[]: 1}", [], BROKEN),
    ("import no_such_module", [], "add its folder to PYTHONPATH"),
    ("include 'nowhere.gin'", [], "own.gin:1: include 'nowhere.gin': file not found"),
    ("include 'own.gin'", [], "own.gin: this gin file includes itself"),
]


@pytest.mark.parametrize(("text", "bindings", "message"), REFUSED)
def test_what_is_wrong_is_told_in_one_line(files, tmp_path, text, bindings, message):
    own = tmp_path / "gin_configs" / "own.gin"
    own.write_bytes(f"{text}\n".encode("latin-1"))
    with pytest.raises((ValueError, OSError)) as error:
        call([*files, str(own)], *bindings)
    told = str(error.value)
    assert message in told and "\n" not in told
    assert len(told) < 300 or message != CIRCLE
    assert told == message or not message.startswith(("DOORS=-1", "`NAME`"))


def test_a_file_may_set_names_of_other_commands(files, tmp_path):
    """So one file says all of a task; METRICS is a name of `specjax evaluate`."""
    (tmp_path / "own.gin").write_text("METRICS = ('bleu',)\n")
    call([*files, str(tmp_path / "own.gin")], "NAME=x")


def test_a_scope_that_is_used_may_be_bound(files):
    wheel, *_ = call(files, "NAME=x", "vehicle.wheel=@front/Wheel()", "front/Wheel.size=3.0")
    assert wheel == Wheel(3.0)


def test_an_override_may_use_a_name(files, tmp_path):
    (tmp_path / "own.gin").write_text("SPARE = 5\n")
    found = call([*files, str(tmp_path / "own.gin")], "NAME=x", "DOORS=%SPARE")
    assert found == (Wheel(2.0), "x", 5)


def test_users_errors_are_told_and_faults_are_not(files, monkeypatch):
    gin_config.configure(files, ["NAME=vw"])
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        monkeypatch.setattr("tests.cli.test_gin_config.Wheel.__post_init__", fault, raising=False)
        gin_config.call(car)
    monkeypatch.setattr(
        "tests.cli.test_gin_config.Wheel.__post_init__",
        lambda self: check_number("size", "wide"),
        raising=False,
    )
    with pytest.raises(ValueError, match="^SIZE must be a number, got 'wide'$"):
        gin_config.call(car)


def fault(self):
    len(5)


def test_a_class_that_is_misspelt_is_told_with_the_near_one(files):
    infer.register()
    bindings = ["INPUT=a", "OUTPUT_DIR=b"]
    with pytest.raises(ValueError, match=r"did you mean FewShot\?$"):
        gin_config.configure(["runs/infer.gin"], [*bindings, "TASK=@FewSho()"])
    with pytest.raises(ValueError, match=r"Zzz is not .*FewShot, .*are texts, such as RULE = 'OPT"):
        gin_config.configure(["runs/infer.gin"], [*bindings, "VERIFICATION=@Zzz()"])


def read(file):
    text = (CONFIGS / file).read_text()
    yield text
    for included in re.findall(r"^include '(.*)'", text, re.M):
        yield from read(included)


SHIPPED = [["runs/infer.gin", f"prompts/{f.name}"] for f in (CONFIGS / "prompts").glob("*.gin")]
PAPERS = [str(f.relative_to(CONFIGS)) for f in CONFIGS.glob("papers/*/*.gin")]
SHIPPED += [
    ["runs/compare.gin" if name.endswith("/compare.gin") else "runs/infer.gin", name]
    for name in PAPERS
]
for file in (CONFIGS / "pairs").glob("*.gin"):
    # Recipes of the built-in pairs; and published pairs to decode with.
    before = [] if "runs/train" in "".join(read(file)) else ["runs/infer.gin"]
    SHIPPED.append([*before, f"pairs/{file.name}"])
SHIPPED += [["runs/train.gin", f"tasks/{f.name}"] for f in (CONFIGS / "tasks").glob("*.gin")]
SHIPPED += [
    ["runs/compare.gin", f"comparisons/{file.name}"]
    for file in (CONFIGS / "comparisons").glob("*.gin")
]


@pytest.mark.parametrize("shipped", SHIPPED, ids=" ".join)
def test_shipped_files_define_no_name_in_vain(shipped):
    text = "\n".join(text for file in shipped for text in read(file))
    names = set(re.findall(r"^(\w+) *=", text, re.M))
    assert "OUTPUT_DIR" in names
    # A task's file serves several commands.
    runs = "\n".join(file.read_text() for file in (CONFIGS / "runs").glob("*.gin"))
    assert names - set(re.findall(r"%(\w+)", text)) <= set(re.findall(r"^(\w+) *=", runs, re.M))


NAMED = [file for file in CONFIGS.rglob("*.gin") if file.parent.name != "pairs"]


@pytest.mark.parametrize("file", NAMED, ids=lambda file: file.stem)
def test_every_name_of_a_shipped_file_is_explained(file):
    lines = file.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"[A-Z_]+ = ", line):
            assert re.fullmatch(r"# .*[^:]", above), f"{line} has no comment"


@pytest.mark.parametrize(
    ("command", "told", "other"),
    [
        ("train", ["t5_mini ", "llama_mini ", "fields ", "TRAIN ", "VALIDATION "], "few_shot"),
        ("infer", ["RULE ", "few_shot ", "SHOTS ", "task_t5_wmt "], "t5_mini"),
        ("compare", ["multi30k_ende ", "METHODS ", "pair_gemma2_2b_9b "], "few_shot"),
    ],
)
def test_help_lists_the_names_and_the_files_of_the_command(capsys, command, told, other):
    with pytest.raises(SystemExit, match="0"):
        main.main([command, "--helpfull"])
    shown = capsys.readouterr().out
    for text in told:
        assert re.search(rf"^ +{text}", shown, re.M), text
    assert not re.search(rf"^ +{other} ", shown, re.M)
    names = re.findall(r"^(?:  |      )([A-Z_]{3,})( *)(.*)$", shown, re.M)
    assert len(names) >= 17
    for name, gap, text in names:
        assert len(gap) >= 2 and re.match(r"[A-Z'].*", text), name
        assert not text.startswith("Required:"), name
    assert max(map(len, shown.split("\n\nnames in ")[1].splitlines())) <= 100


@pytest.mark.parametrize(
    ("command", "lines", "first", "left_out", "files"),
    [
        ("infer", 115, "INPUT OUTPUT_DIR VERIFIER DRAFTER", "MESH_DATA", "  few_shot, gsm8k,"),
        ("compare", 110, "INPUT OUTPUT_DIR VERIFIER DRAFTER", "CANDIDATES", "multi30k_ende"),
        ("train", 85, "OUTPUT_DIR MODEL", "LIMIT", "They need TRAIN_INPUTS, TRAIN_TARGETS,"),
    ],
)
def test_the_short_help_has_the_names_that_matter_first(
    capsys, command, lines, first, left_out, files
):
    shown = {}
    for option in ("--help", "--helpfull", "--help=all"):
        with pytest.raises(SystemExit, match="0"):
            main.main([command, option])
        shown[option] = capsys.readouterr().out
    assert shown["--helpfull"] == shown["--help=all"]
    short = shown["--help"]
    names = re.findall(r"^  ([A-Z_]+)  ", short, re.M)
    assert len(names) == 20 and " ".join(names).startswith(first)
    assert left_out not in names and re.search(rf"^  {left_out} ", shown["--helpfull"], re.M)
    assert files in short and "more: --helpfull)" in short
    assert short.count("\n") < lines < shown["--helpfull"].count("\n")


def test_files_are_found_in_search_paths_before_the_package(files):
    root = Path(files[0]).parents[1]
    gin_config.configure(["runs/car.gin"], ["NAME=vw"], [str(root)])
    assert gin_config.call(car) == (Wheel(2.0), "vw", 2)
    # A folder of one's own comes before the package.
    (root / "runs" / "infer.gin").write_text("vehicle.name = 'own'\nvehicle.wheel = None\n")
    gin_config.configure(["runs/infer.gin"], [], [str(root)])
    assert gin_config.call(car) == (None, "own", 4)


def test_a_folder_of_the_same_name_hides_no_recipe(tmp_path, monkeypatch):
    """gin takes `runs` for a Python package where the working directory is searched for modules."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    infer.register()
    gin_config.configure(["runs/infer.gin"], ["INPUT=a", "OUTPUT_DIR=b"])
    assert gin.query_parameter("INPUT/macro.value") == "a"


def test_a_file_without_the_run_it_belongs_to_is_told(tmp_path):
    infer.register()
    own = tmp_path / "own.gin"
    own.write_text("STRENGTH = 1\nSetting.max_draft = %MAX_DRAFT\nSetting.top_k = %STRENGTH\n")
    with pytest.raises(ValueError, match=r"use but do not define %MAX_DRAFT; add") as error:
        gin_config.configure([str(own)], ["STRENGTH=2"])
    assert "--gin.MAX_DRAFT=..." in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match=r"INPUT: no such name; the gin files define STRENGTH; "
    ) as error:
        gin_config.configure([str(own)], ["INPUT=a.txt"])
    assert "they use MAX_DRAFT: add the file that defines" in str(error.value)


@pytest.mark.parametrize("given", [[], ["own.gin"], ["runs/infer.gin"]])
def test_the_commands_run_file_stays_unless_another_is_given(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.gin").write_text("SEED = 7\n")
    infer.register()
    gin_config.configure(given, ["INPUT=a"], default="runs/infer.gin")
    assert gin.query_parameter("SEED/macro.value") == (7 if given == ["own.gin"] else 0)
    assert str(gin.query_parameter("make_decoder.batch_size")) == "%BATCH_SIZE"


@pytest.mark.parametrize("way", ["given", "included"])
def test_another_run_file_takes_the_place_of_the_commands_own(files, tmp_path, way):
    other = tmp_path / "mine.gin"
    other.write_text(f"include {files[0]!r}\n")
    gin_config.configure(
        files if way == "given" else [str(other)], ["NAME=x"], default="runs/infer.gin"
    )
    assert gin_config.call(car) == (Wheel(2.0), "x", 2)


def test_options_are_spelt_as_in_t5x(files):
    parser = argparse.ArgumentParser()
    gin_config.add_arguments(parser, "runs/infer.gin")
    root = str(Path(files[0]).parents[1])
    args = parser.parse_args(
        [
            "--gin_file=runs/car.gin",
            f"--gin_search_paths=/tmp,{root}",
            "--gin_bindings=NAME = 'vw'",
            "--gin_bindings=DOORS = 7",
        ]
    )
    gin_config.configure_from(args)
    assert gin_config.call(car) == (Wheel(2.0), "vw", 7)
    with pytest.raises(FileNotFoundError, match="--gin_search_paths: /absent is not a folder"):
        gin_config.configure_from(
            parser.parse_args(["--gin_file=a.gin", "--gin_search_paths=/absent"])
        )


def test_the_operative_configuration_can_be_read_again(files, tmp_path):
    call(files, "NAME=it's", "DOORS=3")
    saved = tmp_path / "config.gin"
    saved.write_text(gin_config.operative_config())
    assert call([str(saved)]) == (Wheel(2.0), "it's", 3)


def test_an_argument_without_a_value_is_told(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("vehicle.doors = 3\n")
    gin_config.configure([str(path)], [])
    with pytest.raises(
        ValueError, match=r"given: vehicle.wheel, vehicle.name; add .*--gin.vehicle.wheel="
    ):
        gin_config.call(car)
    path.write_text("vehicle.name = 'a'\nvehicle.wheel = @Tyre()\n")
    gin_config.configure([str(path)], [])
    with pytest.raises(ValueError, match=r"not given: Tyre.width; add .*--gin.Tyre.width="):
        gin_config.call(car)


def chain(inner=None, fn=None):
    return (inner() if callable(inner) else inner, fn and fn.__name__)


def pipeline(data=None, first=None, second=None):
    return data, first, second


@gin.configurable(module="tests.gin")
def augment(p=0.0):
    return p


@gin.configurable(module="tests.gin")
def examples():
    return augment()


def piped(tmp_path, text, *bindings):
    """What gin's language allows: scopes, functions handed over, a user's own calls."""
    gin_config.register(chain, pipeline)
    (tmp_path / "own.gin").write_text(text)
    gin_config.configure([str(tmp_path / "own.gin")], bindings)
    return gin_config.call(pipeline)


def test_what_a_users_function_calls_may_be_bound(tmp_path):
    assert piped(tmp_path, "pipeline.data = @examples()", "augment.p=0.5")[0] == 0.5


def test_an_inner_scope_ends_what_would_be_a_circle(tmp_path):
    text = "pipeline.data = @chain()\nchain.inner = @x/chain()\nx/chain.inner = None\n"
    assert piped(tmp_path, text)[0] == ((None, None), None)


def test_an_inner_scope_that_binds_something_else_ends_no_circle(tmp_path):
    text = "pipeline.data = @chain()\nchain.inner = @x/chain()\nx/chain.fn = None\n"
    with pytest.raises(ValueError, match="define a value by itself"):
        piped(tmp_path, text)


def test_a_function_may_be_handed_to_itself(tmp_path):
    found = piped(tmp_path, "pipeline.data = @chain()\nchain.fn = @chain", "chain.inner=3")
    assert found[0] == (3, "chain")


def test_what_is_handed_over_hides_no_circle(tmp_path):
    text = "pipeline.first = @chain\npipeline.second = @chain()\nchain.inner = @pipeline()\n"
    with pytest.raises(ValueError, match="define a value by itself"):
        piped(tmp_path, text)
