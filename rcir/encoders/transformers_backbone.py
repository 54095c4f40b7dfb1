"""Vision models of transformers, "transformers:NAME" (https://huggingface.co/docs/transformers)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.encoders.hub import HubBackbone, HubModel, no_weights
from rcir.errors import DataUnavailable, InvalidConfig

BILINEAR = 2  # Pillow's number


class TransformersBackbone(HubBackbone):
    """The pooled features of a vision model; of a model of pictures and texts, its image tower.

    Pooled is what the model pools by itself. Its class token is taken where the pooling is the
    optional dense layer, which most published weights of vision transformers lack.

    NAME is a repository of the Hugging Face hub or a folder. Weights are read from safetensors
    only, and no code of a repository is run. The model's configuration is kept in
    ``encoder.architecture``, so that neither repository nor folder is needed afterwards.
    """

    library = "transformers"

    def __init__(self, source: HubModel) -> None:
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
