"""A seqio task for T5X's programs: texts of two letters, to be written once more."""

import seqio

VOCABULARY = seqio.ByteVocabulary(extra_ids=0)
TEXTS = ["aabb", "abab", "bbaa", "baba", "abba", "baab", "aaab", "bbba", "ab", "ba", "aab"]
LENGTHS = {"inputs": 8, "targets": 8}


def _rows(split, shuffle_files, seed=None):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices({"inputs": TEXTS, "targets": TEXTS})


def same(targets, predictions):
    return {"same": 100.0 * sum(map(str.__eq__, targets, predictions)) / len(targets)}


seqio.TaskRegistry.add(
    "specjax_copy",
    source=seqio.FunctionDataSource(_rows, splits=["train", "test"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={
        name: seqio.Feature(vocabulary=VOCABULARY, add_eos=True) for name in ("inputs", "targets")
    },
    metric_fns=[same],
)
