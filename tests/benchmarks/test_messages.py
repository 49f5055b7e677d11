"""What is typed after `python -m benchmarks.`, and what its one line says, before any work.

A capital word stands for what `WORDS` says.
"""

import importlib
import re
import shlex

import pytest

from tests import tiny_pair

PAIR = "--drafter=pair/drafter --verifier=pair/verifier --inputs=four.txt"
SMALL = f"{PAIR} --max-new=6 --repeats=1"
WORDS = {
    "PAIR": PAIR,
    "CASCADES": f"{SMALL} --prompts=2 --temperatures 0 --drafters pair/drafter --drafts 2 1",
    "COSTS": f"{SMALL} --rows=2 --max-draft=3 --held-out=2",
    "LOOP": f"{SMALL} --rows=2 --drafts=2 --temperatures=0",
    "MODELS": "--models tiny --steps 2 --repeats 1",
    "PEERS": f"{SMALL} --drafts=2 --pilot=1",
    "STOPPING": f"{SMALL} --max-draft=2 --prompts=4 --temperatures 0 --fixed 1 2 --confidence 0.06 "
    "--entropy --online --head",
    "TREES": "--pairs=multi30k_ende --prompts=4 --drafted 3 --depth=3 --widest=2 --temperatures 0 "
    "--like llama3_8b+llama3.2_1b --chips v5e",
}
TYPED = """
cascades CASCADES --drafts Lookup()
    --drafts must have a number of tokens of one drafter
cascades CASCADES --repeats=0
    --repeats must be at least 1, got 0
costs COSTS --rows 2 1
    --rows must increase, got [2, 1]
costs COSTS --rows 3
    has 4 prompts, but --rows 3 needs 6, half of them to predict
costs COSTS --max-draft=0
    --max-draft must be at least 1, got 0
costs COSTS --held-out 4
    --held-out must lie in 0 .. --max-draft = 3, got 4
costs COSTS --held-out 2 3
    2 3 leaves no draft whose verifier's pass reads 4 tokens
divergences --data-dir none --steps 0
    --steps must be at least 1, got 0
divergences --data-dir none
    none
estimates PAIR --prompts=99
    has 4 prompts, but --screened and --prompts need
kinds --verifier=x
    no requests: give --human-eval, --mbpp or --spec-bench
kinds --verifier=x --mbpp=absent.jsonl
    absent.jsonl
kinds --verifier=x --mbpp=wrong.jsonl
    wrong.jsonl:1: the line has no task_id: give another file
kinds --verifier=x --mbpp=wrong.jsonl --temperature=-1
    temperature must be
kinds --verifier=x --mbpp=wrong.jsonl --drafting=Lookop
    Lookop
loop
    give --inputs, or --pair
loop LOOP --rows=9
    has 4 prompts, but a batch needs 9
loop LOOP --drafts=0
    --drafts must be at least 1, got [0]
loop LOOP --max-new=2000000000
    give a smaller --max-new or --rows, or shorter prompts
models MODELS --tokens 0
    --tokens must be at least 1, got [0]
models MODELS --max-length 4
    --steps 2 plus --tokens 16 exceed --max-length 4: raise it
models MODELS --rows 0
    --rows must be at least 1, got 0
peers PEERS --drafts=0
    --drafts must be at least 1, got [0]
peers PEERS --prompts=0
    --prompts must be at least 1, got 0
peers PEERS --pilot=0
    --pilot must be at least 1, got 0
peers PEERS --inputs=/missing.txt
    /missing.txt
peers PEERS --drafter=/missing
    /missing
peers PEERS --inputs=long.txt
    prompt 2 has
predicted --acceptance 1.5
    --acceptance must lie in [0, 1], got 1.5
predicted --rows 0
    --rows must be at least 1
predicted --ways 3
    --ways must divide the 64 heads of
predicted --rows 1000000
    the most chips that divide its 64 heads: give fewer --rows
predicted --verifiers llama2_13b
    --drafter is needed
quantised --inputs four.txt
    there must be a reference per input: give --fields
served --inputs=nowhere --streams=0
    --streams must be at least 1
served --inputs=nowhere --seconds=0
    --seconds must be at least 1
stopping STOPPING --fixed 0
    --fixed must be at least 1, got 0
stopping STOPPING --fixed
    --fixed must have at least one draft length
stopping STOPPING --confidence 2
    Confidence: threshold must lie in [0, 1], got 2.0
stopping STOPPING --costs=/missing.json
    /missing.json cannot be read
stopping STOPPING --widths 1 2
    widths
stopping STOPPING --plot=/missing/plot.png
    /missing is not a directory: make it
stopping STOPPING --choose=/missing.txt
    /missing.txt
stopping STOPPING --rows=9
    has 4 prompts, but a batch needs 9
tpu.run --pairs t5_huge
    --pairs must be one of t5, t5_xl, gemma2, llama3, or VERIFIER
tpu.run --layers 2 two
    --layers must be all, one depth or two depths, got 2 two
tpu.run --meshes 2
    --meshes must be DATAxMODEL, such as 2x2, got '2'
tpu.run --rows 0
    --rows must be at least 1
trees TREES --drafted=0
    --drafted must be at least 1
trees TREES --apart=64
    --prompts 4 and --apart 64 need 68 prompts, but
trees TREES --apart=-1
    --apart
trees TREES --like=llama3_8b
    --like must be VERIFIER+DRAFTER, got 'llama3_8b'
trees TREES --drafter=small
    --drafter and --verifier need --inputs
trees TREES --temperatures=-1
    --temperatures must be
"""
CASES = re.findall(r"^(\S+) ?(.*)\n +(.*)$", TYPED, re.M)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair").symlink_to(tiny_pair.shared_pair()["verifier"].parent)
    (tmp_path / "four.txt").write_text("ba\nde\nki\nlo\n")
    (tmp_path / "wrong.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "long.txt").write_text("ba\n" + "ba " * 2000 + "\n")


@pytest.mark.parametrize(("name", "typed", "told"), CASES)
def test_what_is_typed_gets_one_line(capsys, name, typed, told):
    if name == "peers":
        pytest.importorskip("torch")
    words = []
    for word in shlex.split(typed):
        words += shlex.split(WORDS[word]) if word in WORDS else [word]
    assert importlib.import_module(f"benchmarks.{name}").main(words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1, error
