"""Draws tree.svg, the picture of a tree in trees.md: `python docs/draw_tree.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

PARENTS = (0, 0, 1, 1, 2, 4)
PLACES = {0: (2.0, 3.0), 1: (1.1, 2.0), 2: (2.9, 2.0), 3: (0.6, 1.0), 4: (1.6, 1.0), 5: (2.9, 1.0)}
PLACES[6] = (1.6, 0.0)
PATH = (0, 1, 4, 6)
GREY, DARK = "0.88", "0.55"


def path_to(node):
    """The nodes from the root to `node`."""
    return [0] if node == 0 else [*path_to(PARENTS[node - 1]), node]


def draw_nodes(axis):
    """The tree; the accepted path is dark."""
    for node, parent in enumerate(PARENTS, 1):
        (x, y), (up, top) = PLACES[node], PLACES[parent]
        width = 2.4 if node in PATH else 0.9
        axis.plot([up, x], [top, y], color="black", lw=width, zorder=1)
    for node, (x, y) in PLACES.items():
        color = DARK if node in PATH else "white"
        axis.add_patch(Circle((x, y), 0.27, fc=color, ec="black", lw=1.2, zorder=2))
        axis.text(x, y, str(node), ha="center", va="center", fontsize=12, zorder=3)
    axis.text(2.42, 3.05, "the last committed token", fontsize=9.5, va="center")
    for depth in range(4):
        axis.text(-0.55, 3 - depth, f"depth {depth}", fontsize=9.5, va="center", color="0.25")
    axis.set(xlim=(-0.7, 4.3), ylim=(-0.5, 3.5), aspect="equal")
    axis.set_title("1  the drafted tree", fontsize=11.5, weight="bold", loc="left")


def draw_mask(axis):
    """A row for each node that reads, a column for each entry of the cache."""
    for node in PLACES:
        seen = path_to(node)
        axis.add_patch(Rectangle((-1.45, 6 - node), 1.2, 0.9, fc=DARK, ec="black", lw=0.8))
        for other in PLACES:
            color = DARK if other in seen else "white"
            place = (other, 6 - node)
            axis.add_patch(Rectangle(place, 0.9, 0.9, fc=color, ec="black", lw=0.8))
        axis.text(-1.75, 6.45 - node, str(node), fontsize=11, ha="center", va="center")
        axis.text(7.3, 6.45 - node, f"L + {len(seen) - 1}", fontsize=9.5, va="center")
        axis.text(node + 0.45, 7.25, str(node), fontsize=11, ha="center", va="center")
    axis.text(-0.85, 7.25, "text", fontsize=9.5, ha="center", va="center")
    axis.text(7.25, 7.25, "position", fontsize=9.5, va="center")
    axis.set(xlim=(-2.2, 8.9), ylim=(-0.6, 7.8), aspect="equal")
    axis.set_title("2  what each node sees (dark)", fontsize=11.5, weight="bold", loc="left")


def draw_cache(axis):
    """The entries of the nodes in the cache, before and after."""
    for row, (title, entries) in enumerate(
        (("before: a node's entry is at L + its number", tuple(PLACES)), ("after", PATH))
    ):
        low = 2.3 - 2.3 * row
        axis.text(-1.45, low + 1.15, title, fontsize=9.5)
        axis.add_patch(Rectangle((-1.45, low), 1.2, 0.9, fc=GREY, ec="black", lw=0.8))
        axis.text(-0.85, low + 0.45, "text", fontsize=9.5, ha="center", va="center")
        for place in PLACES:
            held = place < len(entries)
            color = DARK if held and entries[place] in PATH else "white"
            axis.add_patch(Rectangle((place, low), 0.9, 0.9, fc=color, ec="black", lw=0.8))
            if held:
                axis.text(place + 0.45, low + 0.45, str(entries[place]), ha="center", va="center")
    for to, place in enumerate(PATH):
        ends = (place + 0.45, 2.3), (to + 0.45, 0.9)
        axis.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, color="0.3"))
    axis.set(xlim=(-2.2, 8.9), ylim=(-0.6, 4.2), aspect="equal")
    axis.set_title("3  what is gathered", fontsize=11.5, weight="bold", loc="left")


def main():
    """Writes the picture beside this file."""
    matplotlib.rcParams.update({"svg.hashsalt": "tree", "svg.fonttype": "path"})
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 3.9), width_ratios=(1, 1.15, 1.15))
    for axis, draw in zip(axes, (draw_nodes, draw_mask, draw_cache), strict=True):
        draw(axis)
        axis.axis("off")
    figure.tight_layout()
    where = Path(__file__).with_name("tree.svg")
    figure.savefig(where, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
