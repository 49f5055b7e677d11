"""Trains a draft head for a verifier from prompts: for `specjax train drafter`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.heads import save_draft_head
from specjax.checks import PathLike, check_flag, check_number, one_number, whole_fields
from specjax.data.batching import (
    Batching,
    BucketedBatches,
    JoinedLayout,
    PairLayout,
    TokenPairs,
)
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.models import LlamaConfig, Model
from specjax.models.families import family_of
from specjax.models.heads import (
    MARKOV,
    OF_DSPARK,
    BlockConfig,
    EagleConfig,
    HeadConfig,
    ParallelConfig,
    places_of,
)
from specjax.models.qwen import Qwen3Config
from specjax.models.weights import has_stored
from specjax.runs.run_directory import MODEL_NAMES, RunDirectory
from specjax.text import TextModel
from specjax.text.directories import shown_path
from specjax.training.drafter_task import FIGURE, DraftTask, Frozen, TokensPerCall
from specjax.training.losses import Objective
from specjax.training.progress import say
from specjax.training.teacher import (
    SAMPLES_NAME,
    TEXTS,
    ReadPrompts,
    VerifierTexts,
    buckets_for,
    draw_pairs,
    store_pairs,
)
from specjax.training.trainer import (
    EXPORT_DTYPES,
    RESULTS_NAME,
    TrainerConfig,
    TrainingData,
    check_choices,
    check_sources,
    run_directory,
    train,
)

DRAFTER_NAME = "drafter"
KINDS = ("eagle3", "block", "peagle", "mtp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """What head is trained, on which texts, with which loss.

    Attributes:
      kind: one of `KINDS`: EAGLE-3, a block head (DFlash; with `markov` or `confidence` DSpark,
        with `markov="domino"` Domino, with `markov="selector"` DFlash 2), P-EAGLE, or MTP.
      max_draft: G, the drafts that it learns to make at a time.
      boundaries: of the verifier's states that it reads (see `types.LanguageModel.reading`); None:
        an early, a middle and a late one. An MTP reads the last.
      layers: of a block head or P-EAGLE, 2 by default; the others have one.
      draft_vocab: W, the number of tokens that may be drafted, the most frequent ones of the
        verifier's texts; None: all.
      cross_layer: the layer of an encoder-decoder whose keys and values of the encoder's output it
        reads, from 0; None: the last.
      markov: of a block head, one of `models.heads.MARKOV`; None for none.
      markov_rank: the width of that.
      confidence: whether a block head also learns how likely its drafts are accepted.
      objective: the loss of a draft; `distillation_weight` is the share of the divergence from the
        verifier, the rest is the cross entropy of its text.
      decay: draft i (from 0) has the weight `decay ** i` in the loss.
      anchors: the places of a text that are learnt at a time.
      texts: how the verifier writes.
      greedy_texts: whether each prompt also gets the verifier's text at temperature 0.
      tokens_per_batch: padded tokens per batch.
      export_dtype: of the head's arrays on disk.
    """

    kind: str = "eagle3"
    max_draft: int = 7
    boundaries: tuple[int, ...] | None = None
    layers: int | None = None
    draft_vocab: int | None = None
    cross_layer: int | None = None
    markov: str | None = None
    markov_rank: int = 128
    confidence: bool = False
    objective: Objective = dataclasses.field(
        default_factory=lambda: Objective(label_smoothing=0.0, distillation_weight=1.0)
    )
    decay: float = 0.8
    anchors: int = 128
    texts: VerifierTexts = dataclasses.field(default_factory=VerifierTexts)
    greedy_texts: bool = False
    tokens_per_batch: int = 2048
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choices(
            self, {"kind": KINDS, "markov": (*MARKOV, None), "export_dtype": EXPORT_DTYPES}
        )
        whole_fields(self, max_draft=1, markov_rank=1, anchors=1, tokens_per_batch=1)
        whole_fields(self, layers=1, draft_vocab=1, cross_layer=0)
        if self.boundaries is not None:
            places: Any = check_number("boundaries", self.boundaries, low=0, dtype=np.int32)
            if places.ndim != 1 or not places.size:
                raise UserError(
                    f"`boundaries` must be whole numbers such as (2, 4), got {self.boundaries!r}"
                )
            object.__setattr__(self, "boundaries", tuple(places.tolist()))
        one_number("decay", self.decay, low=0.0, high=1.0, open_low=True)
        for name in ("confidence", "greedy_texts"):
            check_flag(name, getattr(self, name))
        if self.kind != "block" and (self.markov or self.confidence):
            raise UserError(
                f"`markov` and `confidence` are options of kind='block', got kind={self.kind!r}"
            )
        if self.kind not in ("block", "peagle") and self.layers:
            raise UserError(
                f"`layers` is an option of kind='block' and 'peagle', got kind={self.kind!r}"
            )
        if self.kind == "mtp" and self.draft_vocab is not None:
            raise UserError(
                "`draft_vocab` must be None for kind='mtp', whose files have no such field, got "
                f"{self.draft_vocab}"
            )

    def head_for(self, verifier: TextModel) -> HeadConfig:
        """The head's configuration.

        Raises:
          UserError: the verifier cannot have such a head.
        """
        model = verifier.model
        if not isinstance(model, Model):
            raise UserError(f"the verifier must be a network, got {type(model).__name__}")
        theirs, depth = model.config, len(model.config.style.layers)
        family = family_of(theirs).name
        if self.kind == "mtp" and family not in ("llama", "qwen3"):
            raise UserError(
                f"kind='mtp' is one more layer of a llama or qwen3, but {verifier.name} is a "
                f"{family}: choose 'eagle3' or 'block'"
            )
        boundaries = self.boundaries
        if self.kind == "mtp":
            if boundaries not in (None, (depth + 1,)):
                raise UserError("`boundaries` must be None for kind='mtp', which reads the last")
            boundaries = (depth + 1,)
        elif boundaries is None:
            boundaries = tuple(sorted({min(2, depth), (depth + 2) // 2, max(1, depth - 1)}))
        elif max(boundaries) > depth:
            raise UserError(
                f"`boundaries` must be in 0 .. {depth}, the states of the verifier's {depth} "
                f"layers, got {boundaries}"
            )
        encodes = theirs.encoder_style is not None
        cross = depth - 1 if self.cross_layer is None else self.cross_layer
        if self.cross_layer is not None and not (encodes and cross < depth):
            raise UserError(
                f"`cross_layer` must be a layer of an encoder-decoder, 0 .. {depth - 1}, got "
                f"{cross} for {verifier.name}"
            )
        if self.draft_vocab is not None and self.draft_vocab > model.vocab_size:
            raise UserError(
                f"`draft_vocab` must be at most {model.vocab_size}, the tokens of "
                f"{verifier.name}, got {self.draft_vocab}"
            )
        normed = self.kind == "block" or family == "qwen3"
        layers = (self.layers or 2) if self.kind in ("block", "peagle") else 1
        # Files need heads that share the width; cross-attention keeps the verifier's own.
        heads = next(n for n in range(theirs.num_heads, 0, -1) if theirs.embed_dim % n == 0)
        sizes = (Qwen3Config if normed else LlamaConfig)(
            vocab_size=theirs.vocab_size,
            embed_dim=theirs.embed_dim,
            num_heads=heads,
            num_kv_heads=math.gcd(heads, theirs.kv_heads),
            head_dim=theirs.head_dim,
            mlp_dim=theirs.mlp_dim,
            num_layers=layers,
            rope_theta=getattr(theirs, "rope_theta", 10_000.0),
            dtype=theirs.dtype,
        )
        common: dict[str, Any] = {
            "layers": sizes,
            "boundaries": boundaries,
            "windows": (None,) * layers,
            "draft_vocab": self.draft_vocab,
            "own_output": self.draft_vocab is not None,
            "cross_layer": cross if encodes else None,
        }
        if self.kind == "mtp":
            return EagleConfig(**common, projects=True, norm_output=True)
        flags = dict.fromkeys(("norm_before_residual", "fc_norm"), True)
        if self.kind == "eagle3":
            return EagleConfig(**common | flags, norm_output=True)
        if self.kind == "peagle":
            mask = theirs.vocab_size - 1
            return ParallelConfig(**common | flags, block_size=self.max_draft, mask_token=mask)
        selects = self.markov == "selector"
        own_slot = bool(self.markov or self.confidence) and not selects
        return BlockConfig(
            **common,
            block_size=self.max_draft + (0 if own_slot else 1),
            # The files of decoder-only heads have a token for it.
            mask_token=None if encodes else theirs.vocab_size - 1,
            from_anchor=own_slot,
            markov=self.markov,
            markov_rank=self.markov_rank if self.markov else 0,
            # As in the published ones.
            markov_memory=4 * self.markov_rank if self.markov == "domino" else None,
            markov_start=1 if self.markov == "domino" else 0,
            candidates=min(16, self.draft_vocab or theirs.vocab_size) if selects else 0,
            conv_taps=2 if selects else 0,
            conv_group=math.gcd(16, theirs.embed_dim) if selects else 1,
            confidence=self.confidence,
            confidence_reads_markov=self.confidence and self.markov in OF_DSPARK,
        )

    def task(self, head: HeadConfig, verifier: TextModel) -> DraftTask:
        model: Any = verifier.model
        return DraftTask(
            head=head,
            verifier=model.config,
            tokens=model.vocab_size,
            objective=self.objective,
            max_draft=self.max_draft,
            decay=float(self.decay),
            anchors=self.anchors,
            pad_id=verifier.tokenizer.pad_id,
        )


@dataclasses.dataclass(kw_only=True)
class VerifierBatches:
    """Batches of the texts that a verifier writes for prompts; see `Batches`.

    The texts are drawn for `pairs`, shard by shard and at each temperature, and kept in the run's
    directory. The order of the batches is that of `seed`, or the prompts' if it is None.
    """

    run: RunDirectory
    verifier: TextModel
    texts: VerifierTexts
    prompts: ReadPrompts
    name: str
    temperatures: tuple[float, ...]
    tokens_per_batch: int
    draw_seed: int
    seed: int | None
    row_multiple: int
    progress: bool

    def describe(self) -> dict[str, Any]:
        texts = dataclasses.asdict(self.texts)
        del texts["batch_size"]  # a text does not depend on those beside it
        return {
            "verifier": self.verifier.fingerprint,
            "prompts": self.prompts.fingerprint,
            **texts,
            "temperature": self.temperatures[0],
            "greedy_texts": len(self.temperatures) > 1,
            "draw_seed": self.draw_seed,
            "tokens_per_batch": self.tokens_per_batch,
            "order": self.seed,
            "row_multiple": self.row_multiple,
        }

    @functools.cached_property
    def pairs(self) -> TokenPairs:
        """Prompts and texts; the directory must be claimed."""
        size, parts = self.texts.shard_rows, []
        for place, temperature in enumerate(self.temperatures):
            for start in range(0, len(self.prompts.tokens), size):
                draw = functools.partial(self._draw, slice(start, start + size), temperature)
                drawn = store_pairs(self.run, (self.name, place, start // size), draw)
                parts += [each for i in range(len(drawn)) for each in drawn[i]]
        ends = set(self.verifier.tokenizer.eos_ids)
        if all(set(target.tolist()) <= ends for target in parts[1::2]):
            raise UserError(
                f"{self.verifier.name} writes only empty texts for the {self.name} prompts: give "
                "prompts that it answers (chat=True for a chat model)"
            )
        return TokenPairs.of(parts)

    def _draw(self, shard: slice, temperature: float) -> TokenPairs:
        inputs = self.prompts.tokens[shard]
        if self.progress:
            count = f"{shard.start:,} of {len(self.prompts.tokens):,}"
            say(f"the verifier writes {self.name} texts at temperature {temperature:g}: {count}")
        return draw_pairs(
            self.verifier,
            inputs,
            [self.texts.max_new_tokens] * len(inputs),
            self.prompts.ids[shard],
            temperature=temperature,
            seed=self.draw_seed,
            batch_size=self.texts.batch_size,
            progress=self.progress,
        )

    @functools.cached_property
    def _batches(self) -> BucketedBatches:
        words = self.verifier.tokenizer
        layout: Any = JoinedLayout(pad_id=words.pad_id)
        if not self.verifier.continues_prompts:
            layout = PairLayout(pad_id=words.pad_id, eos_id=words.eos_ids[0])
        # Each length compiles the whole verifier, so there are three: for half, most and all texts.
        ends = np.quantile(layout.lengths(self.pairs), (0.5, 0.9, 1.0), method="higher")
        lengths = tuple(sorted({buckets_for([range(x)])[-1] for x in ends.tolist()}))
        batching = Batching(tokens_per_batch=self.tokens_per_batch, bucket_lengths=lengths)
        return BucketedBatches(
            self.pairs, batching, layout, seed=self.seed, row_multiple=self.row_multiple
        )

    @property
    def batches_per_epoch(self) -> int:
        return self._batches.batches_per_epoch

    def batch(self, step: int) -> Any:
        return self._batches.batch(step)


def train_drafter(
    recipe: DrafterRecipe,
    trainer: TrainerConfig,
    make_verifier: Callable[[], TextModel],
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains a draft head on texts that its verifier writes, and writes it for `load_pair`.

    After an interruption at any moment, the same call continues: the texts at their shard, training
    at the checkpoint (see `train`), with the same bits. The verifier, its embedding and its output
    projection do not change.

    Args:
      recipe: the head, the texts and the loss.
      trainer: the trainer's settings. `choose_by` may be "tokens_per_call_greedy" or
        "tokens_per_call_sampled": see `TokensPerCall`, along the verifier's texts for the
        validation prompts at temperature 0 and 1.
      make_verifier: called after the arguments are checked. On a mesh, the mesh's axis `data`
        shares the rows of each batch, and each device has the whole head.
      output_dir: the run's directory: `drafter/` (the result), `results.json`, `samples/` (the
        texts), `metrics.jsonl`, `checkpoints/` and the records.
      training_data: prompts; their references are not used.
      validation_data: prompts; the best checkpoint on them is the result.
      on_start: called with the `RunDirectory` after all checks, before the long work.

    Returns:
      The contents of `results.json`: step, number of parameters of the head, validation loss,
      acceptance, and tokens per call.

    Raises:
      OSError: `output_dir` cannot be written, or another process trains there.
      UserError: unusable prompts, a verifier that cannot have such a head or writes only empty
        texts, or the `output_dir` of another run.
    """
    known = ("loss", "acceptance", *(FIGURE + text for text in TEXTS))
    if trainer.choose_by not in known:
        raise UserError(f"`choose_by` must be one of {', '.join(known)}, got {trainer.choose_by!r}")
    examples = {"training": list(training_data), "validation": list(validation_data)}
    with run_directory(output_dir, (DRAFTER_NAME, RESULTS_NAME, SAMPLES_NAME)) as run:
        verifier = make_verifier()
        config = recipe.head_for(verifier)
        if has_stored(verifier.params):
            raise UserError(
                "the verifier is quantised, so the head would learn other states: load it without "
                "weights='int8'"
            )
        check_sources(run, {"verifier": verifier.name})
        model: Any = verifier.model
        task = recipe.task(config, verifier)
        texts, seed = recipe.texts, trainer.seed
        prompts = {
            name: ReadPrompts(verifier, texts, each, name, progress=trainer.progress)
            for name, each in examples.items()
        }
        temperatures: tuple[float, ...] = (texts.temperature,)
        if recipe.greedy_texts and texts.temperature > 0:
            temperatures = (*temperatures, 0.0)
        # Validation texts are other draws, because a prompt may be in both.
        own: dict[str, Any] = {"prompts": prompts["validation"], "draw_seed": seed + 1}
        mesh = verifier.partitioner
        row_multiple = len(trainer.devices()) if mesh is None else mesh.row_multiple
        make = functools.partial(
            VerifierBatches,
            run=run,
            verifier=verifier,
            texts=texts,
            tokens_per_batch=recipe.tokens_per_batch,
            row_multiple=row_multiple,
            progress=trainer.progress,
        )
        training = make(
            name="training",
            prompts=prompts["training"],
            temperatures=temperatures,
            draw_seed=seed,
            seed=seed,
        )
        validation = {
            name: make(name=name, temperatures=(value,), seed=None, **own)
            for name, value in TEXTS.items()
        }

        @functools.cache
        def frozen() -> Frozen:
            if recipe.draft_vocab is None:
                return Frozen(verifier.params)
            # The most frequent tokens of the texts, of equal ones the first, in increasing order.
            targets = np.concatenate([training.pairs[i][1] for i in range(len(training.pairs))])
            counts = np.bincount(targets, minlength=model.vocab_size)
            order = np.argsort(-counts, kind="stable")[: recipe.draft_vocab]
            tokens = np.sort(order).astype(np.int32)
            if model.config.tie_embeddings:
                kernel = verifier.params["token_embedder"]["embedding"][tokens].T
            else:
                kernel = verifier.params["decoder"]["logits_dense"]["kernel"][:, tokens]
            scale = np.asarray(model.config.style.hidden_scale, kernel.dtype)
            places = places_of(tokens, model.config.vocab_size)
            drafted = jnp.asarray(tokens), jnp.asarray(places)
            return Frozen(verifier.params, *drafted, {"kernel": kernel * scale})

        def grow() -> VerifierBatches:
            for each in (training, *validation.values()):
                _ = each.pairs
            return training

        figures = TokensPerCall(
            task,
            frozen,
            {name: (TEXTS[name], each) for name, each in validation.items()},
            verifier.mesh,
        )
        result = train(
            trainer,
            task,
            TrainingData(training=training, validation=validation["sampled"], grow=grow),
            output_dir=run,
            constants=frozen,
            evaluate=figures,
            notes={
                "greedy": validation["greedy"].describe(),
                "draft_vocab": recipe.draft_vocab,
                MODEL_NAMES: {"verifier": shown_path(verifier.name)},
            },
            on_start=on_start,
            mesh=verifier.mesh,
        )
        params = jax.device_get(task.whole(result.params, frozen()))
        size = sum(leaf.size for leaf in jax.tree.leaves(params["network"]))
        place = save_draft_head(
            run.own(DRAFTER_NAME),
            task.model,
            params,
            verifier_params=verifier.params,
            verifier_name=shown_path(verifier.name),
            dtype=recipe.export_dtype,
            max_position_embeddings=verifier.context,
            max_draft=recipe.max_draft,
            replace=True,
        )
        results = {
            "step": result.step,
            "kind": config.kind,
            "num_params": size,
            "max_draft": recipe.max_draft,
            **result.figures,
        }
        run.write_json(RESULTS_NAME, results)
        if trainer.progress:
            say(f"wrote the head to {place} and its figures to {run.path / RESULTS_NAME}")
        return results
