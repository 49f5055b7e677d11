"""Whether T5X can be imported; all other modules of this package import this one first."""

try:
    from t5x import models as _models  # noqa: F401  all that T5X needs hangs on it
    from t5x.version import __version__ as T5X_VERSION
except ImportError as error:
    raise ImportError(
        f"specjax.integrations.t5x needs T5X, which cannot be imported ({error}): it is not on "
        "PyPI, so put checkouts of github.com/google-research/t5x, github.com/google/airio and "
        "github.com/google-research/jestimator on PYTHONPATH and run pip install 'specjax[t5x]'"
    ) from None
