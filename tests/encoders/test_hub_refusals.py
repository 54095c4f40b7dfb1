"""Backbones of model hubs that cannot be had are refused with what to do."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, MissingPackage
from tests.encoders.models import SIZE, pretrained, published


@pytest.mark.parametrize("package", ["timm", "open_clip", "transformers"])
def test_a_package_that_is_missing_is_named_with_its_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"rcir.encoders.{package}_backbone", raising=False)
    with pytest.raises(MissingPackage, match=rf"pip install 'rcir\[{package}\]'"):
        pretrained(f"{package}:any")


@pytest.mark.parametrize(
    ("backbone", "options", "named"),
    [
        ("timm:nothing", {}, r"timm:nothing is unknown; timm\.list_models"),
        ("timm:resnet18.nothing", {}, "Invalid pretrained tag"),
        ("hub:resnet18", {}, "timm:NAME, open_clip:NAME, transformers:NAME"),
        ("timm:", {}, "is unknown"),
        ("open_clip:nothing", {}, r"open_clip\.list_models"),
        ("open_clip:RN50", {"pretrained": True}, "open_clip:RN50/TAG.*openai"),
        ("open_clip:RN50/nothing", {"pretrained": True}, "open_clip:RN50/TAG"),
        ("timm:test_resnet", {"pretrained": "IMAGENET1K_V1"}, "true or false"),
        ("timm:test_resnet", {"checkpoint_path": "a.pth"}, r"a\.pth.*\.safetensors files only"),
        ("timm:test_resnet", {"checkpoint_path": "a.bin"}, "can run programs"),
        ("mnist-cnn", {"checkpoint_path": "a.safetensors"}, "no pretrained weights"),
        ("resnet50", {"checkpoint_path": "a.pth"}, "can run programs"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(backbone, options, named):
    with pytest.raises(InvalidConfig, match=named):
        pretrained(backbone, **options)


def test_two_sources_of_weights_are_refused():
    with pytest.raises(InvalidConfig, match="give one of them"):
        EncoderConfig("btl", "timm:resnet18", pretrained=True, checkpoint_path="a.safetensors")


@pytest.mark.parametrize("name", ["test_vit", "test_maxvit"])
def test_a_size_that_a_network_does_not_take_is_refused(name):
    with pytest.raises(InvalidConfig, match=rf"{name} does not take images of 100 x 100 pixels"):
        pretrained(f"timm:{name}", (100, 100))


def test_a_hub_takes_colours_only():
    with pytest.raises(InvalidConfig, match=r"3 channels, not 1: set preprocessing\.channels"):
        build_encoder(EncoderConfig("btl", "timm:test_resnet"), 1, SIZE)


@pytest.mark.parametrize("backbone", ["timm:test_convnext", "resnet50", "open_clip:tiny-clip"])
def test_weights_of_another_network_are_refused(backbone, tmp_path, tiny_clip):
    _, path = published("test_resnet", tmp_path)
    with pytest.raises(InvalidData, match="does not hold the weights"):
        pretrained(backbone, checkpoint_path=path)


def test_a_file_of_weights_that_is_damaged_or_missing_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidData, match=r"a\.safetensors is damaged"):
        pretrained("timm:test_resnet", checkpoint_path=str(tmp_path / "a.safetensors"))
    with pytest.raises(DataUnavailable, match=r"there is no file .*b\.safetensors"):
        pretrained("timm:test_resnet", checkpoint_path=str(tmp_path / "b.safetensors"))


def test_weights_that_cannot_be_downloaded_are_unavailable(monkeypatch):
    def offline(*_arguments, **_options):
        raise OSError("no route to host")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(DataUnavailable, match=r"no route to host.*encoder\.checkpoint_path"):
        pretrained("timm:test_resnet", pretrained=True)
    monkeypatch.setattr("open_clip.factory.download_pretrained", offline)
    with pytest.raises(DataUnavailable, match="no route to host"):
        pretrained("open_clip:RN50/openai", pretrained=True)


def test_a_folder_that_is_no_model_is_unavailable(tmp_path):
    for name in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataUnavailable, match=r"correct encoder\.backbone"):
            pretrained(f"transformers:{name}", pretrained=True)


def test_weights_of_transformers_that_are_a_pickle_are_not_read(vit_folder):
    model, folder = vit_folder
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(DataUnavailable, match="safetensors"):
        pretrained(f"transformers:{folder}", pretrained=True)


def test_weights_of_transformers_that_lack_a_part_are_refused(vit_folder):
    model, folder = vit_folder
    part = {name: values for name, values in model.state_dict().items() if "layernorm" not in name}
    save_file(part, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataUnavailable, match=r"lack 10 that the model has.*layernorm"):
        pretrained(f"transformers:{folder}", pretrained=True)
