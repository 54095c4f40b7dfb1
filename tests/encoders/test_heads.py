import numpy as np
import pytest
import torch

from rcir.encoders.heads import GeM, VarianceHead, pooling


def test_gem_follows_its_formula():
    maps = np.random.default_rng(0).uniform(0.1, 3, (4, 5, 2, 3))
    for p in (1.0, 2.5, 3.0):
        expected = np.array(
            [[(sum(v**p for v in plane.ravel()) / 6) ** (1 / p) for plane in m] for m in maps]
        )
        with torch.no_grad():
            pooled = GeM(p)(torch.from_numpy(maps))
        np.testing.assert_allclose(pooled, expected, rtol=1e-6)


def test_gem_goes_from_the_mean_to_the_maximum():
    maps = torch.rand(3, 7, 4, 4, generator=torch.Generator().manual_seed(0)) + 0.2
    with torch.no_grad():
        torch.testing.assert_close(GeM(1.0)(maps), maps.mean((2, 3)))
        torch.testing.assert_close(GeM(60.0)(maps), maps.amax((2, 3)), rtol=0.06, atol=0)


def test_gem_of_a_dead_channel_has_a_finite_gradient():
    maps = torch.zeros(1, 2, 3, 3, requires_grad=True)
    gem = GeM()
    gem(maps).sum().backward()
    assert torch.isfinite(maps.grad).all()
    assert torch.isfinite(gem.p.grad)


def test_gem_forgets_where_a_feature_was_and_flatten_does_not():
    maps = torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for name, length, forgets in (("gem", 2, True), ("flatten", 18, False)):
        pool, width = pooling(name, torch.Size([2, 3, 3]))
        assert width == length
        assert torch.allclose(pool(maps), pool(maps.flip(-1))) == forgets


@pytest.mark.parametrize("pool", ["gem", "flatten"])
def test_every_image_starts_with_the_same_small_variance(pool):
    head = VarianceHead(pool, torch.Size([6, 2, 2]), hidden=8)
    maps = 50 * torch.rand(9, 6, 2, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        variance = head(maps)
    assert variance.shape == (9, 1)
    np.testing.assert_allclose(variance, 1e-3, rtol=1e-5)
