"""What gin's language allows is not refused: scopes, functions handed over, a user's own calls."""

import gin
import pytest

from specjax.cli import gin_config


def chain(inner=None, fn=None):
    return (inner() if callable(inner) else inner, fn and fn.__name__)


def pipeline(data=None, first=None, second=None):
    return data, first, second


@gin.configurable(module="tests.gin")
def augment(p=0.0):
    return p


@gin.configurable(module="tests.gin")
def examples():
    return augment()


@pytest.fixture(autouse=True)
def registered():
    gin_config.register(chain, pipeline)


def call(tmp_path, text, *bindings):
    (tmp_path / "own.gin").write_text(text)
    gin_config.configure([str(tmp_path / "own.gin")], bindings)
    return gin_config.call(pipeline)


def test_what_a_users_function_calls_may_be_bound(tmp_path):
    assert call(tmp_path, "pipeline.data = @examples()", "augment.p=0.5")[0] == 0.5


def test_an_inner_scope_ends_what_would_be_a_circle(tmp_path):
    text = "pipeline.data = @chain()\nchain.inner = @x/chain()\nx/chain.inner = None\n"
    assert call(tmp_path, text)[0] == ((None, None), None)


def test_an_inner_scope_that_binds_something_else_ends_no_circle(tmp_path):
    text = "pipeline.data = @chain()\nchain.inner = @x/chain()\nx/chain.fn = None\n"
    with pytest.raises(ValueError, match=r"define chain by itself \(chain -> chain\)"):
        call(tmp_path, text)


def test_a_function_may_be_handed_to_itself(tmp_path):
    found = call(tmp_path, "pipeline.data = @chain()\nchain.fn = @chain", "chain.inner=3")
    assert found[0] == (3, "chain")


def test_what_is_handed_over_hides_no_circle(tmp_path):
    text = "pipeline.first = @chain\npipeline.second = @chain()\nchain.inner = @pipeline()\n"
    with pytest.raises(ValueError, match=r"by itself \(pipeline -> chain -> pipeline\)"):
        call(tmp_path, text)
