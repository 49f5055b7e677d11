"""Hints for unknown names: the new name, or a similar name."""

import difflib
from collections.abc import Collection

# Old name -> new name, of commands, gin files and names in them.
NEW_NAMES = {
    "train_head": "train head",
    "train_bigram": "train bigram",
    "sweep": "compare --full",
    "screen": "compare --estimate",
    "tune": "compare --gin.MAX_LOSS=...",
    "tune_drafts": "compare --gin.DRAFTING=...",
    "runs/sweep.gin": "runs/compare.gin",
    "runs/screen.gin": "runs/compare.gin",
    "runs/tune.gin": "runs/compare.gin",
    "runs/tune_drafts.gin": "runs/compare.gin",
    "papers/faster_cascades/sweep.gin": "papers/faster_cascades/compare.gin",
    "methods/max_gram.gin": "methods/lookup.gin",
    "ALPHA": "STRENGTH",
    "alpha": "strength",
    "MaxGram": "Lookup",
    "OUTPUT_ANSWER": "ANSWER",
    "TEXTS": "LIMIT",
    "DRAFTS": "MAX_DRAFTS",
    "BUDGET": "STRENGTH",
    "SEEDS": "NUM_SAMPLES",
    "RULES": "METHODS",
    "SAMPLES": "DRAWS",
    "SCREENED": "ESTIMATE_LIMIT",
    "LATENCY_TEXTS": "LATENCY_LIMIT",
    "NUM_INPUTS": "LIMIT",
    "MAX_SCORED": "LIMIT",
    "num_inputs": "limit",
    "max_examples": "limit",
    "allow_other_streams": "allow_other_environment",
    "OnPolicy": "Teacher",
    "Acceptance": "Teacher",
    "InverseSqrt": "AdamW",
    "Cosine": "AdamW (decay='cosine')",
    "teacher_samples": "Teacher.samples",
    "on_policy": "Teacher.on_policy_share",
    "schedule": "learning_rate, warmup_steps and decay",
}
# Names of other libraries, in lower case.
_ELSEWHERE = dict.fromkeys(
    ("num_speculative_tokens", "num_draft_tokens", "num_assistant_tokens", "gamma"), "MAX_DRAFT"
)


def hint(name: str, known: Collection[str], otherwise: str) -> str:
    """Returns a hint for an unknown name.

    Args:
      name: of a command, a gin file, or in a gin file.
      known: the known names.
      otherwise: the hint if no known name is similar.
    """
    if name in NEW_NAMES:
        return f"it was renamed to {NEW_NAMES[name]}"
    name = _ELSEWHERE.get(name.lower(), name)
    near = [other for other in known if other.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise
