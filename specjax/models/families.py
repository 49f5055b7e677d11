"""Which model belongs to which configuration."""

from specjax.models.config import Gemma2Config, LlamaConfig, ModelConfig, T5Config
from specjax.models.gemma2 import Gemma2
from specjax.models.llama import Llama
from specjax.models.model import Model
from specjax.models.t5 import T5

MODELS: dict[type[ModelConfig], type[Model]] = {
    T5Config: T5,
    LlamaConfig: Llama,
    Gemma2Config: Gemma2,
}


def model_from_config(config: ModelConfig) -> Model:
    """The model of a configuration.

    Args:
      config: a `T5Config`, `LlamaConfig` or `Gemma2Config`.

    Returns:
      A `T5`, `Llama` or `Gemma2`.

    Raises:
      TypeError: for anything else.
    """
    if type(config) not in MODELS:
        raise TypeError(
            f"`config` must be one of {', '.join(cls.__name__ for cls in MODELS)}, got a "
            f"{type(config).__name__}"
        )
    return MODELS[type(config)](config)
