"""A rollout engine for tunix: `SpecjaxRollout`, given as `ClusterConfig.rollout_engine`."""

from specjax.checks import require

require("tunix", "tunix")

from specjax.integrations.tunix.rollout import (  # noqa: E402
    SpecjaxRollout,
    SpecjaxRolloutOutput,
)

__all__ = ["SpecjaxRollout", "SpecjaxRolloutOutput"]
