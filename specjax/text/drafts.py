"""What a decoder's drafts are bound to: its models, and the options that drafts leave to it."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting import Bigram, Budget, CostAware, FixedLength
from specjax.drafting.chain import catches_up_on
from specjax.drafting.heads import with_network
from specjax.drafting.stopping import check_needs_no_params, check_own_params, check_policy
from specjax.errors import UserError
from specjax.rules import Lossless
from specjax.text.directories import built_in_table, load_bigram, load_text_model, real_path
from specjax.text.text_models import Pair, TextModel
from specjax.types import DraftModels, Params, Rule, Stopping


@dataclasses.dataclass(frozen=True, eq=False)
class WithParams:
    """A user's own part with its parameters, for a `Decoder`.

        Decoder(verifier, drafting=WithParams(MyDrafter(), params))
        Decoder(pair, stopping=WithParams(MyPolicy(), params))
        Decoder(verifier, method=WithParams(MyMethod(), params))

    Attributes:
      part: a drafter, a stopping policy, a processor or a method; see `specjax.types`.
      params: a pytree of arrays; for a method a NamedTuple.
    """

    part: Any
    params: Params = ()

    def bind(self, models: DraftModels) -> tuple[Any, Params]:
        """The drafter; see `Drafting.bind`."""
        return self.part, models.place(self.params)


def catches_up(small: TextModel) -> bool:
    """Whether a drafter reads the last token of a whole draft in the next draft's first pass."""
    return small.is_head or catches_up_on(small.platform)


def check_names(named: Mapping[str, TextModel], needed: Sequence[str], what: str) -> None:
    """Refuses models that lack a name which `what` needs."""
    for name in needed:
        if name not in named:
            raise UserError(
                f"{what} needs a model named {name}, got {', '.join(named)}: give a Pair "
                "with this name"
            )


@dataclasses.dataclass(eq=False)
class DecoderModels(DraftModels):
    """See `DraftModels`.

    Attributes:
      named: the decoder's models by name, `verifier` among them; None: only parts are checked.
      stopping: the decoder's policy, or `WithParams`, or None.
      used: the models that a drafter has been bound to, by name.
    """

    named: Mapping[str, TextModel] | None
    max_draft: int | None = None
    min_draft: int = 0
    stopping: Any = None
    rule: Rule = Lossless()  # noqa: RUF009  immutable
    what: str = "drafting"
    used: dict[str, TextModel] = dataclasses.field(default_factory=dict)

    @property
    def eos_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return (0,) if self.named is None else tuple(self.named["verifier"].tokenizer.eos_ids)

    def model(self, name: str) -> TextModel | None:
        if not isinstance(name, str):
            raise UserError(
                "a drafter that has its network needs its parameters, too: give "
                "drafting=specjax.WithParams(drafter, params), or the name of a model"
            )
        if self.named is None:
            return None
        known = {**self.named, **self.used}
        check_names(known, (name,), self.what)
        self.used[name] = known[name]
        return known[name]

    def level(self, place: int, source: Any, **loading: Any) -> tuple[str, TextModel | None]:
        if self.named is None:
            return source if isinstance(source, str) else f"level_{place + 1}", None
        name, model, main = f"level_{place + 1}", source, self.named["verifier"]
        if isinstance(source, str) and source in self.named:
            name, model = source, self.named[source]
        elif not isinstance(source, TextModel):
            if not os.path.isdir(real_path(source)):
                raise UserError(
                    f"models[{place}]={os.fspath(source)!r} is neither a model of the decoder "
                    f"({', '.join(self.named)}) nor a directory: check the name or the path"
                )
            model = load_text_model(source, mesh=main.mesh, **loading)
        model.check_alone()
        Pair(**{name: model, "verifier": main})  # checks the vocabulary and the mesh
        if self.used.setdefault(name, model) is not model:
            raise UserError(
                f"models[{place}] is named {name!r}, like another model: give the decoder models "
                "with names of their own"
            )
        return name, model

    def network(self, drafter: Any) -> tuple[Any, Params]:
        small = self.model(drafter.model)
        if self.named is None:
            return drafter, ()
        return with_network(drafter, small, self.named["verifier"])

    def policy(self, model: TextModel | None, own: Stopping | None) -> tuple[Stopping, Params]:
        if isinstance(own, CostAware | Budget):
            raise UserError(
                f"{type(own).__name__} must be the decoder's: give it as `stopping`, not to a Chain"
            )
        given = own or self.stopping or FixedLength()
        params: Params = ()
        if isinstance(given, WithParams):
            given, params = given.part, given.params
        check_policy(given)
        if model is None:
            return given, ()
        if isinstance(self.stopping, WithParams) and own is None:
            check_own_params(given, params, model.head)
        else:
            given, params = given.bind(model.head)
            is_ours = type(given).__module__.startswith("specjax.")
            if not is_ours and not jax.tree.leaves(params) and not model.is_head:
                check_needs_no_params(given, model.model.vocab_size, model.width)
        # Placed now, so that the calls of the loop do not transfer them.
        return given, self.place(params)

    def table(self, bigram: Any) -> Params:
        if bigram is None or self.named is None:
            return ()
        main = self.named["verifier"]
        if not isinstance(bigram, Bigram):
            built_in = bigram == "built-in"
            bigram = load_bigram(built_in_table(main.name) if built_in else real_path(bigram))
        start = getattr(getattr(main.model, "config", None), "decoder_start_token", None)
        table = bigram.table(main.name, main.tokenizer.fingerprint, main.model.vocab_size, start)
        return self.place(jax.tree.map(jnp.asarray, table))

    def place(self, params: Params) -> Params:
        return params if self.named is None else self.named["verifier"].place(params)

    def own_params(self, params: Params) -> tuple[Params, str]:
        """A drafter's parameters without the models', and its rules without their strengths."""
        known = {id(x) for model in self.used.values() for x in jax.tree.leaves(model.prepared)}
        is_rule = lambda x: hasattr(x, "reads_draft")  # noqa: E731
        rules = [x for x in jax.tree.leaves(params, is_leaf=is_rule) if is_rule(x)]
        own = jax.tree.map(lambda leaf: None if id(leaf) in known else leaf, params)
        return own, ", ".join(str(jax.tree.structure(rule)) for rule in rules)
