"""A comparison in its directory: what a point has, what fails, what a kill leaves."""

import contextlib
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
from specjax.runs.run_directory import Store
from specjax.study import Bench, Setting, Texts, measure, plots, read_points
from specjax.study.choose import Search
from specjax.study.measure import RELATIVE, Measured, Times, prices
from specjax.study.points import CONFIG_NAME, predictions_in
from specjax.study.texts import Prompting
from specjax.text import Decoder
from tests import tiny_pair
from tests.study import world

compare_module = importlib.import_module("specjax.study.comparison")

ASKED = world.settings(
    {"OPT({})": (0.1, 0.5), "TokenCascade(rule=Chow({}))": 0.7, "Lossy({})": 0.4}
)
OPT, MORE, CASCADE, LOSSY = ASKED[2:]


def lines(output):
    records = map(json.loads, (output / "points.jsonl").read_text().splitlines())
    return [record | record["values"] for record in records]


def without_times(record):
    """What does not depend on how fast the machine was."""
    figures = record.get("figures", {})
    kept = {k: v for k, v in figures.items() if "latency" not in k and "time" not in k}
    rest = {k: v for k, v in record.items() if k not in ("process", "traceback")}
    return rest | {"figures": kept}


def bench(how=None):
    decoder = Decoder(world.models(), world.VERIFIER, **world.OPTIONS)
    texts = Texts(world.EXAMPLES, world.REFERENCES)
    tokens = [decoder.encode(text) for text in world.TEXTS]
    return Bench(world.models(), texts, tokens, how or world.measuring(), world.OPTIONS)


def record_of(output, setting):
    """The file of a setting's record."""
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


@pytest.mark.parametrize("removed", ["", "points"])
def test_a_directory_that_is_deleted_meanwhile_is_told(copy, measured, removed):
    with pytest.raises(FileNotFoundError, match=r"/points/.* was removed meanwhile"):
        world.run(copy, ASKED, on_start=lambda run: shutil.rmtree(run.path / removed))
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
    assert opt["over_verifier"]["chrf"]["value"] == pytest.approx(ours - theirs)


def test_settings_of_one_rule_share_their_programs(done):
    _, _, first, second, *_ = lines(done[0])
    assert first["process"]["compiled"] > 0, "the count counts nothing"
    assert second["process"]["compiled"] == 0


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


@pytest.mark.parametrize("always", [False, True])
def test_no_time_has_compiling_in_it(monkeypatch, always):
    made, own = [], Bench.decoder

    def decoder(self, setting, batch_size):
        found = own(self, setting, batch_size)
        if setting != OPT:
            return found
        made.append(Late(found, always=always))
        return made[-1]

    monkeypatch.setattr(Bench, "decoder", decoder)
    measure(OPT, bench())
    if always:
        # A text that compiles whenever it runs is timed three times with each seed.
        assert made[-1].asked == [0, 0, 1, 1, 1, 0, 1, 1, 1]
    else:
        # One text warms; of two seeds the first compiles at the second text, which is timed again.
        assert made[-1].asked == [0, 0, 1, 1, 0, 1]


def test_another_temperature_compiles_nothing(done, tmp_path):
    greedy = [dataclasses.replace(one, temperature=0.0) for one in ASKED[:3]]
    world.run(tmp_path / "out", [*ASKED[:3], *greedy])
    records = lines(tmp_path / "out")
    assert [len(record["seeds"]) for record in records] == [2, 2, 2, 1, 1, 1]
    assert all(record["process"]["compiled"] == 0 for record in records)


def test_a_setting_writes_the_same_in_any_part_of_the_texts(done):
    """As of a choice, which other texts confirm."""
    found = read_points(done[0]).measured(OPT)
    assert found.rows[0][0]["inputs"] == world.TEXTS[0]
    parts = [measure(OPT, bench().part(*place)) for place in ((0, 2), (2, 6))]
    for kept, *rows in zip(found.rows, *(part.rows for part in parts), strict=True):
        assert [r["tokens"] for part in rows for r in part] == [r["tokens"] for r in kept]
    assert measure(world.VERIFIER, bench().part(2, 5)).verifier_times is None


@pytest.mark.parametrize(("size", "limit", "calls"), [(1, 6, 14), (1, 3, 8), (2, 5, 5)])
def test_a_timed_text_is_decoded_once_if_the_batch_sizes_are_equal(
    done, monkeypatch, size, limit, calls
):
    """Calls of two seeds, one that warms, and one after the compilation at text 1."""
    made, own = [], Bench.decoder

    def decoder(self, setting, batch_size):
        made.append(Late(own(self, setting, batch_size), always=False))
        return made[-1]

    monkeypatch.setattr(Bench, "decoder", decoder)
    how = world.measuring(batch_size=size, latency_batch_size=size, latency_limit=limit)
    measured = measure(OPT, bench(how))
    assert len(made) == 2 and len(made[0].asked) == calls
    for rows, known in zip(measured.rows, read_points(done[0]).measured(OPT).rows, strict=True):
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in known]
    # The tokens of a pass are those of the timed texts.
    rounds = sum(
        max(row["info"]["verifier_calls"] for row in rows[i : i + size])
        for rows in measured.rows
        for i in range(0, limit - size + 1, size)
    )
    assert measured.times.passes.sum() == rounds


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


def test_what_was_measured_is_read_as_it_was(done):
    found = read_points(done[0]).measured(OPT)
    again = Measured.of_record(*found.to_record())
    assert again.rows == found.rows and again.seeds == [0, 1]
    for name in ("times", "verifier_times"):
        for field in ("seconds", "tokens", "passes"):
            ours, theirs = (getattr(getattr(one, name), field) for one in (again, found))
            np.testing.assert_array_equal(ours, theirs)


def test_figures_are_drawn_and_tables_written(done):
    output, _ = done
    # It has no costs and no estimates.
    absent = ("quality_cost", plots.ACCEPTANCE)
    for file in (file for file in plots.FILES if file.partition(".")[0] not in absent):
        head = b"\x89PNG" if file.endswith("png") else b"%PDF"
        assert (output / file).read_bytes().startswith(head)
    assert (output / "settings.csv").read_text().count("\n") == 1 + len(ASKED)
    assert "OPT" in (output / "table_2.csv").read_text()


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


class Killed(BaseException):
    """Ends a process without a word to anything that catches errors."""


@pytest.mark.parametrize("moment", ["measure", "put"])
def test_a_killed_run_goes_on_with_the_same_points(done, tmp_path, monkeypatch, moment):
    output = tmp_path / "out"
    where = compare_module if moment == "measure" else Store
    own = getattr(where, moment)

    def dies(*args, **others):
        setting_or_key = args[0] if moment == "measure" else args[1]
        if setting_or_key in (MORE, (MORE.key, "texts")):
            raise Killed
        return own(*args, **others)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(where, moment, dies)
        world.run(output, ASKED)
    assert set(read_points(output).of()) == set(ASKED[:3])  # the last one is lost, and no more
    world.run(output, ASKED)
    assert list(map(without_times, lines(output))) == list(map(without_times, lines(done[0])))
    for setting in ASKED:
        ours, theirs = (read_points(place).measured(setting) for place in (output, done[0]))
        assert ours.rows == theirs.rows


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
    with pytest.raises(
        ValueError, match=r"has a run of another configuration .*num_samples: 2 there, 3"
    ):
        world.run(copy, ASKED, how=world.measuring(num_samples=3))
    with pytest.raises(ValueError, match=r"another configuration .*texts"):
        world.run(copy, ASKED, references=world.REFERENCES[::-1])
    with pytest.raises(ValueError, match=r"another configuration .*max_new_tokens"):
        world.run(copy, ASKED, options={**world.OPTIONS, "max_new_tokens": 9})
    with pytest.raises(ValueError, match=r"another configuration .*drafter"):
        world.run(
            copy,
            ASKED,
            make_models=lambda: {**world.models(), "drafter": world.models()["verifier"]},
        )


def test_another_further_drafter_is_refused(tmp_path):
    one = Setting(rule="OPT(0.1)", max_draft=2, drafter="small")
    first, second = tiny_pair.tabular(3), tiny_pair.tabular(4)
    world.run(
        tmp_path / "out",
        [world.VERIFIER, one],
        make_models=lambda: {**world.models(), "small": first},
    )
    with pytest.raises(ValueError, match="was measured with another model 'small'"):
        world.run(
            tmp_path / "out",
            [world.VERIFIER, one],
            make_models=lambda: {**world.models(), "small": second},
        )


@pytest.mark.exhaustive
def test_another_model_of_a_cascade_is_refused(tmp_path):
    cascade = Setting(drafting="Cascade(((2, 1), (0, 1)), ('drafter', 'small'))")
    asked = [world.VERIFIER, cascade]
    for seed, told in ((3, None), (4, "was measured with another model 'small'")):
        models = {**world.models(), "small": tiny_pair.tabular(seed)}
        with contextlib.nullcontext() if told is None else pytest.raises(ValueError, match=told):
            assert not world.run(tmp_path / "out", asked, make_models=lambda m=models: m)["failed"]


def test_another_drafter_is_estimated_again(tmp_path):
    asked = [world.VERIFIER, Setting(drafter="small", max_draft=2)]
    found = []
    for seed in (3, 4):
        models = {**world.models(), "small": tiny_pair.tabular(seed)}
        how = {"measured": "none", "make_models": lambda m=models: m}
        world.run(tmp_path / "out", asked, **how)
        found.append(lines(tmp_path / "out")[1]["expected"]["acceptance"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("temperatures", "references", "limits", "told"),
    [
        ((1.0, 0.0), world.REFERENCES, {"max_loss": 0.0}, "need one .temperature, top_k"),
        ((1.0,), [()] * 6, {"max_latency": 0.9}, "need a measured quality"),
    ],
)
def test_limits_without_an_answer_are_refused_before_any_work(
    tmp_path, temperatures, references, limits, told
):
    def make_models():
        raise AssertionError("no model is needed")

    asked = world.settings({"Lossless": None}, temperatures)
    how = {"search": Search(**limits), "make_models": make_models}
    with pytest.raises(ValueError, match=told):
        world.run(tmp_path / "out", asked, references=references, **how)
    assert not (tmp_path / "out").exists()


def test_lossy_settings_need_a_quality_for_a_limit_on_its_loss(tmp_path):
    search = Search(max_loss=0.0)
    with pytest.raises(ValueError, match="these limits need a measured quality: give references"):
        world.run(tmp_path / "out", ASKED[:3], references=[()] * 6, search=search)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", [[], [world.VERIFIER, "OPT(0.1)"]])
def test_what_is_no_setting_is_refused_before_any_work(tmp_path, asked):
    with pytest.raises(ValueError, match="settings must be a Grid or a list of Settings, got"):
        world.run(tmp_path / "out", asked)
    assert not (tmp_path / "out").exists()


def test_the_verifier_alone_is_always_compared(tmp_path):
    assert world.run(tmp_path / "out", [OPT])["done"] == 2
    assert [line["method"] for line in lines(tmp_path / "out")] == ["VerifierAlone", None]


def test_failures_of_an_earlier_grid_do_not_count(tmp_path):
    head = Setting(stopping="Survival(HeadEstimate(), 0.5)", max_draft=2)
    assert world.run(tmp_path / "out", [world.VERIFIER, head])["failed"] == 1
    results = world.run(tmp_path / "out", [world.VERIFIER, OPT])
    assert not results["failed"] and results["failures"] == {} and results["done"] == 2
    assert [line["status"] for line in lines(tmp_path / "out")] == ["done", "done", "failed"]


def test_each_sampling_has_a_recommended_setting(tmp_path):
    greedy = [dataclasses.replace(one, temperature=0.0) for one in (world.VERIFIER, OPT)]
    results = world.run(tmp_path / "out", [world.VERIFIER, OPT, *greedy])
    found = [Setting(**verdict["setting"]) for verdict in results["verdicts"]]
    assert found == [world.VERIFIER, greedy[0]]


def test_a_damaged_record_is_refused_and_a_lost_one_measured_again(copy, measured):
    path = record_of(copy, CASCADE)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=path.name):
        world.run(copy, ASKED)
    assert not measured
    path.unlink()
    assert world.run(copy, ASKED)["done"] == len(ASKED) and measured == [CASCADE]


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
    results = world.run(tmp_path / "out", ASKED[:3], references=[()] * 6)
    assert results["quality"] is None and results["table_2"] == []
    assert "there are no references" in capsys.readouterr().err
    assert {"speedup", "nats_per_token"} <= {*results["best"][0]}
    assert not (tmp_path / "out" / "quality_latency.png").exists()


def test_one_bucket_holds_all_prompts(tmp_path):
    world.run(tmp_path / "out", ASKED[:1], options={"max_new_tokens": 2}, one_bucket=True)
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    assert config["options"]["buckets"] == [16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": 1}, "chat must be True or False"),
        ({"examples": [Example(0, " "), *world.EXAMPLES[1:]]}, "text 0 is empty"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(tmp_path, change, message):
    change = dict(change)
    with pytest.raises(ValueError, match=message):
        if "prompts" in change:
            change["prompts"] = Prompting(chat=change["prompts"])
        world.run(tmp_path / "out", ASKED, **change)
    assert not (tmp_path / "out").exists()


def test_times_are_of_the_median_repeat_and_the_mean_seed():
    seconds = np.array([[[1.0], [9.0], [2.0]], [[4.0], [4.0], [4.0]]])  # 2 seeds, 3 repeats
    times = Times(seconds, *2 * (np.ones((2, 1), int),))
    assert times.usual.tolist() == [3.0]
