"""Backbones of timm, "timm:NAME" (https://huggingface.co/docs/timm)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.encoders.hub import HubBackbone, no_weights, other_weights, read_weights
from rcir.errors import InvalidConfig


class TimmBackbone(HubBackbone):
    """The features of a timm model without its classifier.

    Convolutional networks give their last feature map; vision transformers, and other models whose
    features are no maps, what their classifier would be given.

    Weights come from timm's cache or its hub, where safetensors are preferred and other files are
    read without running what they hold (``weights_only``); or from `checkpoint_path`.
    """

    library = "timm"

    def __init__(
        self,
        name: str,
        size: tuple[int, int],
        pretrained: bool,
        checkpoint_path: str | None,
        architecture: Mapping[str, Any],
    ) -> None:
        super().__init__(name, size, pretrained, checkpoint_path, architecture)
        known = _require_model(name)
        # Of the same length as the published ones, so that weights must fit exactly.
        overlay = None if checkpoint_path is None else {"state_dict": read_weights(checkpoint_path)}
        resized = known.fixed_input_size and known.input_size[1:] != tuple(size)
        try:
            self.model = timm.create_model(
                name,
                pretrained=pretrained or checkpoint_path is not None,
                pretrained_cfg_overlay=overlay,
                **({"img_size": size} if resized else {}),
            )
        except Exception as error:  # network, cache, file: each library raises its own
            if checkpoint_path is not None:
                raise other_weights(checkpoint_path, error) from error
            if pretrained:
                raise no_weights(f"{self.library}:{name}", error) from error
            raise InvalidConfig(f"{self.library}:{name} cannot be built: {error}") from error
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
        found = timm.data.resolve_data_config(pretrained_cfg=_require_model(name).to_dict())
        channels, height, width = found["input_size"]
        return Preprocessing(
            (height, width),
            channels,
            tuple(found["mean"]),
            tuple(found["std"]),
            found["interpolation"],
            found["crop_pct"] if found["crop_mode"] == "center" else None,
        )


def _require_model(name: str) -> Any:
    """Return timm's configuration of a model; raise `InvalidConfig` if there is none."""
    try:
        known = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise InvalidConfig(f"encoder.backbone timm:{name} is unknown: {error}") from error
    if known is None:
        raise InvalidConfig(
            f"encoder.backbone timm:{name} is unknown; timm.list_models() names all"
        )
    return known
