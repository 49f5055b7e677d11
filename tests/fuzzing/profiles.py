"""How many cases a fuzz test tries, and from which random numbers.

`make test` tries the same few cases each time; `make test-all` others each time, and a failure
prints the line `@reproduce_failure(...)` that repeats it.
"""

from hypothesis import HealthCheck, settings

# A case runs the whole command: slower than what hypothesis expects of a test.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def few(count: int) -> settings:
    """The same cases in every run."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=_SLOW
    )


def many(count: int) -> settings:
    """New cases in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=_SLOW,
    )
