"""Deep ensembles: combined distances, and alignment of members by orthogonal Procrustes."""

import numpy as np
import pytest
import torch

from rcir.encoders import EncoderConfig
from tests.encoders import small
from tests.encoders.small import pictures

MEMBERS = 3


def build(mode):
    options = {"members": MEMBERS, "combination": mode}
    return small.build(EncoderConfig("deep-ensemble", dim=6, options=options))


def unit_vectors(encoder, images):
    """(members, n, dim), member by member."""
    vectors = np.stack([member.embed(images).vectors.double() for member in encoder.members])
    return vectors / np.linalg.norm(vectors, axis=2, keepdims=True)


def rotate_members(encoder):
    """Make every member the first one behind a random rotation."""
    rng = np.random.default_rng(0)
    for member in list(encoder.members)[1:]:
        member.load_state_dict(encoder.members[0].state_dict())
        rotation = torch.tensor(np.linalg.qr(rng.standard_normal((6, 6)))[0], dtype=torch.float32)
        last = member.mean_head[-1]
        with torch.no_grad():
            last.weight.copy_(rotation @ last.weight)
            last.bias.copy_(rotation @ last.bias)


def test_squared_distance_of_joint_vectors_is_the_mean_of_the_members_squared_distances():
    encoder, images = build("distance"), pictures(8)
    z = unit_vectors(encoder, images)
    joint = encoder.embed(images).vectors
    assert joint.shape == (8, MEMBERS * 6)
    for i in range(8):
        for j in range(8):
            expected = np.mean(((z[:, i] - z[:, j]) ** 2).sum(1))
            assert (joint[i] - joint[j]).square().sum().item() == pytest.approx(expected, abs=1e-5)


def test_alignment_recovers_rotations_of_one_network():
    encoder = build("aligned")
    rotate_members(encoder)
    before = encoder.embed(pictures(40)).uncertainty
    with torch.no_grad():
        encoder.align(encoder.member_vectors(pictures(40, seed=2)))
    after = encoder.embed(pictures(40))
    assert before.min() > 0.01
    assert after.uncertainty.max() < 1e-8
    np.testing.assert_allclose(after.vectors, unit_vectors(encoder, pictures(40))[0], atol=1e-4)
    gram = encoder.rotations @ encoder.rotations.transpose(1, 2)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(6), (MEMBERS, 6, 6)), atol=1e-5)


def test_the_reference_combination_mistakes_rotations_for_uncertainty():
    encoder = build("reference")
    rotate_members(encoder)
    with torch.no_grad():
        encoder.align(encoder.member_vectors(pictures(40, seed=2)))
    embedding = encoder.embed(pictures(40))
    z = unit_vectors(encoder, pictures(40))
    np.testing.assert_allclose(embedding.vectors, z.mean(0), atol=1e-5)
    np.testing.assert_allclose(embedding.variance, z.var(0), atol=1e-5)
    np.testing.assert_allclose(embedding.uncertainty, z.var(0).mean(1), atol=1e-5)
    assert embedding.uncertainty.min() > 0.01


@pytest.mark.parametrize("mode", ["aligned", "distance"])
def test_uncertainty_is_the_spread_of_the_aligned_members(mode):
    encoder = build(mode)
    z = unit_vectors(encoder, pictures(40))
    aligned = []
    for k in range(MEMBERS):  # orthogonal Procrustes of member k onto the first
        left, _, right = np.linalg.svd(z[k].T @ z[0])
        aligned.append(z[k] @ left @ right)
    with torch.no_grad():
        encoder.align(encoder.member_vectors(pictures(40)))
    spread = np.var(aligned, axis=0, ddof=1).mean(1)
    np.testing.assert_allclose(encoder.embed(pictures(40)).uncertainty, spread, rtol=1e-2)


def test_members_start_from_different_weights():
    z = unit_vectors(build("distance"), pictures(4))
    assert np.abs(z[0] - z[1]).max() > 0.1
