"""A value or a file of gin is understood, or refused in one line that names it."""

import ast
import contextlib
import dataclasses
import re
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzzing.law import assert_untouched, contents, scratch, start
from tests.fuzzing.world import CONFIG, World

MACROS = [
    "INPUT", "OUTPUT_DIR", "VERIFIER", "DRAFTER", "TOKENIZER", "DTYPE", "WEIGHTS", "MAX_DRAFT",
    "VERIFICATION", "TEMPERATURE", "TOP_K", "TOP_P", "MAX_NEW_TOKENS", "BATCH_SIZE", "SEED",
    "FORMAT", "INPUTS_FIELD", "TARGETS_FIELD", "SPLIT", "CHAT",
]  # fmt: skip
PARAMETERS = [
    "make_decoder.buckets", "Setting.rule", "Setting.temperature", "Setting.max_draft",
    "Setting.verification", "infer.make_decoder", "infer.source", "infer.progress",
    "infer.allow_other_environment", "load_models.mesh", "load_models.check_weights",
    "mesh_of.data", "mesh_of.model", "specjax.Setting.top_k", "a/Setting.top_k",
    "a/b/infer.seed", "Lossless.x", "OPT.strength",
]  # fmt: skip
# What a macro sets, by which messages name it.
PARAMETER_OF = {macro: name for name, macro in re.findall(r"\.(\w+) = %(\w+)", CONFIG.read_text())}
STRANGE = [
    "", " ", "NOPE", "SED", "setting.buckets", "Setting", "Setting.", ".x", "Setting.nope", "a.b.c",
    "a..b", "1x", "S EED", "SEED\0", "SEED\n", "é", "\ud800", "%SEED", "@Setting", "include 'x'.y",
    "import os.x", "gin.macro", "SEED/macro.value", "/SEED", "a/", "a//b.c", "'SEED'", "(SEED)",
    "SEED # x", "infer.seed.x", "lambda.x", "None", "infer.on_start", "x" * 5000,
]  # fmt: skip
VALUES = [
    "", "None", "True", "-1", "0", "1", "0.5", "1e400", "-0.0", "1_0", "01", "0x1", "1j", "x",
    "'x'", '"', "'", "'''", "'a\\nb'", "'\\0'", "'\\ud800'", "\\", "a\nb", "a\rb", "a\0b", "é",
    "\ud800", "[1", "1]", "(", ")", "{", "(1,)", "(8, 4)", "('a', None)", "[]", "{}", "{'a': 1}",
    "{[]: 1}", "[" * 300, "(" * 5000, "-" * 5000 + "1", "1" * 5000, "b'x'", "...", "lambda: 1",
    "__import__('os')", "1 if 1 else 2", "x#y", "#", "a=b", "=", ";", "@", "%", "@@x", "@Setting",
    "@Setting()", "@infer", "@infer()", "@Block", "@Block()", "@a/b/Block()", "@Nope()",
    "@Block(1)", "@Block ()", "[@Block(), @Token()]", "{'a': @Lossless()}",
    "%SEED", "%NOPE", "%a/b", "% SEED",
    "%gin.REQUIRED", "%SEED.x", "[%SEED]", "@load_models()", "@make_decoder", "@gin.macro",
    "/", "..", "~", "~nobody/x", "seqio:x", "/dev/null/x", "x/" * 3000, "x" * 300, ".", "in.gin",
]  # fmt: skip
# Nothing is allocated by these.
HUGE = ["10" * 9, "-" + "9" * 30, "9" * 400, "1e308"]
_ALLOCATES = re.compile("MAX_|BATCH|buckets|max_|mesh|gin_|LAYERS")

# Lines that change nothing.
NEUTRAL = [
    "", "# a comment", "import json", "unused/Setting.top_k = 3", "import os.path",
    "from os import path", "   # indented",
]  # fmt: skip
LINES = [
    "A = %B\nB = %A\ninfer.seed = %A", "A = %A\ninfer.seed = %A", "A = [%B]\nB = {'x': %A}",
    "include 'own.gin'", "include 'nope.gin'", "include ''", "include '.'", "include '/'",
    "include 'binary.gin'", "include 'cut.gin'", "include 'runs/infer.gin'", "include 'a\\0b'",
    "include x", "include", "include 'back.gin'", "import", "import nope", "import json.nope",
    "from json import nope", "from . import x", "import specjax.nope", "import 5", "  SEED = 1",
    "SEED = \\", "SEED = (1,\n 2", "SEED = 1)", "SEED == 1", "SEED 1", "= 1", "SEED =", "infer:",
    "infer:\n  seed = 1", "infer:\n  nope = 1", "infer:\nseed = 1", "class X: pass", "\0", "\x0c",
    "\ud800", "é = 1", "\tSEED = 1", "infer.seed = @infer()", "infer.make_decoder = @a/Setting",
    "a/Setting.verification = @Setting()", "Setting.rule = @Setting()", "(" * 5000, "[" * 300,
    "x = " + "1" * 5000, "infer.seed = infer", "SEED = 'a\n", '"""', "SEED = '''a\nb'''",
    "infer.make_decoder = @infer", "infer.make_decoder = @Block",
    "load_models.verifier = @load_models()",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Binding:
    """`NAME=value`, on the command line or in a file."""

    name: str
    value: str

    @property
    def fits(self) -> bool:
        """Whether it takes no more time and memory than other starts."""
        built_in = self.name in ("VERIFIER", "DRAFTER") and self.value in ("None", "%DRAFTER")
        # And a line break in a name breaks the line that tells of a success.
        place = self.name == "OUTPUT_DIR" and self.value in ("/", "..", "'a\\nb'")
        return not built_in and not place


def _bindings() -> st.SearchStrategy[Binding]:
    names = st.one_of(
        *[st.sampled_from(MACROS), st.sampled_from(PARAMETERS)] * 2, st.sampled_from(STRANGE)
    )

    def values(name: str) -> st.SearchStrategy[Binding]:
        pool = VALUES if _ALLOCATES.search(name) else VALUES + HUGE
        return st.builds(Binding, st.just(name), st.sampled_from(pool))

    return names.flatmap(values).filter(lambda binding: binding.fits)


def law_of_values(world: World, bindings: list[Binding]) -> None:
    with scratch() as place:
        (place / "in.gin").write_text("SEED = 1\n")
        given = [f"--gin.{binding.name}={binding.value}" for binding in bindings]
        before = contents(place)
        ended = start(world.command("out", "hf", *given))
        if ended.status:
            assert contents(place) == before
            named = [word for b in bindings for word in _words(b)]
            assert any(re.search(_whole(word), ended.refusal) for word in named), (
                ended.refusal,
                named,
            )
            _assert_the_default_works(world, place)
        else:
            assert_untouched(before, _old(before, contents(place)), set())


def _words(binding: Binding) -> list[str]:
    """What names a binding: a part of its name, its parameter, or the value as text or as read."""
    parts = re.findall(r"\w+", binding.name)
    words = [PARAMETER_OF.get(part, part) for part in parts] + [*parts, binding.name]
    # A text file has no fields: that message has neither word.
    words += ["field"] if "FIELD" in binding.name else []
    words += [binding.value, binding.value.strip("'\"@%() "), binding.value.rpartition("/")[2]]
    words += [str(Path.cwd())] if binding.value.startswith("~") else []
    with contextlib.suppress(Exception):
        words += [str(ast.literal_eval(binding.value))]
    return [" ".join(word.split()) for word in words if word.strip()] + ["--gin.:"]


def _whole(word: str) -> str:
    return rf"(?<!\w)(?i:{re.escape(word)})(?!\w)"


def _old(before, after):
    return {name: what for name, what in after.items() if name in before}


def _assert_the_default_works(world: World, place: Path) -> None:
    """Nothing of a refused start stays, neither on the disk nor in the process."""
    assert start(world.command(place / "fine")).status == 0
    assert (place / "fine/predictions.jsonl").read_bytes() == world.lines["hf"]


def _lines() -> st.SearchStrategy[str]:
    bound = _bindings().map(lambda binding: f"{binding.name} = {binding.value}")
    return st.one_of(st.sampled_from(NEUTRAL), st.sampled_from(LINES), bound)


def law_of_files(world: World, lines: list[str]) -> None:
    with scratch() as place:
        text = "\n".join(lines) + "\n"
        (place / "own.gin").write_bytes(text.encode(errors="surrogatepass"))
        (place / "back.gin").write_text("include 'own.gin'\n")
        (place / "binary.gin").write_bytes(bytes(range(256)))
        (place / "cut.gin").write_text("SEED = (1,")
        before = contents(place)
        argv = world.command("out")
        ended = start([*argv[:2], "--gin_file=own.gin", *argv[2:]])
        if ended.status:
            assert contents(place) == before
            words = {"own.gin", *re.findall(r"\w{3,}", text.lower())}
            assert any(word in ended.refusal.lower() for word in words), ended.refusal
            _assert_the_default_works(world, place)
        else:
            assert_untouched(before, _old(before, contents(place)), set())
            if set(lines) <= set(NEUTRAL):
                assert Path("out/predictions.jsonl").read_bytes() == world.lines["hf"]


VALUES_CASE = st.lists(_bindings(), min_size=1, max_size=2)
FILES_CASE = st.lists(_lines(), min_size=1, max_size=4)
