"""Plans of drafts, which make a drafter from a decoder's models: `Decoder(drafting=...)`.

`Lookup` copies earlier text, `Tree` and `Branches` draft trees, and `Cascade` drafts with several
models, of which the larger review the smaller.

Axes: V vocabulary.
"""

import abc
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafting
from specjax.checks import check_count, check_part, check_path
from specjax.decoding.speculative import check_rule
from specjax.drafting import cascade, lenience
from specjax.drafting.cascades import check_lengths
from specjax.drafting.neural import catches_up_on
from specjax.drafting.trees import CHILDREN
from specjax.errors import UserError
from specjax.models.heads import DraftHead, EagleHead
from specjax.models.int8 import form_of
from specjax.rules.target import check_is_rule, has_carry
from specjax.text.directories import built_in_table, load_bigram, load_text_model, real_path
from specjax.text.text_models import Models, TextModel
from specjax.types import Drafter, Params, Rule, Stopping, Verification
from specjax.verification import Block, Traversal

# The most nodes of a tree: each is a token that the verifier reads, and a slot of its cache.
MOST_NODES = 512


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


@dataclasses.dataclass(frozen=True, eq=False)
class PlanInputs:
    """The inputs of a plan that makes a drafter.

    Attributes:
      models: the decoder's models by name, `verifier` among them.
      max_draft: G, the longest block.
      neural: (a model or its name, the longest draft or None for `max_draft`) -> the drafter of
        this model with the decoder's `stopping`, and its parameters.
      is_trial: whether only the parts are checked: models have no parameters, and no file is read.
    """

    models: Mapping[str, TextModel]
    max_draft: int
    neural: Callable[..., tuple[drafting.NeuralDrafter, drafting.NeuralDrafterParams]]
    is_trial: bool = False

    @property
    def verifier(self) -> TextModel:
        return self.models["verifier"]


def drafter_of(
    small: TextModel,
    main: TextModel,
    max_draft: int,
    stopping: Stopping | None = None,
    params: Params = (),
    **options: Any,
) -> tuple[drafting.NeuralDrafter, drafting.NeuralDrafterParams]:
    """Returns the drafter of a model, or of a draft head of `main`, and its parameters.

    `params` are those of `stopping`; options are those of `drafting.NeuralDrafter`.
    """
    model, options = small.model, {"stopping": stopping or drafting.FixedLength(), **options}
    if not isinstance(model, DraftHead):
        options["catches_up"] = catches_up_on(small.platform)
        drafter = drafting.NeuralDrafter(model, max_draft, **options)
        return drafter, drafting.NeuralDrafterParams(small.prepared, params)
    kind: Any = drafting.EagleDrafter if isinstance(model, EagleHead) else drafting.BlockDrafter
    joined = model.joined(small.prepared, main.prepared)
    return kind(model, max_draft, **options), drafting.NeuralDrafterParams(joined, params)


def catches_up(small: TextModel) -> bool:
    """Whether a drafter reads the last token of a whole draft in the next draft's first pass."""
    return small.is_head or catches_up_on(small.platform)


class Planned(NamedTuple):
    """The result of a plan; the decoder's fingerprint has `own` and `described`.

    Attributes:
      drafter: the drafter.
      params: its parameters.
      own: those that belong to no model.
      described: a text of what `own` lacks.
      models: the models that the plan has added, by name.
    """

    drafter: Drafter
    params: Params
    own: Params
    described: str = ""
    models: Mapping[str, TextModel] = MappingProxyType({})


class DraftPlan(abc.ABC):
    """Makes a drafter from the decoder's models."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the decoder's models that draft."""
        return ()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Option of the decoder that must not be given -> why."""
        return {}

    @property
    def weighs_costs(self) -> bool:
        """Whether `drafting.CostAware` can be used, which needs chains of a single drafter."""
        return self.needs == ("drafter",) and isinstance(self.default_verification, Block)

    @property
    def default_verification(self) -> Verification:
        """The verification of a decoder that gives none."""
        return Block()

    @abc.abstractmethod
    def make(self, inputs: PlanInputs) -> Planned:
        """Makes the drafter."""


def check_is_plan(plan: Any) -> None:
    """Refuses what is not like a `DraftPlan`."""
    needed = ("needs", "left_out", "weighs_costs", "make")
    check_part("drafting", plan, needed, "specjax.Lookup()")


@dataclasses.dataclass(frozen=True)
class ModelDrafts(DraftPlan):
    """A model of the decoder drafts, token by token: the default of `Decoder`.

    Attributes:
      model: its name.
      greedy: see `drafting.EagleDrafter`; for draft heads.
    """

    model: str = "drafter"
    greedy: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.model,)

    def make(self, inputs: PlanInputs) -> Planned:
        drafter, params = inputs.neural(self.model)
        drafter = dataclasses.replace(drafter, name=self.model)
        if self.greedy:
            if not isinstance(drafter, drafting.EagleDrafter):
                raise UserError(f"greedy must be False: {self.model} is not a draft head")
            drafter = dataclasses.replace(drafter, greedy=True)
        return Planned(drafter, params, params.stopping)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnDrafts(DraftPlan):
    """The user's own drafter drafts."""

    own: WithParams

    @property
    def left_out(self) -> Mapping[str, str]:
        why = "the drafter of drafting=WithParams(...) has its own"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    def make(self, inputs: PlanInputs) -> Planned:
        return Planned(self.own.part, inputs.verifier.place(self.own.params), self.own.params)


@dataclasses.dataclass(frozen=True)
class Lookup(DraftPlan):
    """Copies drafts from the prompt and the text so far; see `drafting.LookupDrafter`.

    With `min_match` it copies only if that many tokens at the text's end have occurred before;
    otherwise the pair's drafter drafts; see `drafting.LookupFirst`.

    Attributes:
      max_ngram: see `drafting.LookupDrafter`, also for the next three.
      bigram: a table of successors that drafts if nothing can be copied: a `Bigram`, a directory of
        `specjax train bigram`, "built-in" for the built-in pair's table, or None.
      min_match: at least 1; None: no model drafts.
      max_copy: the longest copied block; `max_draft` by default.
      copies: the number of earlier occurrences that are copied. With several, drafts are trees; see
        `drafting.LookupTreeDrafter`.
    """

    max_ngram: int | None = None
    min_ngram: int = 1
    latest: bool = False
    overlap: bool = False
    bigram: drafting.Bigram | str | os.PathLike[str] | None = None
    min_match: int | None = None
    max_copy: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.bigram, drafting.Bigram | None):
            check_path(self.bigram, "bigram=")
        for name in ("min_match", "max_copy"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "give a number of tokens, or None")
        self.copier(1, 1)  # checks the other fields
        check_count("copies", self.copies, "give the number of copies")
        if self.copies > 1 and self.min_match is not None:
            raise UserError(
                f"min_match must be left out with copies={self.copies}: use Branches to draft with "
                "a model and with several copies"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.min_match is None else ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        if self.needs:
            return {}
        why = f"drafting={self!r} has no drafter model"
        return dict.fromkeys(("min_draft", "stopping"), why)

    @property
    def default_verification(self) -> Verification:
        return Block() if self.copies == 1 else Traversal()

    def make(self, inputs: PlanInputs) -> Planned:
        vocab_size = inputs.verifier.model.vocab_size
        lookup = self.copier(vocab_size, self.max_copy or inputs.max_draft)
        table = self.table(inputs)
        if self.copies > 1:
            return Planned(drafting.LookupTreeDrafter(lookup, self.copies), table, table)
        if self.min_match is None:
            return Planned(lookup, table, table)
        neural, params = inputs.neural("drafter")
        both = drafting.LookupFirst(lookup, neural, self.min_match)
        return Planned(both, (table, params), (table, params.stopping))

    def copier(self, vocab_size: int, max_draft: int) -> drafting.LookupDrafter:
        """Returns the drafter that copies."""
        return drafting.LookupDrafter(
            vocab_size, max_draft, self.max_ngram, self.min_ngram, self.latest, self.overlap
        )

    def table(self, inputs: PlanInputs) -> Params:
        """Returns the parameters of `copier`: the bigram table, or ()."""
        if self.bigram is None or inputs.is_trial:
            return ()
        main = inputs.verifier
        bigram = self.bigram
        if not isinstance(bigram, drafting.Bigram):
            built_in = bigram == "built-in"
            bigram = load_bigram(built_in_table(main.name) if built_in else real_path(bigram))
        start = getattr(getattr(main.model, "config", None), "decoder_start_token", None)
        table = bigram.table(main.name, main.tokenizer.fingerprint, main.model.vocab_size, start)
        return inputs.verifier.place(jax.tree.map(jnp.asarray, table))


@dataclasses.dataclass(frozen=True)
class Tree(DraftPlan):
    """The drafter drafts several next tokens at each place; see `drafting.TreeDrafter`.

    Attributes:
      depth: the length of the longest path.
      width: the number of children of a node.
      children: how they are chosen; see `drafting.TreeDrafter`.
      beam: only this number of nodes of a level have children, those with the most probable paths;
        None: all.
      keep: the verifier reads only this number of nodes, with `beam` and children="top"; see
        `drafting.Beam`.
      parents: the parent of each node, for a shape of its own (see `drafting.Topology`); the
        other sizes must then be left out.
    """

    depth: int | None = None
    width: int | None = None
    children: str = "top+1"
    beam: int | None = None
    keep: int | None = None
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("depth", "width", "beam", "keep")}
        least = 0
        if self.parents is not None:
            if any(value is not None for value in sizes.values()):
                raise UserError(f"{', '.join(sizes)} must be left out: parents gives the shape")
            object.__setattr__(self, "parents", drafting.Topology(self.parents).parents)
        else:
            for name in ("depth", "width"):
                check_count(name, sizes[name], "such as Tree(depth=3, width=2)")
            if self.beam is not None:
                check_count("beam", self.beam, "give the number of nodes, or None")
            if self.keep is not None and (self.beam is None or self.children != "top"):
                raise UserError(
                    f"keep={self.keep!r} needs beam and children='top': leaving out drawn tokens "
                    "by their values would change the distribution of the output"
                )
            depth, width = self.depth or 0, self.width or 0
            # Each level has a node; counted before the tree is built, which would take long.
            least = max(depth, width, 0 if self.beam else min(width, 2) ** min(depth, 12))
        if self.children not in CHILDREN:
            names = ", ".join(map(repr, CHILDREN))
            raise UserError(f"children must be one of {names}, got {self.children!r}")
        if least > MOST_NODES or self.shape.size > MOST_NODES:
            raise UserError(
                f"{self!r:.80} has more than {MOST_NODES} nodes: give a smaller depth, width or "
                "beam, or fewer parents"
            )

    @property
    def shape(self) -> drafting.Topology | drafting.Beam:
        """The shape of the trees."""
        if self.parents is not None:
            return drafting.Topology(self.parents)
        assert self.depth is not None and self.width is not None
        if self.beam is not None:
            return drafting.Beam(self.depth, self.width, self.beam, self.keep)
        return drafting.k_ary(self.depth, self.width)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        why = f"drafting={self!r} drafts trees of a fixed size"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    @property
    def default_verification(self) -> Verification:
        return Traversal()

    def make(self, inputs: PlanInputs) -> Planned:
        chain, params = inputs.neural("drafter", 1)
        is_head = isinstance(chain, drafting.EagleDrafter)
        kind: Any = drafting.EagleTreeDrafter if is_head else drafting.TreeDrafter
        drafter = kind(chain.model, self.shape, self.children, chain.name)
        return Planned(drafter, drafting.NeuralDrafterParams(params.model), ())


@dataclasses.dataclass(frozen=True)
class Branches(DraftPlan):
    """Several drafters, each with its own branches of a tree; see `drafting.BranchesDrafter`.

    Attributes:
      parts: at least two: plans such as `Tree(...)`, `Lookup(copies=3)` and `Cascade(...)`, or
        names of the decoder's models, which draft chains of `max_draft` tokens. Copies belong to
        the end.
    """

    parts: tuple[str | DraftPlan, ...]

    def __post_init__(self) -> None:
        parts: Any = self.parts
        several = isinstance(parts, tuple | list) and len(parts) > 1
        if not several or not all(isinstance(part, str | DraftPlan) for part in parts):
            raise UserError(
                "parts must be a tuple of at least two drafters, plans or names of models, such as "
                f'("drafter", Lookup()), got {parts!r}'
            )
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def _plans(self) -> list[DraftPlan]:
        return [ModelDrafts(part) if isinstance(part, str) else part for part in self.parts]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for plan in self._plans for name in plan.needs))

    @property
    def left_out(self) -> Mapping[str, str]:
        first, *others = (plan.left_out for plan in self._plans)
        return {name: why for name, why in first.items() if all(name in x for x in others)}

    @property
    def default_verification(self) -> Verification:
        return Traversal()

    def make(self, inputs: PlanInputs) -> Planned:
        results = [plan.make(inputs) for plan in self._plans]
        models: dict[str, TextModel] = {}
        for i, planned in enumerate(results):
            for name, model in planned.models.items():
                if models.setdefault(name, model) is not model:
                    raise UserError(
                        f"parts[{i}] has a model that is named {name!r}, like another one: load "
                        "the models with load_models, which names them"
                    )
        # Parts that use one model have one name for it.
        shared = tuple(set(inputs.models) | set(models))
        return Planned(
            drafting.BranchesDrafter(
                tuple(planned.drafter for planned in results), tuple(sorted(shared))
            ),
            tuple(planned.params for planned in results),
            own=tuple(planned.own for planned in results),
            described=", ".join(filter(None, (planned.described for planned in results))),
            models=models,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Cascade(DraftPlan):
    """Drafts with several models; the larger models review the drafts of the smaller models.

    Row r of K has the number of tokens of each drafter in the blocks that the reviewer of drafter r
    reviews: the verifier in the first row, drafter r - 1 in the others; see `drafting.cascade`. The
    decoder's `stopping` and `min_draft` apply to every model that drafts token by token.

    Attributes:
      lengths: K, `[n, n]` whole numbers, upper triangular; n counts `models` and `last`.
      models: the drafters, largest first: each a name of the decoder's models, a directory (see
        `load_text_model`) or a `TextModel`. Models without a name are named level_1, level_2, ...
        by their places.
      last: a `Lookup` as the last drafter, or None.
      lenience: l >= 1; levels without their own rule accept a token with probability
        min(1, l p / q). It has no effect at temperature 0; see `drafting.lenience`.
      rules: the rules for reviews: one for all models, or one for each of `models`, with None for
        the lenience rule and for a model that reviews nothing.
      verification: the verification of all inner rounds.
      cumulative: the meaning of the counts in a row; see `drafting.HorizontalCascade`.
      width: the number of tokens that the verifier reads at each place for which a model drafts:
        the cascade's own, then the model's most probable others, without tokens after them. Drafts
        are then trees; see `drafting.CaterpillarDrafter`. None: only the cascade's own.
      dtype: the dtype of models loaded from directories; by default that of each checkpoint.
      weights: the `weights` of models loaded from directories; see `load_text_model`. Of a mapping
        such as `load_pair` takes, they have the entry "drafter".
    """

    lengths: Any
    models: Any = ("drafter",)
    last: Lookup | None = None
    lenience: float = 1.0
    rules: Any = None
    verification: Verification = Block()  # noqa: RUF009  immutable
    cumulative: bool = False
    width: int | None = None
    dtype: Any = None
    weights: str | Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        models, kinds = self.models, str | os.PathLike | TextModel
        several = isinstance(models, tuple | list) and len(models) > 0
        if not several or not all(isinstance(model, kinds) for model in models):
            raise UserError(
                "models must be a tuple of names, directories or TextModels, the largest first, "
                f"got {models!r}"
            )
        if len(set(models)) < len(models) or "verifier" in models:
            raise UserError(f"models must be different drafters, got {models!r}")
        if not isinstance(self.last, Lookup | None):
            raise UserError(f"last must be Lookup(...) or None, got {self.last!r}")
        for name, default in (("copies", 1), ("min_match", None), ("max_copy", None)):
            if getattr(self.last, name, default) != default:
                raise UserError(
                    f"last must not set {name}, because K has the lengths, got {self.last!r}"
                )
        form_of(self.weights, "drafter")  # its checks
        if self.width is not None:
            check_count("width", self.width, "or None for no siblings", low=2)
        names = [x.name if isinstance(x, TextModel) else os.fspath(x) for x in models]
        matrix = check_lengths(self.lengths, [*names, *(["last"] if self.last else [])])
        object.__setattr__(self, "lengths", tuple(map(tuple, matrix)))
        object.__setattr__(self, "models", tuple(models))
        lenience(self.lenience)  # its checks
        for i, rule in enumerate(self._rules):
            if rule is not None:
                name = "rules" if rule is self.rules else f"rules[{i}]"
                check_is_rule(name, rule)
                if has_carry(rule) or any(map(np.ndim, jax.tree.leaves(rule))):
                    raise UserError(f"{name} must have scalar strengths and no carry, got {rule!r}")
        if self.lenience != 1.0 and None not in self._rules:
            raise UserError("lenience must be left out: each level has its own rule in `rules`")

    @property
    def _rules(self) -> tuple[Any, ...]:
        """The rule of each model, or None for the lenience rule."""
        if not isinstance(self.rules, tuple | list):
            return (self.rules,) * len(self.models)
        if len(self.rules) != len(self.models):
            raise UserError(
                f"rules must have {len(self.models)} entries, a rule or None for each model, got "
                f"{len(self.rules)}"
            )
        return tuple(self.rules)

    @property
    def left_out(self) -> Mapping[str, str]:
        return {"max_draft": "K has the lengths of a cascade's drafts"}

    @property
    def default_verification(self) -> Verification:
        return self.verification if self.width is None else Traversal()

    def make(self, inputs: PlanInputs) -> Planned:
        levels = self._levels(inputs)
        stopping: dict[str, Params] = {}

        def neural(name: str, count: int) -> Any:
            drafter, params = inputs.neural(levels[name], count)
            stopping[name] = params.stopping
            return dataclasses.replace(drafter, name=name)

        vocab_size = inputs.verifier.model.vocab_size
        last = None if self.last is None else self.last.copier(vocab_size, 1)
        table = () if self.last is None else self.last.table(inputs)
        drafter = cascade(
            self.lengths,
            {name: level.model for name, level in levels.items()},
            last,
            verification=self.verification,
            cumulative=self.cumulative,
            neural=neural,
        )
        lenient = lenience(self.lenience)
        rules: dict[str, Rule] = {
            name: lenient if rule is None else rule
            for name, rule in zip(levels, self._rules, strict=True)
        }
        reviewers = self._reviewers(drafter, rules)
        rules = inputs.verifier.place(
            {name: rule for name, rule in rules.items() if name in reviewers}
        )
        prepared = {name: level.prepared for name, level in levels.items()}
        return Planned(
            drafter if self.width is None else drafting.CaterpillarDrafter(drafter, self.width),
            drafting.cascade_params(drafter, prepared, table, rules, stopping),
            own=(table, stopping, rules),
            # A rule without strengths has no parameters to hash.
            described=", ".join(f"{name}: {type(rule).__name__}" for name, rule in rules.items()),
            models=levels,
        )

    def _levels(self, inputs: PlanInputs) -> dict[str, TextModel]:
        """The models by name."""
        main, named = inputs.verifier, inputs.models
        levels: dict[str, TextModel] = {}
        for i, model in enumerate(self.models):
            name, source = f"level_{i + 1}", model
            if isinstance(model, str) and (model in named or inputs.is_trial):
                name, source = model, named.get(model)
            if inputs.is_trial:
                levels[name] = main
                continue
            if not isinstance(source, TextModel):
                if not os.path.isdir(real_path(source)):
                    raise UserError(
                        f"models[{i}]={os.fspath(model)!r} is neither a model of the decoder "
                        f"({', '.join(named)}) nor a directory: check the name or the path"
                    )
                form = form_of(self.weights, "drafter")
                source = load_text_model(source, dtype=self.dtype, mesh=main.mesh, weights=form)
            source.check_alone()
            Models(**{name: source, "verifier": main})  # checks the vocabulary and the mesh
            levels[name] = source
        return levels

    def _reviewers(self, drafter: Drafter, rules: Mapping[str, Rule]) -> set[str]:
        """The names of the models that review; checks that all models have tokens in K."""
        parts = list(_parts(drafter))
        used = {name: name in drafter.model_names for name in rules}
        if self.last is not None:
            used["last"] = any(isinstance(part, drafting.LookupDrafter) for part in parts)
        for name, has_tokens in used.items():
            if not has_tokens:
                raise UserError(
                    f"K={[list(row) for row in self.lengths]} has no tokens for {name} in any row "
                    "that is used: leave out this drafter, or give it tokens"
                )
        reviewers = [part for part in parts if isinstance(part, drafting.VerticalCascade)]
        for reviewer in reviewers:
            check_rule(rules[reviewer.name], reviewer.drafter)
        return {reviewer.name for reviewer in reviewers}


def _parts(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and all drafters in it."""
    yield drafter
    below: tuple[Drafter, ...] = ()
    if isinstance(drafter, drafting.HorizontalCascade):
        below = drafter.drafters
    elif isinstance(drafter, drafting.VerticalCascade):
        below = (drafter.drafter,)
    for part in below:
        yield from _parts(part)
