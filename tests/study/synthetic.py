"""Settings whose true quality, speed and divergence are known, and noisy looks at them."""

import functools

import numpy as np

from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import mean, ratio
from specjax.runs.evaluation import as_json
from specjax.study.measure import Scores
from specjax.study.points import COMPARED, HELD_OUT
from specjax.text.setting import Setting

ALONE = Setting(method="VerifierAlone")
LOSSLESS = Setting()
BOOTSTRAP = Bootstrap(resamples=200)
# Strength -> quality, relative latency, nats per token: the stronger, the faster and the worse.
TRUTH = {
    ALONE: (50.0, 1.0, 0.0),
    LOSSLESS: (50.0, 0.7, 0.0),
    **{
        Setting(rule=f"OPT({i / 10})"): (50.0 - 1.5 * i, 0.7 - 0.04 * i, 0.02 * i)
        for i in range(1, 9)
    },
}
SETTINGS = [setting for setting in TRUTH if setting != ALONE]


class World:
    """Texts whose figures differ from the truth by noise that settings partly share.

    Args:
      seed: of the noise.
      rows: the number of texts to choose by, and of held-out texts.
      spread: the standard deviation of a text's quality.
      truth: what is true of each setting.
    """

    def __init__(self, seed, rows=(200, 200), spread=10.0, truth=TRUTH):
        self.draws = np.random.default_rng(seed)
        seen, total = rows[0], sum(rows)
        self.parts = {COMPARED: (0, seen, seen), HELD_OUT: (seen, total, total - seen)}
        shared = self.draws.normal(size=(total, 1)) * 0.8
        noise = shared + 0.6 * self.draws.normal(size=(total, 3 * len(truth)))
        self.figures = {}
        for i, (setting, (quality, relative, nats)) in enumerate(truth.items()):
            good, slow, far = noise[:, 3 * i : 3 * i + 3].T
            self.figures[setting] = (
                quality + spread * good,
                relative * (1.0 + 0.2 * slow) if setting != ALONE else np.full(total, relative),
                nats * (1.0 + far),
            )
        self._scored = {}

    def look(self, setting, part):
        if (setting, part) not in self._scored:
            start, stop, _ = self.parts[part]
            self._scored[setting, part] = self._of(setting, slice(start, stop))
        return self._scored[setting, part]

    def _of(self, setting, rows):
        good, slow, far = (values[rows] for values in self.figures[setting])
        sums = {
            "bleu": mean(good),
            "relative_latency": ratio(slow, 1.0),
            "nats_per_token": mean(far),
            "latency": mean(0.1 * slow),
        }
        again = {name: BOOTSTRAP.replicates(each) for name, each in sums.items()}
        figures = {
            name: as_json(BOOTSTRAP.summary(each.value, again[name])) for name, each in sums.items()
        }
        return Scores(figures, again)


world_of = functools.cache(World)
