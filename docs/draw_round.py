"""Draws round.svg, the picture of a round in concepts.md: `python docs/draw_round.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

GREY, DARK, WHITE = "0.88", "0.55", "white"
LEFT, STEP, WIDTH = 4.9, 1.25, 1.05


def boxes(axis, row, labels, colors, hatches=None):
    """A row of boxes with a text in each."""
    for i, (label, color) in enumerate(zip(labels, colors, strict=True)):
        x = LEFT + i * STEP
        hatch = hatches[i] if hatches else None
        axis.add_patch(Rectangle((x, row), WIDTH, 0.7, fc=color, ec="black", lw=1.2, hatch=hatch))
        style = {"bbox": {"fc": "white", "ec": "none", "pad": 1.5}} if hatch else {}
        axis.text(x + WIDTH / 2, row + 0.35, label, ha="center", va="center", fontsize=12, **style)


def main():
    """Writes the picture beside this file."""
    matplotlib.rcParams.update({"svg.hashsalt": "round", "svg.fonttype": "path"})
    figure, axis = plt.subplots(figsize=(9.6, 5.4))
    rows = {
        5.2: ("1  the drafter proposes", "a token a pass, from q"),
        3.9: ("2  the verifier reads the block", "one pass, p at every position"),
        2.6: ("3  the rule makes a target", "π = T(q, p)"),
        1.3: ("4  verification keeps a prefix", "here three of five stand"),
        0.0: ("5  one more token is drawn", "so that all tokens follow π"),
    }
    for row, (title, note) in rows.items():
        axis.text(0, row + 0.45, title, fontsize=11.5, weight="bold", va="center")
        axis.text(0.38, row + 0.1, note, fontsize=10, va="center", color="0.25")
    drafted = [f"$x_{i}$" for i in range(1, 6)]
    boxes(axis, 5.2, drafted, [GREY] * 5)
    boxes(axis, 3.9, [f"$p_{i}$" for i in range(1, 7)], [WHITE] * 6)
    boxes(axis, 2.6, [rf"$\pi_{i}$" for i in range(1, 7)], [WHITE] * 6)
    boxes(axis, 1.3, drafted, [DARK] * 3 + [WHITE] * 2, [None] * 3 + ["///"] * 2)
    boxes(axis, 0.0, [*drafted[:3], "$y$"], [DARK] * 4)
    for i in range(6):
        x = LEFT + i * STEP + WIDTH / 2
        for top, bottom in ((5.2, 4.6), (3.9, 3.3), (2.6, 2.0)):
            if i < 5 or top < 5:
                style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": "0.4"}
                if not (i == 5 and top < 3):
                    axis.add_patch(FancyArrowPatch((x, top), (x, bottom), **style))
    end = LEFT + 3 * STEP + WIDTH + 0.1
    axis.text(
        end, 0.35, "committed: four tokens\nfor one pass of the verifier", fontsize=10, va="center"
    )
    axis.set(xlim=(-0.1, LEFT + 6 * STEP), ylim=(-0.2, 6.1))
    axis.axis("off")
    figure.savefig(
        Path(__file__).with_name("round.svg"), bbox_inches="tight", metadata={"Date": None}
    )


if __name__ == "__main__":
    main()
