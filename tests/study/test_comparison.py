"""A comparison in its directory: what a point has, what fails, what a kill leaves."""

import dataclasses
import importlib
import json
import shutil
import types

import jax
import numpy as np
import pytest

from specjax.data.examples import Example
from specjax.runs.evaluation import evaluate
from specjax.study import Bench, Setting, Texts, measure, plots, read_points
from specjax.study.choose import Search
from specjax.study.measure import RELATIVE, Times, prices
from specjax.study.points import CONFIG_NAME, predictions_in
from specjax.text import Decoder
from tests import tiny_pair
from tests.study import world
from tests.study.world import lines
from tests.variants import variants

compare_module = importlib.import_module("specjax.study.comparison")

ASKED = world.settings(
    {"OPT({})": (0.1, 0.5), "TokenCascade(rule=Chow({}))": 0.7, "Lossy({})": 0.4}
)
OPT, MORE, CASCADE, LOSSY = ASKED[2:]


def bench(how=None):
    decoder = Decoder(world.models(), world.VERIFIER, **world.OPTIONS)
    texts = Texts(world.EXAMPLES, world.REFERENCES)
    tokens = [decoder.encode(text) for text in world.TEXTS]
    return Bench(world.models(), texts, tokens, how or world.measuring(), world.OPTIONS)


def record_of(output, setting):
    return read_points(output).store.path((setting.key, "texts"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    output = tmp_path_factory.mktemp("compare") / "out"
    return output, world.run(output, ASKED)


@pytest.fixture
def copy(done, tmp_path):
    """A copy of the directory, to change."""
    return shutil.copytree(done[0], tmp_path / "out")


@pytest.fixture
def measured(monkeypatch):
    """The settings that are measured from here on."""
    found, own = [], compare_module.measure

    def watched(setting, bench):
        found.append(setting)
        return own(setting, bench)

    monkeypatch.setattr(compare_module, "measure", watched)
    return found


def test_a_directory_that_is_deleted_meanwhile_is_told(copy, measured):
    with pytest.raises(FileNotFoundError, match=r"/points/.* was removed meanwhile"):
        world.run(copy, ASKED, on_start=lambda run: shutil.rmtree(run.path))
    assert not measured


def test_every_setting_has_its_figures(done):
    output, results = done
    records = lines(output)
    assert [record["values"] for record in records] == [one.to_dict() for one in ASKED]
    assert results["done"] == len(ASKED) and not results["failed"]
    verifier, drafter, opt, lenient, cascade, _ = records
    for record in records:
        figures = record["figures"]
        assert record["status"] == "done" and record["seeds"] == [0, 1] and record["texts"] == 6
        for name in ("chrf", "output_length", "cut_share", "latency", RELATIVE):
            assert figures[name]["low"] <= figures[name]["value"] <= figures[name]["high"], name
        assert record["latency_of"] == {"texts": 2, "batch_size": 1, "repeats": 1}
        assert set(record["over_verifier"]) == {"chrf"}
    assert verifier["figures"][RELATIVE]["value"] == 1.0
    assert verifier["figures"]["nats_per_token"]["value"] == 0.0
    assert verifier["figures"]["deferrals_per_token"]["value"] == 1.0
    # The drafter alone is no verifier of itself.
    assert "nats_per_token" not in drafter["figures"]
    assert "deferrals_per_token" not in drafter["figures"]
    assert lenient["rule"] == "OPT(0.5)" and lenient["max_draft"] == 2
    for name in ("rejection_rate", "discard_rate", "tokens_per_verifier_call", "nats_per_token"):
        assert opt["figures"][name]["value"] is not None
    assert opt["figures"]["nats_per_token"]["error"] > 0.0
    rates = [record["figures"]["rejection_rate"]["value"] for record in (lenient, opt)]
    assert rates[0] <= rates[1]
    # Its drafter writes, but no blocks, of which anything could be rejected.
    assert 0.0 < cascade["figures"]["deferrals_per_token"]["value"] < 1.0
    assert cascade["figures"]["drafter_share"]["value"] > 0.0
    for name in ("rejection_rate", "discard_rate", "nats_per_token", "impossible_share"):
        assert cascade["figures"][name]["value"] is None, name
    ours, theirs = (r["figures"]["chrf"]["value"] for r in (opt, verifier))
    # Without costs and estimates two plots are empty.
    absent = ("quality_cost", plots.ACCEPTANCE)
    for file in (file for file in plots.FILES if file.partition(".")[0] not in absent):
        head = b"\x89PNG" if file.endswith("png") else b"%PDF"
        assert (output / file).read_bytes().startswith(head)
    assert (output / "settings.csv").read_text().count("\n") == 1 + len(ASKED)
    assert "OPT" in (output / "table_2.csv").read_text()
    assert opt["over_verifier"]["chrf"]["value"] == pytest.approx(ours - theirs)


class Late:
    """A decoder that compiles a program of its own at the second text, as a deferral may."""

    def __init__(self, decoder, *, always):
        self._decoder = decoder
        self._own = jax.jit(lambda x: x + 1.0)
        self._always, self.asked = always, []

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def __call__(self, prompts, *, ids, **options):
        self.asked.append(ids[0])
        if ids == [1]:
            own = jax.jit(lambda x: x + 1.0) if self._always else self._own
            own(1.0)
        return self._decoder(prompts, ids=ids, **options)


@pytest.fixture
def late(monkeypatch):
    """The decoders of OPT, which compile late; `always` is of those that are made from here on."""
    made, own = types.SimpleNamespace(decoders=[], always=False), Bench.decoder

    def decoder(self, setting, batch_size):
        found = own(self, setting, batch_size)
        if setting != OPT:
            return found
        made.decoders.append(Late(found, always=made.always))
        return made.decoders[-1]

    monkeypatch.setattr(Bench, "decoder", decoder)
    return made


def test_no_time_has_compiling_in_it(late):
    # One text warms; of two seeds the first compiles at the second text, which is timed again.
    measure(OPT, bench())
    assert late.decoders[-1].asked == [0, 0, 1, 1, 0, 1]
    # A text that compiles whenever it runs is timed three times with each seed.
    late.always = True
    measure(OPT, bench())
    assert late.decoders[-1].asked == [0, 0, 1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(("size", "limit", "calls"), [(1, 6, 14), (1, 3, 8), (2, 5, 5)])
def test_a_timed_text_is_decoded_once_if_the_batch_sizes_are_equal(done, late, size, limit, calls):
    """Calls of two seeds, one that warms, and one after the compilation at text 1."""
    how = world.measuring(batch_size=size, latency_batch_size=size, latency_limit=limit)
    measured = measure(OPT, bench(how))
    assert len(late.decoders) == 1 and len(late.decoders[0].asked) == calls
    for rows, known in zip(measured.rows, read_points(done[0]).measured(OPT).rows, strict=True):
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in known]
    # The tokens of a pass are those of the timed texts.
    rounds = sum(
        max(row["info"]["verifier_calls"] for row in rows[i : i + size])
        for rows in measured.rows
        for i in range(0, limit - size + 1, size)
    )
    assert measured.times.passes.sum() == rounds


def test_another_temperature_compiles_nothing_and_has_a_verdict_of_its_own(done, tmp_path):
    greedy = [dataclasses.replace(one, temperature=0.0) for one in ASKED[:3]]
    results = world.run(tmp_path / "out", [*ASKED[:3], *greedy])
    records = lines(tmp_path / "out")
    assert [len(record["seeds"]) for record in records] == [2, 2, 2, 1, 1, 1]
    assert lines(done[0])[2]["process"]["compiled"] > 0, "the count counts nothing"
    assert all(record["process"]["compiled"] == 0 for record in records)
    found = [Setting(**verdict["setting"]) for verdict in results["verdicts"]]
    assert found == [world.VERIFIER, greedy[0]]


def test_a_setting_writes_the_same_in_any_part_of_the_texts(done):
    """As of a choice, which other texts confirm."""
    found = read_points(done[0]).measured(OPT)
    assert found.rows[0][0]["inputs"] == world.TEXTS[0]
    parts = [measure(OPT, bench().part(*place)) for place in ((0, 2), (2, 6))]
    for kept, *rows in zip(found.rows, *(part.rows for part in parts), strict=True):
        assert [r["tokens"] for part in rows for r in part] == [r["tokens"] for r in kept]
    assert measure(world.VERIFIER, bench().part(2, 5)).verifier_times is None


def test_a_directory_of_settings_is_evaluated(done, tmp_path):
    output, _ = done
    scores = evaluate(
        types.MappingProxyType({"all": output}),
        metrics=(),
        bootstrap=world.measuring().bootstrap,
        compared=predictions_in,
    )
    for one, known in read_points(output).scored().items():
        figures = scores["methods"][one.described()]["figures"]
        for name in {*known.figures} & {*figures}:
            assert figures[name] == known.figures[name], (one.described(), name)
    recorded = []
    scores = evaluate(
        output,
        metrics=(),
        costs={"verifier": 1.0, "drafter": 0.25},
        compared=predictions_in,
        output_dir=tmp_path / "scores",
        on_start=lambda run, paths: recorded.append(paths),
    )
    assert recorded == [{str(output): str(output)}]
    # The drafter alone has its own cost, and the verifier has not read its texts.
    figures = scores["methods"][world.DRAFTER.described()]["figures"]
    assert figures["cost_per_token"]["value"] == 0.25 and "deferrals_per_token" not in figures
    for name in ("tokens_per_verifier_call", "nats_per_token", "impossible_share"):
        assert figures[name]["value"] is None, name
    assert predictions_in(tmp_path) is None


def test_a_done_run_measures_nothing_and_a_larger_grid_what_is_new(copy, measured):
    before = lines(copy)
    world.run(copy, [*ASKED, Setting(rule="OPT(0.3)", max_draft=2)])
    assert measured == [Setting(rule="OPT(0.3)", max_draft=2)]
    after = lines(copy)
    assert after[:-1] == before and len(after) == len(ASKED) + 1
    # An earlier grid's points stay.
    assert world.run(copy, ASKED)["done"] == len(ASKED) + 1 and sorted(lines(copy), key=str) == (
        sorted(after, key=str)
    )


def test_a_failing_setting_is_told_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    head = Setting(stopping="Survival(HeadEstimate(), 0.5)", max_draft=2)
    asked, own = [*ASKED[:2], head, OPT], Bench.decoder

    def decoder(self, setting, batch_size):
        if setting == OPT and full_memory:
            raise MemoryError("no room")
        return own(self, setting, batch_size)

    monkeypatch.setattr(Bench, "decoder", decoder)
    full_memory = True
    results = world.run(tmp_path / "out", asked)
    records = lines(tmp_path / "out")
    assert [r["status"] for r in records] == ["done", "done", "failed", "failed"]
    assert results["done"] == 2 and results["failed"] == 2
    assert "head" in records[2]["error"]
    assert records[3]["error"] == "MemoryError: no room" and "decoder" in records[3]["traceback"]
    assert "failed: MemoryError: no room" in capsys.readouterr().err
    full_memory = False
    # What failed is tried again, what is done is not.
    world.run(tmp_path / "out", asked)
    again = lines(tmp_path / "out")
    assert [r["status"] for r in again] == ["done", "done", "failed", "done"]
    assert again[:3] == records[:3]


def test_without_the_verifier_there_is_nothing_to_compare_with(tmp_path, monkeypatch):
    own = Bench.decoder
    asked = world.settings({"OPT({})": 0.1}, temperatures=(1.0, 0.0))

    def decoder(self, setting, batch_size):
        if setting.method == "VerifierAlone" and setting.temperature == 0.0:
            raise ValueError("broken")
        return own(self, setting, batch_size)

    monkeypatch.setattr(Bench, "decoder", decoder)
    results = world.run(tmp_path / "out", asked)
    assert [r["status"] for r in lines(tmp_path / "out")] == 3 * ["done"] + 3 * ["failed"]
    assert len(results["table_2"]) == 1
    told = results["failures"][asked[-1].described()]
    assert told == "the verifier alone failed, so there is no baseline"


def test_another_run_is_refused(copy):
    swapped = {**world.models(), "drafter": world.models()["verifier"]}
    for changes, told in (
        ({"how": world.measuring(num_samples=3)}, "num_samples: 2 there, 3"),
        ({"references": world.REFERENCES[::-1]}, "texts"),
        ({"options": {**world.OPTIONS, "max_new_tokens": 9}}, "max_new_tokens"),
        ({"make_models": lambda: swapped}, "drafter"),
    ):
        with pytest.raises(ValueError, match=f"has a run of another configuration .*{told}"):
            world.run(copy, ASKED, **changes)


FURTHER = [
    Setting(rule="OPT(0.1)", max_draft=2, drafter="small"),
    Setting(drafting="Cascade(((2, 1), (0, 1)), ('drafter', 'small'))"),
]


@pytest.mark.parametrize("setting", variants(FURTHER, FURTHER[0]))
def test_another_further_drafter_is_refused(tmp_path, setting):
    first, second = ({**world.models(), "small": tiny_pair.tabular(seed)} for seed in (3, 4))
    assert not world.run(tmp_path / "out", [setting], make_models=lambda: first)["failed"]
    with pytest.raises(ValueError, match="was measured with another model 'small'"):
        world.run(tmp_path / "out", [setting], make_models=lambda: second)


def test_another_drafter_is_estimated_again(tmp_path):
    asked = [world.VERIFIER, Setting(drafter="small", max_draft=2)]
    found = []
    for seed in (3, 4):
        models = {**world.models(), "small": tiny_pair.tabular(seed)}
        how = {"measured": "none", "make_models": lambda m=models: m}
        world.run(tmp_path / "out", asked, **how)
        found.append(lines(tmp_path / "out")[1]["expected"]["acceptance"])
    assert found[0] != found[1]


COLD = world.settings({"Lossless": None}, (1.0, 0.0))
NO_REFERENCES = {"references": [()] * 6}


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        (COLD, {"search": Search(max_loss=0.0)}, "need one .temperature, top_k"),
        (
            ASKED[:2],
            {"search": Search(max_latency=0.9), **NO_REFERENCES},
            "need a measured quality",
        ),
        # Lossy settings need a quality for a limit on its loss.
        (
            ASKED[:3],
            {"search": Search(max_loss=0.0), **NO_REFERENCES},
            "need a measured quality: gi",
        ),
        ([], {}, "settings must be a Grid or a list of Settings, got"),
        ([world.VERIFIER, "OPT(0.1)"], {}, "settings must be a Grid or a list of Settings, got"),
        (ASKED, {"examples": [Example(0, " "), *world.EXAMPLES[1:]]}, "text 0 is empty"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(tmp_path, asked, changes, message):
    with pytest.raises(ValueError, match=message):
        world.run(tmp_path / "out", asked, **changes)
    assert not (tmp_path / "out").exists()


def test_the_verifier_alone_is_always_compared_and_failures_of_other_grids_do_not_count(tmp_path):
    head = Setting(stopping="Survival(HeadEstimate(), 0.5)", max_draft=2)
    results = world.run(tmp_path / "out", [head])
    assert (results["done"], results["failed"]) == (1, 1)
    results = world.run(tmp_path / "out", [OPT])
    assert not results["failed"] and results["failures"] == {} and results["done"] == 2
    found = [(line["method"], line["status"]) for line in lines(tmp_path / "out")]
    assert found == [("VerifierAlone", "done"), (None, "done"), (None, "failed")]


def test_a_damaged_record_is_refused_and_a_lost_one_measured_again(done, copy, measured):
    path = record_of(copy, CASCADE)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=path.name):
        world.run(copy, ASKED)
    assert not measured
    path.unlink()
    assert world.run(copy, ASKED)["done"] == len(ASKED) and measured == [CASCADE]
    again, known = (read_points(place).measured(CASCADE) for place in (copy, done[0]))
    assert again.rows == known.rows


def test_passes_are_priced(tmp_path):
    how = world.measuring(costs={"verifier": 1, "drafter": 0.25, "other": 0.5})
    output = tmp_path / "out"
    world.run(output, ASKED[:3], how=how)
    found = [record["figures"]["cost_per_token"]["value"] for record in lines(output)]
    rows = [row["info"] for of_seed in read_points(output).measured(OPT).rows for row in of_seed]
    verifier, drafter = (sum(r["calls"][name] for r in rows) for name in ("verifier", "drafter"))
    assert found[:2] == [1.0, 0.25] and drafter > 0  # a pass of a model alone is a token
    emitted = sum(row["emitted"] for row in rows)
    assert found[2] == pytest.approx((verifier + 0.25 * drafter) / emitted)
    assert (output / "quality_cost.png").exists()
    # Another drafter has a price of its own, or none.
    other = Setting(method="DrafterAlone", drafter="other")
    assert prices(other, how.costs) == {"verifier": 0.5}
    assert prices(dataclasses.replace(OPT, drafter="other"), how.costs)["drafter"] == 0.5
    assert prices(dataclasses.replace(other, drafter="unknown"), how.costs) is None


def test_without_references_speed_and_divergence_are_compared(tmp_path, capsys):
    bucket = {"options": {"max_new_tokens": 2}, "one_bucket": True}
    results = world.run(tmp_path / "out", ASKED[:3], **NO_REFERENCES, **bucket)
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    assert config["options"]["buckets"] == [16]  # it holds all prompts
    assert results["quality"] is None and results["table_2"] == []
    assert "there are no references" in capsys.readouterr().err
    assert {"speedup", "nats_per_token"} <= {*results["best"][0]}
    assert not (tmp_path / "out" / "quality_latency.png").exists()


def test_times_are_of_the_median_repeat_and_the_mean_seed():
    seconds = np.array([[[1.0], [9.0], [2.0]], [[4.0], [4.0], [4.0]]])  # 2 seeds, 3 repeats
    times = Times(seconds, *2 * (np.ones((2, 1), int),))
    assert times.usual.tolist() == [3.0]


def test_a_constraint_that_needs_several_tokens_is_measured():
    setting = dataclasses.replace(world.VERIFIER, processors=('Regex("[a-z]{3,6}")',))
    measured = measure(setting, bench())
    assert all(len(row["tokens"]) > 1 for rows in measured.rows for row in rows)


def test_programs_of_large_models_are_dropped_where_the_next_setting_needs_others(
    tmp_path, measured, monkeypatch
):
    dropped = []
    monkeypatch.setattr(compare_module, "_LARGE", 0)
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(len(measured)))
    world.run(tmp_path / "out", ASKED)
    assert measured == ASKED
    assert dropped == [1, 2, 4, 5, 6]  # another strength needs no other
