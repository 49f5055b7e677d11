import pytest

# So that a broken law shows what was compared.
_WITH_ASSERTIONS = ("law", "directories", "gin_words", "kills")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _WITH_ASSERTIONS))
