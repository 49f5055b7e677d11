"""The load of an endpoint: every stream has its own text."""

from benchmarks import served


def test_streams_are_counted_and_compared(tmp_path, rows):
    inputs = tmp_path / "inputs.txt"
    inputs.write_text("A man rides a bicycle.\nTwo dogs play in the snow.\nA boy eats.\n")
    sizes = [
        "--rows=2",
        "--prompts=3",
        "--max-new=12",
        "--streams",
        "1",
        "3",
        "--seconds=2",
        "--prefixes=0",
    ]
    assert served.main([f"--inputs={inputs}", *sizes]) == 0
    rows = rows()
    assert [(row["prefixes"], row["streams"]) for row in rows] == [(0, 1), (0, 3)]
    for row in rows:
        assert row["requests"] >= row["streams"] and row["lost"] == row["mixed"] == 0
        assert row["served"] > 0 and row["engine"] > 0 and row["rss_after"] > 0
