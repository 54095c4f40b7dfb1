"""Data configurations of timm, OpenCLIP and transformers, and images to compare transforms on.

Nothing is downloaded: configurations are those that the installed libraries list, and image
processors of transformers are built from the settings that well-known models publish.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import open_clip
import timm
import torch
import transformers
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from PIL import Image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from rcir.data import ImageSet, Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.hub_transforms import (
    Untranslatable,
    difference_in_deviations,
    open_clip_preprocessing,
    require_same_values,
    timm_preprocessing,
    transformers_preprocessing,
)
from rcir.retrieval.retriever import Retriever

TINY_CLIP = {  # of OpenCLIP
    "embed_dim": 12,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 50, "width": 64, "heads": 1, "layers": 1},
}
TINY_TOWER = {  # of transformers
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "image_size": 64, "patch_size": 16},
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SATELLITE = {"image_mean": [0.430, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143]}
TF_STD = [0.47853944, 0.4732864, 0.47434163]
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)  # as Pillow numbers them


def edge(length):
    return {"shortest_edge": length}


def square(length, width=None):
    return {"height": length, "width": width or length}


# Class, settings; True if a `Preprocessing` must do the same, False if it must be refused.
PROCESSORS = [
    ("ConvNext", {"size": edge(224), "crop_pct": 0.875, "resample": BICUBIC}, True),
    ("ConvNext", {"size": edge(224), "crop_pct": 0.95, **HALF}, True),
    ("ConvNext", {"size": edge(383), "crop_pct": 0.875}, True),
    ("ConvNext", {"size": edge(384), "crop_pct": 1.0}, True),
    ("ConvNext", {"size": edge(512), "crop_pct": 0.875}, True),
    ("ViT", {"size": square(224), "resample": BILINEAR, **HALF}, True),
    ("ViT", {"size": square(224), "resample": BICUBIC, **IMAGENET}, True),  # Swin, DINO
    ("ViT", {"size": square(224, 112)}, True),
    ("ViT", {"size": edge(224)}, False),
    ("CLIP", {"size": edge(224), "crop_size": square(224)}, True),
    ("CLIP", {"size": edge(248), "crop_size": square(224)}, True),
    ("CLIP", {"size": edge(224), "crop_size": square(256)}, False),
    ("CLIP", {"size": edge(224), "do_center_crop": False}, False),
    ("ChineseCLIP", {"size": square(224), "do_center_crop": False}, True),
    ("Siglip", {"size": square(224), "resample": BICUBIC, **HALF}, True),
    ("Siglip2", {}, False),  # NaFlex: as many patches as an image needs
    ("Bit", {"size": edge(256), "crop_size": square(224), "resample": BICUBIC, **IMAGENET}, True),
    ("Bit", {"size": edge(518), "crop_size": square(518), "resample": BICUBIC, **IMAGENET}, True),
    ("DINOv3ViT", {"size": square(224), **IMAGENET}, True),
    ("DINOv3ViT", {"size": square(224), **SATELLITE}, False),  # one grey level is 0.027
    ("Beit", {"size": square(224), "do_center_crop": False, "resample": BILINEAR, **HALF}, True),
    ("Beit", {"size": square(256), "do_center_crop": True, "crop_size": square(224)}, True),
    ("DeiT", {"size": square(256), "crop_size": square(224), "resample": BICUBIC}, True),
    ("DeiT", {"size": square(438), "crop_size": square(384), "resample": BICUBIC}, True),
    ("EfficientNet", {"size": square(224), "resample": NEAREST, "image_std": TF_STD}, True),
    ("EfficientNet", {"size": square(289), "resample": BICUBIC, "include_top": False}, True),
    (
        "EfficientNet",
        {"size": square(97), "rescale_factor": 1 / 127.5, "rescale_offset": True},
        True,
    ),
    ("Levit", {"size": edge(224), "crop_size": square(224)}, True),
    ("PoolFormer", {"size": edge(224), "crop_pct": 0.9, "crop_size": square(224)}, True),
    ("MobileNetV2", {"size": edge(256), "crop_size": square(224), **HALF}, True),
    ("MobileViT", {"size": edge(288), "crop_size": square(256)}, False),  # BGR
    ("Segformer", {"size": square(512), **IMAGENET}, True),
    ("Pvt", {"size": square(224), **IMAGENET}, True),
    ("Blip", {"size": square(384)}, True),
    ("DPT", {"size": square(384), **HALF}, True),
    ("DPT", {"size": square(518), "keep_aspect_ratio": True, "ensure_multiple_of": 14}, False),
    ("Detr", {}, False),
    ("Sam", {}, False),
    ("Perceiver", {}, False),  # cuts before it resizes
    # Variations of one class.
    ("ViT", {"do_normalize": False}, True),
    ("ViT", {"do_rescale": False}, True),
    ("ViT", {"do_rescale": False, "do_normalize": False}, True),
    ("ViT", {"rescale_factor": 1 / 127.5}, True),
    ("ViT", {"resample": NEAREST}, True),
    ("ViT", {"resample": LANCZOS}, False),
    ("ViT", {"resample": BOX}, False),
    ("ViT", {"resample": HAMMING}, False),
    ("ViT", {"do_resize": False}, False),
    ("ViT", {"do_center_crop": True, "crop_size": square(192)}, True),
    ("ViT", {"do_pad": True, "pad_size": square(256)}, False),
    ("ViT", {"size": {"shortest_edge": 224, "longest_edge": 448}}, False),
    ("CLIP", {"crop_size": square(224, 160)}, False),
]


def pretrained(backbone, size=(64, 64), **options):
    return build_encoder(EncoderConfig("pretrained", backbone, "avg", **options), 3, size).eval()


def check_saved(encoder, size, sources, tmp_path):
    """A loaded retriever embeds as the saved one did, though files or folders of it are gone."""
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    gallery = ImageSet(images, np.arange(6) % 2, list("abcdef"))
    retriever = Retriever.build(encoder, Preprocessing(size, 3), gallery, depth=3)
    folder = retriever.save(tmp_path / "retriever")
    for source in map(Path, sources):
        shutil.rmtree(source) if source.is_dir() else source.unlink()
    again = Retriever.load(folder)
    assert again.encoder.fingerprint() == encoder.fingerprint()
    assert torch.equal(again.embed(images).vectors, retriever.embed(images).vectors)


def timm_configurations():
    """Yield label, number of models and settings, of every model that timm has weights for."""
    models = {}
    for name in timm.list_pretrained():
        published = timm.get_pretrained_cfg(name).to_dict()
        for larger in (False, True):
            if larger and not {"test_input_size", "test_crop_pct"} & published.keys():
                continue
            settings = timm.data.resolve_data_config(pretrained_cfg=published, use_test_size=larger)
            models.setdefault(json.dumps(settings, sort_keys=True), (settings, []))[1].append(name)
    for settings, names in models.values():
        yield f"timm {names[0]}", len(set(names)), lambda own=settings: timm_preprocessing(own)


def open_clip_configurations():
    """Yield the same of OpenCLIP, and variations of its ``PreprocessCfg``."""
    models = {}
    for name, tag in open_clip.list_pretrained():
        size = open_clip.get_model_config(name)["vision_cfg"].get("image_size", 224)
        published = open_clip.get_pretrained_cfg(name, tag)
        settings = merge_preprocess_dict(PreprocessCfg(), published) | {"size": size}
        models.setdefault(json.dumps(settings, sort_keys=True), (settings, []))[1].append(name)
    for change in (
        *({"size": (224, 160)}, {"size": (160, 224), "resize_mode": "squash"}),
        *({"resize_mode": "longest"}, {"resize_mode": "longest", "fill_color": 127}),
        *({"interpolation": "random"}, {"interpolation": "bilinear", "size": 97}),
    ):
        settings = merge_preprocess_dict(PreprocessCfg(), change)
        models[json.dumps(settings, sort_keys=True)] = settings, []
    for settings, names in models.values():
        label = f"open_clip {names[0] if names else settings}"
        yield label, len(names), lambda own=settings: open_clip_preprocessing(own)


def saved(processor, folder):
    """What transformers makes of an image processor that is saved and read again."""
    if type(processor).__name__.endswith("Pil"):
        return transformers_preprocessing(processor)
    processor.save_pretrained(folder)
    read = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    assert type(read) is type(processor)
    return transformers_preprocessing(read)


def transformers_configurations(folder):
    """Yield the same of `PROCESSORS`, once for each backend of transformers."""
    for name, options, _ in PROCESSORS:
        for ending in ("ImageProcessor", "ImageProcessorPil"):
            kind = getattr(transformers, name + ending, None)
            if kind is not None:
                label = f"transformers {name}{ending} {options}"
                yield label, 0, lambda own=kind, its=options: saved(own(**its), folder)


def all_image_processors():
    """Yield every image processor of transformers with its defaults."""
    names = {each for kinds in IMAGE_PROCESSOR_MAPPING_NAMES.values() for each in kinds.values()}
    for name in sorted(each for each in names if each and not each.startswith("TimmWrapper")):
        kind = getattr(transformers, name)
        yield f"transformers {name}", 0, lambda own=kind: transformers_preprocessing(own())


def write_images(folder):
    """Files of photographs in kind: edges, gradients and noise; wide, tall, small and large."""
    rng = np.random.default_rng(0)
    shapes = {
        **{"large.jpg": (1101, 1477), "panorama.png": (203, 911), "small.png": (61, 83)},
        **{"tall.png": (533, 401), "wide.jpg": (375, 500)},
    }
    for name, (height, width) in shapes.items():
        coarse = rng.integers(0, 256, (height // 25 + 1, width // 25 + 1, 3), np.uint8)
        blocks = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
        fine = rng.integers(0, 256, (height, width, 3))
        pixels = (0.9 * np.asarray(blocks) + 0.1 * fine).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name, quality=95)
    return sorted(folder / name for name in shapes)


def largest_difference(preprocessing, transform, files):
    return max(
        difference_in_deviations(
            preprocessing, preprocessing([file])[0], transform(Image.open(file).convert("RGB"))
        )
        for file in files
    )


def compare(configurations, files):
    """Differences of translated configurations, and why others are refused, by their labels."""
    differences, refused, models = {}, {}, Counter()
    for label, count, translate in configurations:
        try:
            preprocessing, transform = translate()
            require_same_values(preprocessing, transform)
        except Untranslatable as error:
            refused[label] = str(error)
            models["refused"] += count
        else:
            with torch.inference_mode():
                differences[label] = largest_difference(preprocessing, transform, files)
            models["translated"] += count
    return differences, refused, models
