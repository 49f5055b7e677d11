"""`specjax infer --gin.NAME=value`: decodes a file of prompts."""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specjax.cli import gin_config, hosts
from specjax.errors import MissingLibraryError, UserError, tell

if TYPE_CHECKING:
    import jax

    from specjax import text

DEFAULT_FILE = "runs/infer.gin"
GROUPS = {
    "prompts": "prompts made from records: --gin_file=prompts/KIND.gin",
    "papers/*/task_*.gin": "tasks of a paper's runs, to add to a pair: "
    "--gin_file=papers/PAPER/task_NAME.gin",
    "papers/*/pair_*.gin": "pairs of a paper's runs: --gin_file=papers/PAPER/pair_NAME.gin",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print the first N outputs, coloured by the source of each token (sets SOURCES=True)",
    )
    hosts.add_arguments(parser)


def register() -> None:
    """Imports the parts of a run and makes them configurable."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import checkpoints
    from specjax.data.few_shot import FewShot
    from specjax.runs import inference

    gin_config.register(
        inference.infer,
        infer_on_ray,
        make_decoder,
        _setting(),
        load_models,
        mesh_of,
        checkpoints.loading.sized,
        FewShot,
    )


@functools.cache
def _setting() -> Callable[..., "text.Setting"]:
    """A `Setting` in which METHOD alone may be changed, for the baselines; `costs` is a file."""
    from specjax import text
    from specjax.drafting import read_costs
    from specjax.text.parts import DrafterAlone, VerifierAlone, make_part
    from specjax.text.setting import OF_DRAFTS

    @functools.wraps(text.Setting, updated=())
    def setting(**values: Any) -> text.Setting:
        if isinstance(make_part("method", values.get("method")), VerifierAlone | DrafterAlone):
            unused = {name: values.pop(name, None) for name in ("rule", *OF_DRAFTS)}
            for name in ("rule", "verification", "stopping", "drafting"):
                make_part(name, unused[name])  # a wrong name is still one
        if isinstance(values.get("costs"), str | os.PathLike):
            values["costs"] = read_costs(values["costs"])
        return text.Setting(**values)

    return setting


def run(args: argparse.Namespace) -> int:
    """Decodes as the gin files configure; prints the metrics as one line of JSON.

    Of several processes only the first one prints them.
    """
    from specjax.runs import inference

    register()
    args.gin_binding += ["infer.sources=True"] if args.show else []
    gin_config.configure_from(args)
    check_paths()
    options: dict[str, Any] = {"on_start": gin_config.recorder(args)}
    function: Callable[..., Any] = infer_on_ray
    if gin_config.value_of("infer_on_ray.workers") is None:
        function = inference.infer
        options |= {"process": args.process, "show": args.show}
    parts = {load_models: ("needed",)}
    metrics = gin_config.call(function, before=check_values, parts=parts, **options)
    if metrics is not None:
        print(json.dumps(metrics))
    return 0


def infer_on_ray(
    make_decoder: Callable[..., "text.Decoder"],
    *,
    workers: int,
    resources: "Mapping[str, float]" = MappingProxyType({}),
    topology: "str | None" = None,
    num_samples: int = 1,
    sources: bool = False,
    inputs_field: "str | int | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Decodes on a Ray cluster; see `specjax.integrations.ray.infer`."""
    try:
        from specjax.integrations import ray
    except ImportError as error:
        raise MissingLibraryError(
            f"runs/ray.gin needs {error.name}: pip install 'specjax[ray]'"
        ) from None
    for name, value, usual in (("num_samples", num_samples, 1), ("sources", sources, False)):
        if value != usual:
            raise UserError(f"{name} must be {usual} on Ray, got {value!r}: give a row for each")
    return ray.infer(
        functools.partial(_decoder_of, gin_config.whole_config(), os.getcwd()),
        workers=ray.Workers(workers, dict(resources), topology=topology),
        inputs_field="inputs" if inputs_field is None else str(inputs_field),
        **options,
    )


def _decoder_of(config: str, directory: str) -> "text.Decoder":
    """The decoder of a gin configuration of another process, whose paths start at a directory."""
    from specjax.compilation import enable_compilation_cache

    os.chdir(directory)
    enable_compilation_cache()
    register()
    gin_config.parse(config)
    return gin_config.call_part(make_decoder)


def check_values() -> None:
    """Checks the values of a run before the models are read, which may take minutes."""
    from specjax.text.requests import CHECKED, check_decoding
    from specjax.text.setting import OF_DRAFTS, check_single

    setting = gin_config.value_of("make_decoder.setting")
    check_single(setting)
    if is_single(setting):
        for name in ("rule", "method", *OF_DRAFTS):
            if name in setting.given:
                raise UserError(
                    f"{name.upper()} needs a drafter, and only VERIFIER is given: give DRAFTER, or "
                    f'leave out {name.upper()}; DRAFTING="Lookup()" drafts without a second model'
                )
    else:
        check_needed(setting.needed, "; METHOD=VerifierAlone needs only the verifier")
    values = {name: gin_config.value_of(f"make_decoder.{name}") for name in CHECKED}
    check_decoding({name: value for name, value in values.items() if value is not None})


def model_paths() -> dict[str, Any]:
    """The paths of the models that the gin files give."""
    paths = {name: gin_config.value_of(f"load_models.{name}") for name in ("verifier", "drafter")}
    return {name: path for name, path in paths.items() if path is not None}


def check_paths() -> None:
    """Refuses a wrong path of a model before all else."""
    from specjax.text.directories import check_model_paths

    check_model_paths({name.upper(): path for name, path in model_paths().items()})


def is_single(setting: "text.Setting") -> bool:
    """Whether the verifier is the only model that is given, and would need a drafter."""
    return [*model_paths()] == ["verifier"] and setting.needed == ("verifier", "drafter")


def check_needed(needed: Collection[str], remedy: str = "") -> None:
    """Refuses a run that is given one of its models and would take the other from a built-in pair.

    Args:
      needed: "verifier", "drafter" or both.
      remedy: the end of the message.
    """
    given = [*model_paths()]
    if given and (missing := [name for name in needed if name not in given]):
        raise UserError(
            f"{given[0].upper()} is given without {missing[0].upper()}: give both, or neither for "
            f"the built-in pair{remedy}"
        )


def make_decoder(
    setting: "text.Setting",
    *,
    max_new_tokens: int = 128,
    stop: "str | Sequence[str]" = (),
    batch_size: int = 16,
    buckets: "Sequence[int] | None" = None,
) -> "text.Decoder":
    """Loads the models that a setting needs, and makes its decoder; see `Decoder`.

    A verifier without a drafter decodes alone.

    Args:
      setting: the way to decode.
    """
    from specjax.text import Decoder

    drafts = _load_alike(setting.part("drafting"))
    if is_single(setting):
        drafts, setting = None, setting.verifier_alone
        tell(
            "DRAFTER is not given, so the verifier decodes alone; "
            'DRAFTING="Lookup()" drafts without a second model'
        )
    decoder = Decoder(
        gin_config.call_part(load_models, setting.needed),
        dataclasses.replace(setting, drafting=drafts),
        max_new_tokens=max_new_tokens,
        stop=stop,
        batch_size=batch_size,
        buckets=buckets,
    )
    if decoder.length is not None:
        tell(decoder.length.why)
    return decoder


def _load_alike(drafts: Any) -> Any:
    """Drafts whose cascades load their models like the pair."""
    from specjax.drafting import Branches, Cascade

    if isinstance(drafts, Branches):
        return dataclasses.replace(drafts, parts=tuple(map(_load_alike, drafts.parts)))
    if not isinstance(drafts, Cascade):
        return drafts
    loading = {name: gin_config.value_of(f"load_models.{name}") for name in ("dtype", "weights")}
    usual = {name: value for name, value in loading.items() if getattr(drafts, name) is None}
    return dataclasses.replace(drafts, **usual)


def mesh_of(data: "int | None" = None, model: "int | None" = None) -> "jax.sharding.Mesh | None":
    """Returns the mesh of a run. Without sizes one process uses one device, several use all."""
    import jax

    from specjax import partitioning

    if data is None and model is None and jax.process_count() == 1:
        if jax.default_backend() != "cpu" and jax.device_count() > 1:
            tell(
                f"using 1 of {jax.device_count()} devices; to use all, set "
                f"MESH_DATA={jax.device_count()}"
            )
        return None
    return partitioning.make_mesh(data, 1 if model is None else model)


def load_models(
    needed: Collection[str] = ("verifier", "drafter"),
    *,
    verifier: "str | None" = None,
    drafter: "str | None" = None,
    dtype: Any = None,
    mesh: "jax.sharding.Mesh | None" = None,
    tokenizer: "str | None" = None,
    check_weights: bool = True,
    weights: Any = None,
    replicate_drafter: bool = False,
    translate_drafter: bool = False,
) -> "dict[str, text.TextModel]":
    """Loads the verifier, the drafter or both; without directories those of the built-in pair."""
    from specjax import text
    from specjax.models.quantised import form_of
    from specjax.text.directories import DEFAULT_PAIR, PREFIX

    shared: dict[str, Any] = {
        "dtype": dtype,
        "mesh": mesh,
        "tokenizer": tokenizer,
        "check_weights": check_weights,
    }
    if len(needed) == 2:
        shared |= {"weights": weights, "replicate_drafter": replicate_drafter}
        shared |= {"translate_drafter": translate_drafter}
        return dict(text.load_pair(verifier=verifier, drafter=drafter, **shared).named)
    (name,) = needed
    path = {"verifier": verifier, "drafter": drafter}[name]
    place = f"{PREFIX}{DEFAULT_PAIR}/{name}" if path is None else path
    return {name: text.load_text_model(place, weights=form_of(weights, name), **shared)}
