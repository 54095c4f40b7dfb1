"""Backbones of model hubs by name, such as "timm:resnet18", their weights and preprocessing.

A library is imported when one of its backbones is built. Each has an extra of its own.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rcir.data.preprocessing import Preprocessing
from rcir.encoders.hub_transforms import (
    Transform,
    Untranslatable,
    open_clip_preprocessing,
    require_same_values,
    timm_preprocessing,
    transformers_preprocessing,
)
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.imports import naming_extras
from rcir.torch_settings import shared_by_threads

if TYPE_CHECKING:
    from rcir.encoders.base import EncoderConfig

HF_HUB = "hf-hub:"  # before the names of repositories, in timm and OpenCLIP
RETRY_AFTER_S = 60  # before a hub that did not answer is tried again
_failures: dict[str, float] = {}  # by address of the hub: the time of the last failed request
_request_lock = Lock()


class HubBackbone(nn.Module):
    """A network of a model hub: images (n, 3, *size) to feature maps (n, C, h, w), or (n, C, 1, 1).

    `name` is that of the model without the hub.
    """

    library: ClassVar[str]  # as it is imported, and before the colon of a name

    def __init__(self, name: str, config: EncoderConfig, size: tuple[int, int]) -> None:
        super().__init__()

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return what builds the network without the hub; empty if the name is enough."""
        raise NotImplementedError

    @classmethod
    def preprocessing(cls, name: str) -> tuple[Preprocessing, Transform]:
        """Return the translated transform of the model's own configuration, and the transform."""
        raise NotImplementedError


class TimmBackbone(HubBackbone):
    """The features of a timm model (https://huggingface.co/docs/timm) without its classifier.

    Convolutional networks return their last feature map; other models, such as vision transformers,
    the input of their classifier. timm prefers safetensors, and reads other files without running
    code in them (``weights_only``).
    """

    library = "timm"

    def __init__(self, name: str, config: EncoderConfig, size: tuple[int, int]) -> None:
        import timm

        super().__init__(name, config, size)
        options: dict[str, Any] = {}
        model = name
        if config.architecture:
            published = config.architecture["pretrained_cfg"]
            if not config.pretrained:
                model = config.architecture["name"]
                options = {"pretrained_cfg": published, **config.architecture["model_args"]}
        else:
            published = _timm_model(name).to_dict()
        if config.checkpoint_path is not None:
            # An overlay keeps the published number of classes, so that weights must fit exactly.
            weights = read_weights(config.checkpoint_path)
            options["pretrained_cfg_overlay"] = {"state_dict": weights}
        if published.get("fixed_input_size") and tuple(published["input_size"][1:]) != tuple(size):
            options["img_size"] = tuple(size)
        with _building(f"timm:{name}", config):
            self.model = timm.create_model(model, pretrained=config.starts_pretrained, **options)
        self.model.reset_classifier(0)
        self.gives_maps = getattr(self.model, "output_fmt", "NCHW") == "NCHW"

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model.forward_features(images)
        if self.gives_maps and features.ndim == 4:
            return features
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        return pooled[:, :, None, None]

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return the name of a repository's network and its configuration."""
        if not name.startswith(HF_HUB):
            return {}
        from timm.models import load_model_config_from_hf

        with _reading_configuration(cls.library, name):
            published, model, options = load_model_config_from_hf(name.removeprefix(HF_HUB))
        unused = ("label_names", "label_descriptions", "hf_hub_id", "source")
        config = {key: value for key, value in published.items() if key not in unused}
        return {"name": model, "pretrained_cfg": config, "model_args": dict(options or {})}

    @classmethod
    def preprocessing(cls, name: str) -> tuple[Preprocessing, Transform]:
        """Return that of the model's pretrained configuration (timm's ``data_config``)."""
        import timm

        published = cls.architecture(name).get("pretrained_cfg") or _timm_model(name).to_dict()
        return timm_preprocessing(timm.data.resolve_data_config(pretrained_cfg=published))


def _timm_model(name: str) -> Any:
    """Return timm's configuration of a model; raise `InvalidConfig` if there is none."""
    import timm

    try:
        published = timm.get_pretrained_cfg(name)
    except (RuntimeError, ValueError) as error:
        raise InvalidConfig(f"the model timm:{name} is unknown: {error}") from error
    if published is None:
        raise InvalidConfig(
            f"the model timm:{name} is unknown; timm.list_models() names all, and a repository of "
            "the Hugging Face hub is timm:hf-hub:ORG/NAME"
        )
    return published


class OpenClipBackbone(HubBackbone):
    """The image embedding of a CLIP model, not yet of unit length; its text tower is dropped.

    Named "NAME/TAG" (https://github.com/mlfoundations/open_clip), where TAG names the weights, or
    "hf-hub:ORG/NAME". OpenCLIP prefers safetensors, and reads other files without running code in
    them (``weights_only``). With `checkpoint_path`, a file of the whole model, no tag is needed.
    """

    library = "open_clip"

    def __init__(self, name: str, config: EncoderConfig, size: tuple[int, int]) -> None:
        import open_clip

        super().__init__(name, config, size)
        tag: str | None = None
        if config.architecture:
            settings, model = config.architecture["model_cfg"], name
        else:
            model, tag = _open_clip_model(name, with_tag=bool(config.pretrained))
            settings = open_clip.get_model_config(model)
        if config.checkpoint_path is not None:
            read_weights(config.checkpoint_path)
        options: dict[str, Any] = {"device": torch.get_default_device()}
        if _image_size(settings) != tuple(size):
            options["force_image_size"] = tuple(size)
        logger, level = logging.getLogger(), logging.getLogger().level
        logger.setLevel(logging.CRITICAL)  # OpenCLIP warns of weights from elsewhere
        try:
            with _building(f"open_clip:{name}", config):
                if config.pretrained:
                    clip = open_clip.create_model(
                        model, pretrained=tag, require_pretrained=True, **options
                    )
                else:
                    clip = _open_clip_network(settings, config.checkpoint_path, options)
        finally:
            logger.setLevel(level)
        self.model = clip.visual

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.model(images)
        return embedded[:, :, None, None]

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return the configuration of a repository."""
        return {"model_cfg": _repository(name)["model_cfg"]} if name.startswith(HF_HUB) else {}

    @classmethod
    def preprocessing(cls, name: str) -> tuple[Preprocessing, Transform]:
        """Return the preprocessing of the weights: OpenCLIP's ``PreprocessCfg``."""
        import open_clip
        from open_clip.transform import PreprocessCfg, merge_preprocess_dict

        if name.startswith(HF_HUB):
            repository = _repository(name)
            model, published = repository["model_cfg"], repository.get("preprocess_cfg", {})
        else:
            model_name, tag = _open_clip_model(name)
            model = open_clip.get_model_config(model_name)
            published = open_clip.get_pretrained_cfg(model_name, tag) if tag else {}
        settings = merge_preprocess_dict(PreprocessCfg(), published or {})
        return open_clip_preprocessing(settings | {"size": _image_size(model)})


def _open_clip_network(
    settings: Mapping[str, Any], checkpoint_path: str | None, options: Mapping[str, Any]
) -> Any:
    """Build a CLIP model with the weights of a file or random ones."""
    import open_clip

    if checkpoint_path is None:  # weights of the image tower alone follow
        text = {"context_length": 4, "vocab_size": 4, "width": 4, "heads": 1, "layers": 1}
        others = ("custom_text", "multimodal_cfg", "text_cfg")
        settings = {key: value for key, value in settings.items() if key not in others}
        settings = settings | {"text_cfg": text}
    with TemporaryDirectory() as folder:
        file = Path(folder, "open_clip_config.json")
        file.write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
        clip = open_clip.create_model(f"local-dir:{folder}", **options)
    if checkpoint_path is not None:
        open_clip.load_checkpoint(clip, checkpoint_path)
    return clip


def _repository(name: str) -> dict[str, Any]:
    """Return the configuration of OpenCLIP in a repository, "hf-hub:ORG/NAME"."""
    from huggingface_hub import hf_hub_download

    with _reading_configuration("open_clip", name):
        file = hf_hub_download(name.removeprefix(HF_HUB), "open_clip_config.json")
        settings: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
        if "vision_cfg" not in settings.get("model_cfg", {}):
            raise ValueError("open_clip_config.json has no model_cfg with a vision_cfg")
    return settings


def _open_clip_model(name: str, with_tag: bool = False) -> tuple[str, str]:
    """Return model and tag of a name; raise `InvalidConfig` if there is no such model or tag."""
    import open_clip

    model, _, tag = name.partition("/")
    if model not in open_clip.list_models():
        raise InvalidConfig(
            f"the model open_clip:{name} is unknown; open_clip.list_models() names all, and a "
            "repository of the Hugging Face hub is open_clip:hf-hub:ORG/NAME"
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if tag not in tags and (tag or with_tag):
        raise InvalidConfig(
            f"the model is open_clip:{name}; it must be open_clip:{model}/TAG with the tag of its "
            f"weights, one of {', '.join(tags) or 'none'}"
        )
    return model, tag


def _image_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width of the images that a model of OpenCLIP expects."""
    side = settings["vision_cfg"].get("image_size", 224)
    return (side, side) if isinstance(side, int) else (side[0], side[1])


class TransformersBackbone(HubBackbone):
    """The features that a vision model, or the image tower of a CLIP model, pools by itself.

    The class token replaces a pooling by the optional dense layer, which most published weights of
    vision transformers lack. CLIP models return the vector before the projection to the space of
    the texts, unless ``encoder.projected``. The name is a repository of the Hugging Face hub or a
    folder. Weights are read from safetensors only, and no code of a repository is run.
    """

    library = "transformers"

    def __init__(self, name: str, config: EncoderConfig, size: tuple[int, int]) -> None:
        import transformers

        super().__init__(name, config, size)
        if config.checkpoint_path is not None:
            raise InvalidConfig(
                f"transformers:{name} takes no separate file of weights: pass the folder with "
                "config.json and model.safetensors as its name, transformers:FOLDER"
            )
        settings = transformers.AutoConfig.for_model(**config.architecture)
        kind = _projecting_model(name, settings) if config.projected else None
        if config.pretrained:
            model = _load_pretrained(name, settings, kind or transformers.AutoModel)
        elif kind is not None:
            model = kind(settings)
        else:
            model = transformers.AutoModel.from_config(settings, trust_remote_code=False)
        if hasattr(getattr(model, "pooler", None), "dense"):
            model.pooler = None
        self.model = model
        side = getattr(settings, "image_size", None)
        other = side is not None and tuple(size) not in ((side, side), side)
        self.options = {"interpolate_pos_encoding": True} if other else {}

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.model(pixel_values=images, **self.options)
        pooled: Tensor | None = getattr(outputs, "image_embeds", None)  # if projected
        if pooled is None:
            pooled = getattr(outputs, "pooler_output", None)
        if pooled is None:
            pooled = outputs.last_hidden_state[:, 0]
        return pooled.reshape(len(images), -1, 1, 1)

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return the configuration of the model's image tower."""
        import transformers

        with _reading_configuration(cls.library, name):
            whole = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        settings = getattr(whole, "vision_config", whole)
        if hasattr(settings, "projection_dim"):
            settings.projection_dim = whole.projection_dim
        values: dict[str, Any] = settings.to_diff_dict()
        return values | {"model_type": settings.model_type}

    @classmethod
    def preprocessing(cls, name: str) -> tuple[Preprocessing, Transform]:
        """Return the preprocessing of the model's image processor."""
        import transformers

        with _reading_configuration(cls.library, name):
            processor = transformers.AutoImageProcessor.from_pretrained(
                name, trust_remote_code=False
            )
        return transformers_preprocessing(processor)


def _projecting_model(name: str, settings: Any) -> Any:
    """Return the class of transformers of an image tower with its projection."""
    import transformers

    tower = transformers.MODEL_MAPPING.get(type(settings), None)
    kind = getattr(transformers, f"{getattr(tower, '__name__', '')}WithProjection", None)
    if kind is None or kind.config_class is not type(settings):
        raise InvalidConfig(
            f"transformers:{name} has no projection of its image tower: set projected=false "
            "(SigLIP compares its pooled vectors with texts as they are)"
        )
    return kind


def _load_pretrained(name: str, settings: Any, kind: Any) -> Any:
    options = {} if kind.__name__ != "AutoModel" else {"trust_remote_code": False}
    try:
        with one_attempt(folder=name):
            model, report = kind.from_pretrained(
                name,
                config=settings,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError) as error:
        raise _no_weights(f"transformers:{name}", error) from error
    lacking = [key for key in report["missing_keys"] if "pooler.dense" not in key]
    if lacking:
        raise DataUnavailable(
            f"the weights of transformers:{name} lack {len(lacking)} that the model has, such as "
            f"{min(lacking)}: name a model whose image tower is published"
        )
    return model


@contextmanager
def one_attempt(folder: str = "") -> Iterator[None]:
    """Use the cache of the Hugging Face hub alone if a single request does not reach the hub.

    Its client would repeat each request for up to a minute, and libraries repeat that.
    """
    if folder and Path(folder).is_dir():
        yield
        return
    with _request_lock:  # threads that start together wait for a single request
        reachable = _is_reachable()
    if reachable:
        yield
    else:
        with shared_by_threads(one_attempt, _offline):
            yield


@contextmanager
def _offline() -> Iterator[None]:
    """Switch the hub's client to its offline mode, a setting that all threads share."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable() -> bool:
    from huggingface_hub import constants, get_session

    failed = _failures.get(constants.ENDPOINT, -math.inf)
    if constants.HF_HUB_OFFLINE or time.monotonic() < failed + RETRY_AFTER_S:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # each version of the client raises its own
        _failures[constants.ENDPOINT] = time.monotonic()
        return False
    return True


@contextmanager
def _reading_configuration(library: str, name: str) -> Iterator[None]:
    """Turn any failure to read the configuration of a model into one error."""
    try:
        with one_attempt(folder=name):
            yield
    except Exception as error:  # network, cache, file: each library raises its own
        advice = "correct the model's name, or connect once"
        if library == TransformersBackbone.library:
            advice += (
                "; or pass a folder with config.json, preprocessor_config.json and "
                "model.safetensors, transformers:FOLDER"
            )
        place = "that folder" if Path(name).is_dir() else "the cache or on the hub"
        raise DataUnavailable(
            f"the configuration of {library}:{name} was not found in {place} "
            f"({_shorten(error)}): {advice}"
        ) from error


HUBS: dict[str, type[HubBackbone]] = {  # by what precedes the colon of a name
    kind.library: kind for kind in (TimmBackbone, OpenClipBackbone, TransformersBackbone)
}


def is_of_hub(backbone: str) -> bool:
    """Return whether the name of a backbone is one of a model hub, such as "timm:resnet18"."""
    return ":" in backbone


def find_hub(backbone: str) -> tuple[type[HubBackbone], str]:
    """Return the class that builds a backbone, and the name of the model in its hub."""
    hub, _, name = backbone.partition(":")
    if hub not in HUBS or not name:
        choices = ", ".join(f"{library}:NAME" for library in HUBS)
        raise InvalidConfig(f"the model {backbone!r} is unknown; models of hubs are {choices}")
    with naming_extras():
        import_module(hub)
    return HUBS[hub], name


def build_hub_backbone(config: EncoderConfig, channels: int, size: tuple[int, int]) -> HubBackbone:
    """Build the backbone of a hub that a configuration names; errors as of `build_backbone`."""
    backbone = config.backbone
    kind, name = find_hub(backbone)
    if channels != 3:
        raise InvalidConfig(
            f"{backbone} takes 3 channels, not {channels}: set preprocessing.channels"
        )
    if not isinstance(config.pretrained, bool):
        raise InvalidConfig(
            f"{backbone} has no weights {config.pretrained}; encoder.pretrained is true or false"
        )
    return kind(name, config, size)


def hub_preprocessing(backbone: str) -> Preprocessing:
    """Return the preprocessing of a hub's model, checked against the library's own transform."""
    kind, name = find_hub(backbone)
    try:
        preprocessing, transform = kind.preprocessing(name)
        require_same_values(preprocessing, transform)
    except Untranslatable as error:
        raise InvalidConfig(
            f"the images of {backbone} cannot be prepared as its library does: {error}. Choose "
            "another model, or embed with its library and pass the vectors to rcir certify"
        ) from error
    return preprocessing


def model_architecture(backbone: str) -> dict[str, Any]:
    """Return what builds a backbone without its hub; empty if the name is enough."""
    if not is_of_hub(backbone):
        return {}
    kind, name = find_hub(backbone)
    return kind.architecture(name)


def read_weights(path: str) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; pickles, which can run programs, are never read."""
    if not path.endswith(".safetensors"):
        raise InvalidConfig(
            f"weights are read from .safetensors files only, and not from {path}, since other "
            "formats can run programs: convert it with safetensors.torch.save_file"
        )
    if not Path(path).is_file():
        raise DataUnavailable(f"there is no file {path}: correct the path of the weights")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is damaged ({error}): fetch it again") from error


def load_weights(network: nn.Module, path: str) -> None:
    """Load the weights of a safetensors file; raise `InvalidData` if they are another network's."""
    weights = read_weights(path)
    if torch.get_default_device().type == "meta":  # a dry run
        return
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise _other_weights(path, error) from error


def _other_weights(path: str, error: Exception) -> InvalidData:
    return InvalidData(f"{path} does not hold the weights of this backbone: {_shorten(error)}")


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _no_weights(backbone: str, error: Exception) -> DataUnavailable:
    local = "a .safetensors file of them (--checkpoint, encoder.checkpoint_path)"
    if backbone.startswith(f"{TransformersBackbone.library}:"):
        local = "a folder with config.json and model.safetensors, transformers:FOLDER"
    return DataUnavailable(
        f"the weights of {backbone} are not in the cache, or damaged there, and could not be "
        f"downloaded ({_shorten(error)}): connect once, or pass {local}"
    )


@contextmanager
def _building(backbone: str, config: EncoderConfig) -> Iterator[None]:
    """Turn any failure of a library to build a network into an error of rcir."""
    try:
        with one_attempt() if config.pretrained else nullcontext():
            yield
    except Exception as error:  # network, cache, file: each library raises its own
        if config.checkpoint_path is not None:
            raise _other_weights(config.checkpoint_path, error) from error
        if config.pretrained:
            raise _no_weights(backbone, error) from error
        raise InvalidConfig(f"{backbone} cannot be built: {error}") from error
