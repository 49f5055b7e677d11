"""T5X's model classes with specjax's decoding: `t5x.infer`, `t5x.eval` and interactive models.

In a gin file (see gin_configs/t5x and docs/t5x.md):

    from specjax.integrations import t5x as specjax_t5x
    MODEL = @specjax_t5x.EncoderDecoderModel()
"""

from specjax.integrations.t5x.availability import T5X_VERSION
from specjax.integrations.t5x.decoding import setting
from specjax.integrations.t5x.model_classes import DecoderOnlyModel, EncoderDecoderModel
from specjax.integrations.t5x.restoring import PairCheckpointManager

__all__ = [
    "T5X_VERSION",
    "DecoderOnlyModel",
    "EncoderDecoderModel",
    "PairCheckpointManager",
    "setting",
]
