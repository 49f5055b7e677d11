"""Checks that T5X can be imported; all other modules of this package import this first."""

from specjax.errors import MissingLibraryError

try:
    import t5x.models  # this imports everything that T5X needs
    import t5x.version
except ImportError as error:
    raise MissingLibraryError(
        f"specjax.integrations.t5x needs T5X, which cannot be imported ({error}): it is not on "
        "PyPI, so put checkouts of github.com/google-research/t5x, github.com/google/airio and "
        "github.com/google-research/jestimator on PYTHONPATH, and in the checkout "
        "of specjax run pip install '.[t5x]'"
    ) from None

# The installed version.
T5X_VERSION: str = t5x.version.__version__
