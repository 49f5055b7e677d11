"""The table of kinds of heads and functions that use it."""

from collections.abc import Callable, Collection

from specjax.models.family import HFFields
from specjax.models.heads.assistant import AssistantFiles
from specjax.models.heads.block import BlockFiles
from specjax.models.heads.eagle import EagleFiles
from specjax.models.heads.head import DraftHead, HeadConfig, HeadFiles
from specjax.models.heads.parallel import ParallelFiles
from specjax.models.model import Model

# A kind of your own is another entry. EAGLE's files have the fewest marks, so it is asked last.
KINDS: list[type[HeadFiles]] = [EagleFiles, ParallelFiles, BlockFiles, AssistantFiles]


def kind_of(config: HeadConfig) -> type[HeadFiles]:
    """The kind of a configuration."""
    return next(kind for kind in KINDS if kind.config is type(config))


def draft_head(config: HeadConfig, verifier: Model) -> DraftHead:
    """The head of a configuration."""
    return kind_of(config).head(config, verifier)


def kind_in(fields: HFFields, arrays: Callable[[], Collection[str]]) -> type[HeadFiles] | None:
    """The kind of a directory's head, by its `config.json` or its arrays' names; None: no head."""
    if fields.values.get("speculators_model_type") is None:
        kinds = (kind for kind in reversed(KINDS) if kind.is_in(fields.values, arrays))
        return next(kinds, None)
    theirs = {each.name: kind for kind in KINDS for each in kind.speculators}
    fields.refuse("speculators_model_type", tuple(theirs), None)
    return theirs[fields.values["speculators_model_type"]]
