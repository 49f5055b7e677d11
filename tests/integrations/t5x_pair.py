"""Trains a tiny pair by T5X, decodes with T5X alone and interactively with the pair; a program.

    python -m tests.integrations.t5x_pair DIRECTORY

writes checkpoints `verifier`, `drafter` and `pair`, and results.json.
"""

import json
import sys
from pathlib import Path

import clu.data.dataset_iterator
import gin
import jax
from t5x import (
    adafactor,
    decoding,
    gin_utils,
    interactive_model,
    models,
    partitioning,
    utils,
)
from t5x.examples.t5 import network

import specjax
from specjax.checkpoints.saving import save_t5x_pair
from tests.integrations.t5x_task import LENGTHS, TEXTS, VOCABULARY

BATCH = 8
SCORED = [{"input": TEXTS[0], "target": TEXTS[0]}] * BATCH
SIZES = {"num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "head_dim": 8}
SHAPES = {
    "encoder_input_tokens": (BATCH, LENGTHS["inputs"]),
    "decoder_input_tokens": (BATCH, LENGTHS["targets"]),
    "decoder_target_tokens": (BATCH, LENGTHS["targets"]),
    "decoder_loss_weights": (BATCH, LENGTHS["targets"]),
}


def t5(width):
    """T5X's own network, as the tiny gin file has it."""
    return network.Transformer(
        config=network.T5Config(
            vocab_size=260,
            emb_dim=width,
            mlp_dim=32,
            mlp_activations=("gelu", "linear"),
            dropout_rate=0.0,
            **SIZES,
        )
    )


def train(directory, width, steps):
    """Trains by T5X's Trainer and Adafactor, saves as T5X saves, and decodes greedily."""
    model = models.EncoderDecoderModel(
        t5(width),
        VOCABULARY,
        VOCABULARY,
        adafactor.Adafactor(
            learning_rate=None, logical_factor_rules=adafactor.standard_logical_factor_rules()
        ),
        decode_fn=lambda **asked: decoding.temperature_sample(temperature=0.0, **asked),
    )
    trained = interactive_model.InteractiveModel(
        batch_size=BATCH,
        task_feature_lengths=LENGTHS,
        output_dir=str(directory),
        partitioner=partitioning.PjitPartitioner(num_partitions=1),
        model=model,
        dtype=None,
        restore_mode="specific",
        checkpoint_path="",
        input_shapes=SHAPES,
    )
    trained.trainer._learning_rate_fn = lambda step: 0.03
    data = utils.get_dataset(
        utils.DatasetConfig(
            mixture_or_task_name="specjax_copy",
            task_feature_lengths=LENGTHS,
            split="train",
            batch_size=BATCH,
            shuffle=False,
            seed=0,
        ),
        0,
        1,
        model.FEATURE_CONVERTER_CLS,
    )
    rows = clu.data.dataset_iterator.TfDatasetIterator(data, checkpoint=False)
    # A trainer left open is closed by the collector, perhaps into a graph that is being traced.
    with trained.trainer:
        for _ in range(steps):
            trained.train_step_from_batch_iterator(rows)
        trained.save_checkpoint()
        return {
            "texts": [text.decode() for _, text in trained.predict_with_aux(TEXTS)[0]],
            "score": trained.score(SCORED)[0][1],
        }


def main():
    """See above."""
    out = Path(sys.argv[1])
    for name in ("verifier", "drafter", "interactive"):
        (out / name).mkdir(parents=True)
    verifier = train(out / "verifier", 16, 40)
    drafter = train(out / "drafter", 8, 40)
    save_t5x_pair(out / "pair", verifier=out / "verifier", drafter=out / "drafter")
    gin_utils.parse_gin_flags(
        [f"{specjax.__path__[0]}/gin_configs", str(Path(__file__).parent)],
        ["t5x_tiny.gin", "t5x/runs/interactive.gin"],
        [
            "TEMPERATURE = 0.0",
            f"CHECKPOINT_PATH = '{out / 'pair' / 'checkpoint_40'}'",
            f"OUTPUT_DIR = '{out / 'interactive'}'",
            f"INPUT_SHAPES = {SHAPES}",
            f"TASK_FEATURE_LENGTHS = {LENGTHS}",
        ],
    )
    pair = gin.get_configurable(interactive_model.InteractiveModel)()
    together, aux = pair.predict_with_aux(TEXTS)
    results = {
        "alone": {"verifier": verifier, "drafter": drafter},
        "together": {
            "texts": [text.decode() for _, text in together],
            "score": pair.score(SCORED)[0][1],
        },
        "aux": jax.tree.map(float, aux),
    }
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
