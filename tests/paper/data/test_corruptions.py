"""Images made worse: each kind does what it says, more with every strength, and the same for a seed."""

import pytest
import torch
from scipy.ndimage import gaussian_filter

from noisygrad_paper.data import CORRUPTIONS, corrupted

SIGMA = {"noise": (0.04, 0.06, 0.08, 0.09, 0.10), "blur": (0.4, 0.6, 0.7, 0.8, 1.0)}
FACTOR = (0.75, 0.5, 0.4, 0.3, 0.15)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=6, channels=3, size=32):
    return torch.rand(n, channels, size, size, generator=seeded(1))


def test_the_kinds():
    assert list(CORRUPTIONS) == ["noise", "blur", "contrast"]


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_type_and_range_are_kept(kind, dtype):
    x = pictures().to(dtype)
    before = x.clone()
    for strength in range(1, 6):
        made = corrupted(x, kind, strength, seeded())
        assert (made.shape, made.dtype) == (x.shape, dtype)
        assert made.min() >= 0
        assert made.max() <= 1
        assert not torch.equal(made, x)
    assert torch.equal(x, before)
    assert corrupted(x[:0], kind, 1, seeded()).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_change_grows_with_the_strength(kind):
    x = pictures()
    changes = [(corrupted(x, kind, strength, seeded()) - x).square().mean().item() for strength in range(1, 6)]
    assert changes == sorted(set(changes))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_same_seed_same_images(kind):
    x = pictures()
    assert torch.equal(corrupted(x, kind, 3, seeded(7)), corrupted(x, kind, 3, seeded(7)))
    same = torch.equal(corrupted(x, kind, 3, seeded(7)), corrupted(x, kind, 3, seeded(8)))
    assert same == (kind != "noise")


@pytest.mark.parametrize("strength", range(1, 6))
def test_noise_has_its_deviation(strength):
    noise = corrupted(torch.full((20, 3, 32, 32), 0.5), "noise", strength, seeded()) - 0.5
    assert noise.std().item() == pytest.approx(SIGMA["noise"][strength - 1], rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.001)


def test_noise_does_not_depend_on_the_precision():
    x = pictures()
    torch.testing.assert_close(
        corrupted(x, "noise", 2, seeded()).double(), corrupted(x.double(), "noise", 2, seeded()), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("strength", range(1, 6))
def test_blur_is_a_gaussian_filter(strength):
    x = pictures(2, size=9).double()
    sigma = SIGMA["blur"][strength - 1]
    # What torch calls reflect, scipy calls mirror.
    expected = gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="mirror", truncate=4)
    torch.testing.assert_close(corrupted(x, "blur", strength, seeded()), torch.from_numpy(expected))


@pytest.mark.parametrize("size", [(5, 8), (32, 32)])
def test_blur_of_a_constant_is_the_constant(size):
    x = torch.tensor([0.0, 0.3, 1.0])[:, None, None].expand(2, 3, *size)
    torch.testing.assert_close(corrupted(x, "blur", 5, seeded()), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strength", range(1, 6))
def test_blur_keeps_the_mean(strength):
    # Exactly so where the edge is empty; mirroring counts the pixels next to an edge twice, and the edge once.
    x = torch.zeros(4, 3, 32, 32)
    x[:, :, 9:-9, 9:-9] = torch.rand(4, 3, 14, 14, generator=seeded())
    means = corrupted(x, "blur", strength, seeded()).mean(dim=(-2, -1))
    torch.testing.assert_close(means, x.mean(dim=(-2, -1)))
    x = pictures()
    torch.testing.assert_close(corrupted(x, "blur", strength, seeded()).mean(), x.mean(), rtol=0, atol=0.003)


@pytest.mark.parametrize("strength", range(1, 6))
def test_contrast_is_lost_around_the_mean(strength):
    x = pictures()
    made = corrupted(x, "contrast", strength, seeded())
    torch.testing.assert_close(made.mean(dim=(-2, -1)), x.mean(dim=(-2, -1)))
    torch.testing.assert_close(made.std(dim=(-2, -1)), FACTOR[strength - 1] * x.std(dim=(-2, -1)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_device_sees_the_same(kind):
    x = pictures()
    made = corrupted(x.cuda(), kind, 5, seeded())
    assert made.is_cuda
    torch.testing.assert_close(made.cpu(), corrupted(x, kind, 5, seeded()), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"a generator on cuda.*give torch\.Generator\(\)"):
        corrupted(x.cuda(), kind, 5, torch.Generator("cuda"))


def test_mistakes():
    x = pictures()
    with pytest.raises(ValueError, match="there is no corruption 'fog'; the known ones are noise, blur, contrast"):
        corrupted(x, "fog", 1, seeded())
    for strength in (0, 6, -1, 1.0, "3"):
        with pytest.raises(ValueError, match="whole number from 1 to 5"):
            corrupted(x, "noise", strength, seeded())
    with pytest.raises(ValueError, match=r"\[n, C, H, W\].*got torch.float32 \[3, 32, 32\]"):
        corrupted(x[0], "noise", 1, seeded())
    with pytest.raises(ValueError, match=r"bytes divided by 255; got torch\.uint8"):
        corrupted((x * 255).byte(), "noise", 1, seeded())
    for wrong in (x - 0.5, x * 2, torch.full_like(x, torch.nan)):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            corrupted(wrong, "contrast", 1, seeded())
    with pytest.raises(ValueError, match="needs images of at least 5 × 5 pixels; got 4 × 8"):
        corrupted(x[..., :4, :8], "blur", 5, seeded())
