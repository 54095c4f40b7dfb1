"""Backbones of timm, "timm:NAME" (https://huggingface.co/docs/timm)."""

from __future__ import annotations

from typing import Any

import timm
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.encoders.hub import HubBackbone, HubModel, no_weights, other_weights, read_weights
from rcir.errors import InvalidConfig


class TimmBackbone(HubBackbone):
    """The features of a timm model without its classifier.

    Convolutional networks give their last feature map; vision transformers, and other models whose
    features are no maps, what their classifier would be given.

    Weights come from timm's cache or its hub, where safetensors are preferred and other files are
    read without running what they hold (``weights_only``); or from `checkpoint_path`.
    """

    library = "timm"

    def __init__(self, source: HubModel) -> None:
        super().__init__(source)
        published = _require_model(source.name)
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
            if source.checkpoint_path is not None:
                raise other_weights(source.checkpoint_path, error) from error
            if source.pretrained:
                raise no_weights(f"{self.library}:{source.name}", error) from error
            raise InvalidConfig(f"{self.library}:{source.name} cannot be built: {error}") from error
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
        settings = timm.data.resolve_data_config(pretrained_cfg=_require_model(name).to_dict())
        channels, height, width = settings["input_size"]
        return Preprocessing(
            (height, width),
            channels,
            tuple(settings["mean"]),
            tuple(settings["std"]),
            settings["interpolation"],
            settings["crop_pct"] if settings["crop_mode"] == "center" else None,
        )


def _require_model(name: str) -> Any:
    """Return timm's configuration of a model; raise `InvalidConfig` if there is none."""
    try:
        published = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise InvalidConfig(f"encoder.backbone timm:{name} is unknown: {error}") from error
    if published is None:
        raise InvalidConfig(
            f"encoder.backbone timm:{name} is unknown; timm.list_models() names all"
        )
    return published
