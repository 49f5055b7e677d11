"""An endpoint with OpenAI's routes, over the engine: `specjax serve`."""

from specjax.serving.app import make_app
from specjax.serving.engines import Limits

__all__ = ["Limits", "make_app"]
