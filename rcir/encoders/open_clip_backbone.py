"""Image towers of OpenCLIP, "open_clip:NAME/TAG" (https://github.com/mlfoundations/open_clip)."""

from __future__ import annotations

import logging
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.encoders.hub import HubBackbone, HubModel, no_weights, other_weights, read_weights
from rcir.errors import InvalidConfig


class OpenClipBackbone(HubBackbone):
    """The image embedding of a CLIP model, not yet of unit length; its text tower is dropped.

    TAG names the weights, as ``open_clip.list_pretrained()`` lists them. OpenCLIP fetches
    safetensors where there are some, and reads other files without running what they hold
    (``weights_only``). With `checkpoint_path`, a file of the whole CLIP model, no tag is needed.
    """

    library = "open_clip"

    def __init__(self, source: HubModel) -> None:
        super().__init__(source)
        model, tag = _require_model(source.name, with_tag=source.pretrained)
        if source.checkpoint_path is not None:
            read_weights(source.checkpoint_path)
        logger, level = logging.getLogger(), logging.getLogger().level
        logger.setLevel(logging.ERROR)  # it warns where weights come from elsewhere
        try:
            clip = open_clip.create_model(
                model,
                pretrained=tag if source.pretrained else source.checkpoint_path,
                device=torch.get_default_device(),
                force_image_size=None if _size(model) == tuple(source.size) else tuple(source.size),
            )
        except Exception as error:  # network, cache, file: each library raises its own
            if source.checkpoint_path is not None:
                raise other_weights(source.checkpoint_path, error) from error
            if source.pretrained:
                raise no_weights(f"{self.library}:{source.name}", error) from error
            raise InvalidConfig(f"{self.library}:{source.name} cannot be built: {error}") from error
        finally:
            logger.setLevel(level)
        self.model = clip.visual

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.model(images)
        return embedded[:, :, None, None]

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return the preprocessing of the weights: OpenCLIP's ``PreprocessCfg``."""
        model, tag = _require_model(name)
        settings: dict[str, Any] = vars(PreprocessCfg())
        settings = settings | (open_clip.get_pretrained_cfg(model, tag) or {} if tag else {})
        return Preprocessing(
            _size(model),
            3,
            tuple(settings["mean"]),
            tuple(settings["std"]),
            settings["interpolation"],
            None if settings["resize_mode"] == "squash" else 1.0,
        )


def _require_model(name: str, with_tag: bool = False) -> tuple[str, str]:
    """Model and tag of a name; `InvalidConfig` if there is no such model or tag."""
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


def _size(model: str) -> tuple[int, int]:
    """Height and width of the images that a model is made for."""
    side = open_clip.get_model_config(model)["vision_cfg"]["image_size"]
    return (side, side) if isinstance(side, int) else tuple(side)
