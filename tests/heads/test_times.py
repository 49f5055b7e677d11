"""`specjax bench` and `specjax compare` time draft heads like any drafter; and what they refuse."""

import functools
import json

import pytest

import specjax
from specjax.checkpoints import save_draft_head, save_model
from specjax.cli import bench
from specjax.cli.main import main
from specjax.drafting import Costs
from specjax.text import setting
from tests.heads.test_pairs import GREEDY, PROMPTS, VOCAB
from tests.heads.tiny_heads import encoded_head, tiny_head
from tests.variants import variants

MAKE = {"llama": tiny_head, "t5": encoded_head}
PAIRS = [(verifier, kind) for verifier in MAKE for kind in ("eagle3", "dflash")]
# A step of the verifier takes 2.0, its passes over three tokens 3.0, the drafter's 0.5.
COSTS = Costs((2,), (3,), (0.5,), ((3.0,),), alone=(2.0,))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two verifiers, and beside each its heads."""
    directory = tmp_path_factory.mktemp("heads")
    for verifier, kind in PAIRS:
        tiny = MAKE[verifier](kind, vocab=VOCAB)
        if not (directory / verifier).exists():
            save_model(directory / verifier, tiny.verifier, tiny.verifier_params, format="hf")
        save_draft_head(
            directory / verifier / kind,
            tiny.head,
            tiny.params,
            verifier_params=tiny.verifier_params,
            verifier_name=f"some/{verifier}",
        )
    (directory / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return directory


def paths(place, verifier, kind):
    return {"verifier": place / verifier, "drafter": place / verifier / kind}


def measured(*_, with_alone, block_apart, **__):
    assert with_alone and block_apart
    return COSTS


def run_bench(place, verifier, kind, *more, monkeypatch):
    load = functools.partial(specjax.load_pair, tokenizer="bytes")
    monkeypatch.setattr(bench, "load_pair", load)
    monkeypatch.setattr(bench, "measure_costs", measured)
    models = [f"--{name}={path}" for name, path in paths(place, verifier, kind).items()]
    sizes = ["--rows=2", "--drafts=2", "--max-new=6", "--repeats=1"]
    return main(["bench", f"--inputs={place / 'prompts.txt'}", *models, *sizes, *more])


@pytest.mark.parametrize(
    ("verifier", "kind"), variants(PAIRS, ("llama", "eagle3"), ("t5", "dflash"), several=True)
)
def test_bench_says_whether_a_head_pays(place, verifier, kind, capsys, monkeypatch):
    assert run_bench(place, verifier, kind, monkeypatch=monkeypatch) == 0
    *_, verdict, line = capsys.readouterr().out.splitlines()
    assert "drafts of 2" in verdict
    (row,) = json.loads(line)["rows"]
    assert row["speedup"] > 0 and 1 <= row["tokens_per_call"] <= 3
    assert (row["c"], row["r"]) == (0.25, 1.5)
    # A round takes two passes of an EAGLE and 1.5, or one of a block and 1.5: that breaks even
    # where 1 + a + a^2 is 2, or 1.75.
    rate = {"eagle3": (5**0.5 - 1) / 2, "dflash": 0.5}[kind]
    assert row["break_even"] == pytest.approx(rate)


def run_compare(place, output, verifier, kind, *flags, **settings):
    values = {
        "INPUT": place / "prompts.txt",
        "OUTPUT_DIR": output,
        "TOKENIZER": "bytes",
        "METHODS": "('Lossless', 'OPT(0.2)')",
        "TEMPERATURES": "(0.0,)",
        "MAX_DRAFTS": "(1,)",
        "METRICS": "()",
        "BATCH_SIZE": 2,
        "LATENCY_BATCH_SIZE": 2,
        "MAX_NEW_TOKENS": 4,
        "BUCKETS": "(48,)",
        "REPEATS": 1,
        "RESAMPLES": 100,
        **{name.upper(): path for name, path in paths(place, verifier, kind).items()},
        **settings,
    }
    return main(["compare", *flags, *(f"--gin.{name}={value}" for name, value in values.items())])


@pytest.mark.parametrize(
    ("verifier", "kind"), variants(PAIRS, ("llama", "dflash"), ("t5", "eagle3"), several=True)
)
def test_compare_measures_heads(place, tmp_path, verifier, kind, capsys):
    assert run_compare(place, tmp_path / "out", verifier, kind) == 0
    captured = capsys.readouterr()
    told = "left out 1 of 4 settings that a draft head cannot do; the first is drafter alone, T=0:"
    assert told in captured.err and "depend on where their round began" in captured.err
    results = json.loads(captured.out.splitlines()[-1])
    assert (results["done"], results["failed"]) == (3, 0)
    records = map(json.loads, (tmp_path / "out/points.jsonl").read_text().splitlines())
    figures = {r["setting"]: r["figures"] for r in records if r["status"] == "done"}
    assert len(figures) == 3
    for values in figures.values():
        assert values["latency"]["value"] > 0 and values["tokens_per_verifier_call"]["value"] >= 1


REFUSED = {
    "branches of a head": (
        {"DRAFTING": "('Branches((\"drafter\", Lookup()))',)", "METHODS": "('Lossless',)"},
        "which drafters in Branches do not get",
    ),
    "a long draft": ({"MAX_DRAFTS": "(5,)"}, "max_draft must be at most 3 for this DFlash, whose"),
    "the drafter after a whole block": (
        {"MAX_DRAFTS": "(3,)"},
        "OPT(0.2), Block, G=3, T=0: OPT reads the drafter's distribution after a whole draft, but",
    ),
    "another head": ({"DRAFTERS": "('T5_HEAD',)"}, "a head for another verifier (some/t5)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_compare_refuses_what_a_head_cannot_do(place, tmp_path, name, capsys):
    settings, message = REFUSED[name]
    settings = {k: v.replace("T5_HEAD", str(place / "t5/dflash")) for k, v in settings.items()}
    assert run_compare(place, tmp_path / "out", "llama", "dflash", "--full", **settings) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("specjax compare: ") and message in line


def test_what_fits_another_draft_is_left_out(place, tmp_path, capsys):
    """OPT reads the block's drafter after a draft of 1 or 2 tokens, but not of 3."""
    settings = {"MAX_DRAFTS": "(2, 3)", "DRAFTERS": f"(None, '{place / 'llama/eagle3'}')"}
    assert run_compare(place, tmp_path / "out", "llama", "dflash", "--estimate", **settings) == 0
    # Two drafters alone, and OPT.
    assert "left out 3 of 11 settings" in capsys.readouterr().err


def test_bench_refuses_a_longer_draft_than_the_block(place, capsys, monkeypatch):
    given = ("llama", "dflash", "--drafts=5")
    assert run_bench(place, *given, monkeypatch=monkeypatch) == 2
    assert "--drafts must be at most 3 for this DFlash" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_costs_end_drafts_of_a_head(place, kind):
    """Drafts that cost nothing are as long as they may be; those that cost much are not made."""
    pair = specjax.load_pair(**paths(place, "llama", kind), tokenizer="bytes")
    shape = {"max_new_tokens": 6, "batch_size": 2, "buckets": (48,), "sampling": GREEDY}
    alone = specjax.Decoder(pair.verifier, **shape)(PROMPTS)
    for draft, drafts in ((0.0, True), (9.0, False)):
        costs = Costs((2,), (1, 2, 3), (draft,), ((1.0, 1.0, 1.0),), pair=pair.fingerprint)
        if kind == "dflash":  # the block's pass is a part of wider rounds
            wide = 1.0 + draft
            costs = Costs((2,), (1, 2, 3), (0.0,), ((1.0, wide, wide),), pair=pair.fingerprint)
        policy = specjax.drafting.CostAware(costs=costs)
        found = specjax.Decoder(pair, max_draft=2, stopping=policy, **shape)(PROMPTS)
        assert [x.tolist() for x in found.tokens] == [x.tolist() for x in alone.tokens]
        assert any(row.info.calls["drafter"] for row in found) == drafts


@pytest.mark.parametrize(
    ("verifier", "kind"), variants(PAIRS, ("llama", "dflash"), ("t5", "eagle3"), several=True)
)
def test_copies_before_a_head(place, verifier, kind):
    pair = specjax.load_pair(**paths(place, verifier, kind), tokenizer="bytes")
    shape = {"max_new_tokens": 24, "batch_size": 2, "buckets": (48,), "sampling": GREEDY}
    alone = specjax.Decoder(pair.verifier, **shape)(PROMPTS)
    both = specjax.Decoder(pair, drafting="Lookup(min_match=2, max_copy=5)", max_draft=1, **shape)
    found = both(PROMPTS)
    assert found.texts == alone.texts
    rows = found.info.per_row
    assert 0 < rows.drafter_calls.sum() < rows.verifier_calls.sum()
    assert rows.accepted_lengths[:, 2:].any(), "only a copy is longer than a draft of the head"


def test_costs_of_a_block_that_is_shorter_than_copies(place, monkeypatch):
    pair = specjax.load_pair(**paths(place, "llama", "dflash"), tokenizer="bytes")
    asked = []

    def measured(pair, rows, widths, **_):
        asked.append(widths)
        times = ((1.0,) * len(widths),) * len(rows)
        return Costs(tuple(rows), widths, (0.0,) * len(rows), times)

    monkeypatch.setattr(setting, "measure_costs", measured)
    policy, shape = specjax.drafting.CostAware(), {"batch_size": 2, "buckets": (48,)}
    specjax.Decoder(pair, drafting="Lookup(min_match=2, max_copy=7)", stopping=policy, **shape)
    assert asked == [(1, 2, 4)]
