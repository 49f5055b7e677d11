"""`specjax bench`: figures of known times and counts, a verdict, a file of costs, and refusals."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import specjax
from specjax.cli import bench
from specjax.cli.main import main
from specjax.drafting import Costs, read_costs
from specjax.environment import products
from specjax.study.speedups import round_cost, yields
from specjax.tokenizers import ByteTokenizer
from tests import tiny_pair

# Steps of the verifier alone take 2.0, its passes over three tokens 3.0, drafted tokens 0.5.
COSTS = Costs((2,), (3,), (0.5,), ((3.0,),), alone=(2.0,))
DRAFTER = SimpleNamespace(max_draft=2, draft_passes=2)


def side(seconds, emitted, calls):
    """Of a single chunk of two rows."""
    rows = SimpleNamespace(emitted=np.asarray(emitted), verifier_calls=np.asarray(calls))
    result = SimpleNamespace(info=SimpleNamespace(per_row=rows))
    return bench._side(np.full((1, 1, 1), seconds), [result])


def test_speedup_and_its_ideal():
    """Two rows in a batch. Alone: 6 and 10 tokens in 10 passes; together: in 3 and 5 rounds."""
    alone, drafts = side(40.0, [6, 10], [6, 10]), side(32.0, [6, 10], [3, 5])
    cost = round_cost(COSTS, DRAFTER, yields(drafts.times, alone.times))
    assert cost.c == 0.25 and cost.r == 1.5 and cost.tokens == 2.0
    row = bench.figures(alone, drafts, cost)
    assert (row["c"], row["r"], row["tokens_per_call"]) == (0.25, 1.5, 2.0)
    assert row["speedup"] == pytest.approx(40 / 32)
    assert row["speedup_high"] is None  # of a single chunk there is no interval
    # Passes alone: 10 of 2.0; together: 5 times (two drafts and a block) = 5 * 4.0.
    assert row["ideal"] == pytest.approx(20 / 20)
    # A round yields 1 + a + a^2 = 2 tokens, and costs as much.
    assert row["acceptance"] == row["break_even"] == pytest.approx((5**0.5 - 1) / 2)
    assert row["alone_tokens_per_s"] == pytest.approx(16 / 40)


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Of a pair whose programs compile quickly."""
    sizes = ["--rows=2", "--drafts=2", "--temperatures=0", "--repeats=1"]
    return ["bench", *tiny_pair.quick_bench(tmp_path, monkeypatch), *sizes]


def test_figures_fit_together(arguments, capsys, monkeypatch):
    def measured(*_, with_alone, block_apart, **__):
        assert with_alone and block_apart
        return COSTS

    monkeypatch.setattr(bench, "measure_costs", measured)
    assert main(arguments) == 0
    *_, legend, multiplied, _, verdict, line = capsys.readouterr().out.splitlines()
    assert [multiplied] == products()
    assert legend.endswith("other work disturbed the times of passes.")
    assert "at batch 2, temperature 0" in verdict and "drafts of 2" in verdict
    (row,) = json.loads(line)["rows"]
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert 1 <= row["tokens_per_call"] <= 3 and row["ideal"] > 0
    assert row["passes"]["draft_ms"] == 500.0 and row["passes"]["check_ms"] == 3000.0
    assert bench._of_passes(COSTS, 5.0)["call_ms"] == 3000.0


def test_costs_are_written_for_policies_and_lengths(arguments, tmp_path, monkeypatch, capsys):
    def measured(pair, rows, widths, **_):
        """Noise may make the time of so small a pass 0."""
        times = tuple(1.0 + width for width in widths)
        draft, verifier = (0.5,) * len(rows), (times,) * len(rows)
        names = {"pair": pair.fingerprint, "alone": (2.0,) * len(rows)}
        return Costs(tuple(rows), tuple(widths), draft, verifier, **names)

    monkeypatch.setattr(bench, "measure_costs", measured)
    path = tmp_path / "costs.json"
    sizes = ["--drafts", "1", "3", "--rows", "1", "2", "--temperatures", "1", "0"]
    assert main([*arguments, *sizes, f"--costs={path}"]) == 0
    out, told = capsys.readouterr()
    costs = read_costs(path)
    pair = bench.load_pair()
    assert costs.pair == pair.fingerprint
    assert costs.rows == (1, 2) and costs.widths == (1, 2, 4)
    for temperature, rate in zip((0.0, 1.0), costs.acceptance, strict=True):
        rows = json.loads(out.splitlines()[-1])["rows"]
        found = [row["acceptance"] for row in rows if row["temperature"] == temperature]
        assert len(found) == 4 and rate == pytest.approx(np.mean(found))
        # Wider passes cost more than they save.
        why = f"at an acceptance of {rate:.2f}"
        where = f"at batch 2, temperature {temperature:g}: G = 0: no draft pays; the best is G = 1:"
        assert f"{where} {why}" in told
    policy = specjax.drafting.CostAware(costs=costs)
    decoder = specjax.Decoder(pair, max_draft=3, batch_size=2, stopping=policy)
    assert decoder(["ba"], progress=False).info.emitted > 0
    assert json.loads(path.read_text())["models"].keys() == {"drafter", "verifier"}
    assert main([*arguments, f"--costs={path}"]) == 0  # a file of costs may be replaced


def test_a_file_of_costs_of_an_earlier_version_may_be_replaced(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"format": 1, "rows": [1], "widths": [1, 2], "draft": [0.1]}')
    bench.check_output("--costs", path)
    for other in ('{"format": 1}', '{"widths": [1]}', '["format", "widths"]', "{", "[" * 9999):
        path.write_text(other)
        with pytest.raises(specjax.UserError, match="is not a file of costs: choose another name"):
            bench.check_output("--costs", path)


def test_a_chat_model_gets_its_template():
    class Marking(ByteTokenizer):
        def encode_chat(self, messages, **options):
            return self.encode("".join(f"<{x['role']}: {x['content']}>" for x in messages))

    words, named = Marking(), SimpleNamespace(inputs="prompts.txt")
    (found,) = bench.encode_texts(named, ["ba"], words, chat=True)
    assert found.tolist() == words.encode("<user: ba>")


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "prompt 2 is empty"), ("ba " * 1100, "prompt 2 has 3301 tokens, more than 1024")],
)
def test_a_prompt_that_cannot_be_decoded_is_named(arguments, tmp_path, capsys, line, message):
    inputs = tmp_path / "odd.txt"
    inputs.write_text(f"ba\n{line}\nba\nba\n", encoding="utf-8")
    assert main([*arguments, f"--inputs={inputs}"]) == 2
    assert f"{inputs}, {message}" in capsys.readouterr().err
