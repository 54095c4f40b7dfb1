"""Backbones of model hubs by name, "timm:resnet18": which library builds them, and their weights.

A library is imported where one of its backbones is asked for. It comes with an extra of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rcir.data.preprocessing import Preprocessing
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError
from rcir.imports import naming_extras


@dataclass(frozen=True)
class HubModel:
    """A model of a hub, and what it starts from.

    Attributes:
        name: of the model, without that of the hub.
        size: (height, width) of the images.
        pretrained: True to start from the weights that the hub has of the model.
        checkpoint_path: .safetensors file to start from instead.
        architecture: what `HubBackbone.architecture` returned for the name.
    """

    name: str
    size: tuple[int, int]
    pretrained: bool = False
    checkpoint_path: str | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)


class HubBackbone(nn.Module):
    """A network of a model hub: images (n, 3, H, W) to feature maps (n, C, h, w).

    A network that pools by itself gives (n, C, 1, 1).

    Args:
        source: the model, and its weights.
    """

    library: ClassVar[str]  # as it is imported, and before the colon of a name

    def __init__(self, source: HubModel) -> None:
        super().__init__()

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return what builds the network without the hub; empty if the name does."""
        return {}

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return the preprocessing of the model's own configuration."""
        raise NotImplementedError


class TimmBackbone(HubBackbone):
    """The features of a timm model (https://huggingface.co/docs/timm) without its classifier.

    Convolutional networks give their last feature map; vision transformers, and other models whose
    features are no maps, what their classifier would be given.

    Weights come from timm's cache or its hub, where safetensors are preferred and other files are
    read without running what they hold (``weights_only``); or from `checkpoint_path`.
    """

    library = "timm"

    def __init__(self, source: HubModel) -> None:
        import timm

        super().__init__(source)
        published = _timm_model(source.name)
        # Of the same length as the published ones, so that weights must fit exactly.
        overlay = (
            None
            if source.checkpoint_path is None
            else {"state_dict": read_weights(source.checkpoint_path)}
        )
        resized = published.fixed_input_size and published.input_size[1:] != tuple(source.size)
        try:
            self.model = timm.create_model(
                source.name,
                pretrained=source.pretrained or source.checkpoint_path is not None,
                pretrained_cfg_overlay=overlay,
                **({"img_size": source.size} if resized else {}),
            )
        except Exception as error:  # network, cache, file: each library raises its own
            raise _not_built(f"{self.library}:{source.name}", source, error) from error
        self.model.reset_classifier(0)
        self.gives_maps = getattr(self.model, "output_fmt", "NCHW") == "NCHW"

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model.forward_features(images)
        if self.gives_maps and features.ndim == 4:
            return features
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        return pooled[:, :, None, None]

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return that of the model's pretrained configuration (timm's ``data_config``)."""
        import timm

        settings = timm.data.resolve_data_config(pretrained_cfg=_timm_model(name).to_dict())
        channels, height, width = settings["input_size"]
        return Preprocessing(
            (height, width),
            channels,
            tuple(settings["mean"]),
            tuple(settings["std"]),
            settings["interpolation"],
            settings["crop_pct"] if settings["crop_mode"] == "center" else None,
        )


def _timm_model(name: str) -> Any:
    """Return timm's configuration of a model; raise `InvalidConfig` if there is none."""
    import timm

    try:
        published = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise InvalidConfig(f"encoder.backbone timm:{name} is unknown: {error}") from error
    if published is None:
        raise InvalidConfig(
            f"encoder.backbone timm:{name} is unknown; timm.list_models() names all"
        )
    return published


class OpenClipBackbone(HubBackbone):
    """The image embedding of a CLIP model, not yet of unit length; its text tower is dropped.

    Named "open_clip:NAME/TAG" (https://github.com/mlfoundations/open_clip).
    TAG names the weights, as ``open_clip.list_pretrained()`` lists them. OpenCLIP fetches
    safetensors where there are some, and reads other files without running what they hold
    (``weights_only``). With `checkpoint_path`, a file of the whole CLIP model, no tag is needed.
    """

    library = "open_clip"

    def __init__(self, source: HubModel) -> None:
        import open_clip

        super().__init__(source)
        model, tag = _open_clip_model(source.name, with_tag=source.pretrained)
        if source.checkpoint_path is not None:
            read_weights(source.checkpoint_path)
        logger, level = logging.getLogger(), logging.getLogger().level
        logger.setLevel(logging.ERROR)  # it warns where weights come from elsewhere
        try:
            clip = open_clip.create_model(
                model,
                pretrained=tag if source.pretrained else source.checkpoint_path,
                device=torch.get_default_device(),
                force_image_size=None
                if _open_clip_size(model) == tuple(source.size)
                else tuple(source.size),
            )
        except Exception as error:  # network, cache, file: each library raises its own
            raise _not_built(f"{self.library}:{source.name}", source, error) from error
        finally:
            logger.setLevel(level)
        self.model = clip.visual

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.model(images)
        return embedded[:, :, None, None]

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return the preprocessing of the weights: OpenCLIP's ``PreprocessCfg``."""
        import open_clip
        from open_clip.transform import PreprocessCfg

        model, tag = _open_clip_model(name)
        settings: dict[str, Any] = vars(PreprocessCfg())
        settings = settings | (open_clip.get_pretrained_cfg(model, tag) or {} if tag else {})
        return Preprocessing(
            _open_clip_size(model),
            3,
            tuple(settings["mean"]),
            tuple(settings["std"]),
            settings["interpolation"],
            None if settings["resize_mode"] == "squash" else 1.0,
        )


def _open_clip_model(name: str, with_tag: bool = False) -> tuple[str, str]:
    """Model and tag of a name; `InvalidConfig` if there is no such model or tag."""
    import open_clip

    model, _, tag = name.partition("/")
    if model not in open_clip.list_models():
        raise InvalidConfig(
            f"encoder.backbone open_clip:{name} is unknown; open_clip.list_models() names all"
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if tag not in tags and (tag or with_tag):
        raise InvalidConfig(
            f"encoder.backbone is open_clip:{name}; give open_clip:{model}/TAG with the tag of its "
            f"weights, one of {', '.join(tags) or 'none'}"
        )
    return model, tag


def _open_clip_size(model: str) -> tuple[int, int]:
    """Height and width of the images that a model is made for."""
    import open_clip

    side = open_clip.get_model_config(model)["vision_cfg"]["image_size"]
    return (side, side) if isinstance(side, int) else tuple(side)


BILINEAR = 2  # Pillow's number


class TransformersBackbone(HubBackbone):
    """The pooled features of a vision model; of a model of pictures and texts, its image tower.

    Pooled is what the model pools by itself. Its class token is taken where the pooling is the
    optional dense layer, which most published weights of vision transformers lack.

    Named "transformers:NAME" (https://huggingface.co/docs/transformers).
    NAME is a repository of the Hugging Face hub or a folder. Weights are read from safetensors
    only, and no code of a repository is run. The model's configuration is kept in
    ``encoder.architecture``, so that neither repository nor folder is needed afterwards.
    """

    library = "transformers"

    def __init__(self, source: HubModel) -> None:
        import transformers

        super().__init__(source)
        if source.checkpoint_path is not None:
            raise InvalidConfig(
                f"{self.library}:{source.name} takes no encoder.checkpoint_path: give the folder "
                "that holds config.json and model.safetensors, transformers:FOLDER, with "
                "encoder.pretrained=true"
            )
        settings = transformers.AutoConfig.for_model(**source.architecture)
        if source.pretrained:
            model = _pretrained(source.name, settings)
        else:
            model = transformers.AutoModel.from_config(settings, trust_remote_code=False)
        if hasattr(getattr(model, "pooler", None), "dense"):
            model.pooler = None
        self.model = model
        side = getattr(settings, "image_size", None)
        other = side is not None and tuple(source.size) not in ((side, side), side)
        self.options = {"interpolate_pos_encoding": True} if other else {}

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.model(pixel_values=images, **self.options)
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        if pooled is None:
            pooled = outputs.last_hidden_state[:, 0]
        return pooled.reshape(len(images), -1, 1, 1)

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """The model's configuration, that of its image tower."""
        import transformers

        try:
            settings = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise _unknown(name, error) from error
        settings = getattr(settings, "vision_config", settings)
        values: dict[str, Any] = settings.to_diff_dict()
        return values | {"model_type": settings.model_type}

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return the preprocessing of the model's image processor."""
        import transformers

        try:
            processor = transformers.AutoImageProcessor.from_pretrained(
                name, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise _unknown(name, error) from error
        settings = processor.to_dict()
        resized = settings["size"]
        size = settings["crop_size"] if settings.get("do_center_crop") else resized
        if "shortest_edge" in size:
            size = {"height": size["shortest_edge"], "width": size["shortest_edge"]}
        crop = None
        if "shortest_edge" in resized:  # proportions are kept
            share = settings.get("crop_pct")
            crop = share or min(1.0, min(size["height"], size["width"]) / resized["shortest_edge"])
        return Preprocessing(
            (size["height"], size["width"]),
            3,
            tuple(settings["image_mean"]),
            tuple(settings["image_std"]),
            "bilinear" if settings.get("resample") == BILINEAR else "bicubic",
            crop,
        )


def _pretrained(name: str, settings: Any) -> Any:
    import transformers

    try:
        model, report = transformers.AutoModel.from_pretrained(
            name,
            config=settings,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise no_weights(f"transformers:{name}", error) from error
    lacking = [key for key in report["missing_keys"] if "pooler.dense" not in key]
    if lacking:
        raise DataUnavailable(
            f"the weights of transformers:{name} lack {len(lacking)} that the model has, such as "
            f"{min(lacking)}: name a model whose image tower is published"
        )
    return model


def _unknown(name: str, error: Exception) -> DataUnavailable:
    reason = " ".join(str(error).split())[:300]
    return DataUnavailable(
        f"transformers:{name} is no folder of an image model, and not in the cache or on the hub, "
        f"or is of text ({reason}): correct encoder.backbone, or connect once"
    )


HUBS: dict[str, type[HubBackbone]] = {  # by what is before the colon of a name
    kind.library: kind for kind in (TimmBackbone, OpenClipBackbone, TransformersBackbone)
}


def is_of_hub(backbone: str) -> bool:
    """Return whether the name of a backbone is one of a model hub.

    Example:
        >>> is_of_hub("timm:resnet18"), is_of_hub("resnet50")
        (True, False)
    """
    return ":" in backbone


def find_hub(backbone: str) -> tuple[type[HubBackbone], str]:
    """The class that builds a backbone, and the name of the model in its hub.

    Raises:
        InvalidConfig: there is no such hub.
        MissingPackage: its library is not installed.
    """
    hub, _, name = backbone.partition(":")
    if hub not in HUBS or not name:
        raise InvalidConfig(
            f"encoder.backbone {backbone!r} is unknown; models of hubs are "
            f"{', '.join(f'{known}:NAME' for known in HUBS)}"
        )
    with naming_extras():
        import_module(hub)
    return HUBS[hub], name


def build_hub_backbone(
    backbone: str,
    channels: int,
    size: tuple[int, int],
    pretrained: bool | str,
    checkpoint_path: str | None,
    architecture: Mapping[str, Any],
) -> HubBackbone:
    """Build a backbone of a hub; the arguments are those of `rcir.encoders.EncoderConfig`.

    Raises:
        InvalidConfig: there is no such model, or the weights are requested in a way that the hub
            does not have.
        DataUnavailable: the weights are neither cached nor can they be downloaded.
        InvalidData: the file of weights is damaged, or of another model.
    """
    kind, name = find_hub(backbone)
    if channels != 3:
        raise InvalidConfig(
            f"{backbone} takes 3 channels, not {channels}: set preprocessing.channels"
        )
    if not isinstance(pretrained, bool):
        raise InvalidConfig(
            f"{backbone} has no weights {pretrained}; encoder.pretrained is true or false"
        )
    return kind(HubModel(name, size, pretrained, checkpoint_path, architecture))


def hub_preprocessing(backbone: str) -> Preprocessing:
    """Return the preprocessing of the configuration of a hub's model."""
    kind, name = find_hub(backbone)
    return kind.preprocessing(name)


def model_architecture(backbone: str) -> dict[str, Any]:
    """Return what builds a backbone without its hub; empty if the name does."""
    if not is_of_hub(backbone):
        return {}
    kind, name = find_hub(backbone)
    return kind.architecture(name)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        InvalidConfig: the file has another ending; a pickle, which can run any program, is never
            read.
        DataUnavailable: there is no such file.
        InvalidData: it is damaged.
    """
    if not path.endswith(".safetensors"):
        raise InvalidConfig(
            f"encoder.checkpoint_path is {path}; weights are read from .safetensors files only, "
            "since other formats can run programs: convert it with safetensors.torch.save_file"
        )
    if not Path(path).is_file():
        raise DataUnavailable(f"there is no file {path}: correct encoder.checkpoint_path")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is damaged ({error}): fetch it again") from error


def take_weights(network: nn.Module, path: str) -> None:
    """Load the weights of a safetensors file into a network; see `read_weights`.

    Raises:
        InvalidData: they are another network's.
    """
    weights = read_weights(path)
    if torch.get_default_device().type == "meta":  # a dry run
        return
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise other_weights(path, error) from error


def other_weights(path: str, error: Exception) -> InvalidData:
    """The error of a file that holds the weights of another network."""
    lines = str(error).split("\n")
    return InvalidData(
        f"{path} does not hold the weights of this backbone: {' '.join(lines[:2])[:300]}"
    )


def no_weights(backbone: str, error: Exception) -> DataUnavailable:
    """The error of weights that are neither cached nor can be downloaded."""
    reason = " ".join(str(error).split())[:300]
    return DataUnavailable(
        f"the weights of {backbone} are not in the cache, or damaged there, and could not be "
        f"downloaded ({reason}); connect once, give a file with encoder.checkpoint_path, or train "
        "from scratch with encoder.pretrained=false"
    )


def _not_built(backbone: str, source: HubModel, error: Exception) -> RcirError:
    """The error of a backbone that its library does not build."""
    if source.checkpoint_path is not None:
        return other_weights(source.checkpoint_path, error)
    if source.pretrained:
        return no_weights(backbone, error)
    return InvalidConfig(f"{backbone} cannot be built: {error}")
