"""An endpoint with OpenAI's routes, over the engine: `specjax serve`."""

from specjax.serving.app import Limits, make_app

__all__ = ["Limits", "make_app"]
