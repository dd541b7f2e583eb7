"""What travels instead of a choice: the same bytes as PyTorch's faces send."""

import numpy as np
import pytest
import tensorflow as tf

from scalecom_hvd.bucket_layout import Layout, pack_halves
from scalecom_hvd.lanes import geometry
from scalecom_hvd.tensorflow.packing import pack_choice, unpack_choice


@pytest.mark.parametrize("rates", [[16], [16, 300], [7, 2.5, 40_000], [100], [17, 300]], ids=str)
@pytest.mark.parametrize("numel", [1, 2, 4001])
@pytest.mark.parametrize("has_scales", [False, True])
def test_narrow_offsets_travel_two_to_a_byte(rates, numel, has_scales):
    shapes = {f"t{i}": geometry(numel, rate, "lanes") for i, rate in enumerate(rates)}
    layout = Layout(shapes, has_scales)
    cut = layout.offsets_bytes - layout.narrow_bytes
    random = np.random.default_rng(0)
    choice = random.integers(0, 256, layout.offsets_bytes, np.uint8)
    choice[cut:] %= 16
    message = pack_choice(tf.constant(choice), layout).numpy()
    packed = np.zeros(-(-layout.narrow_bytes // 2), np.uint8)
    pack_halves(choice[cut:], packed)
    np.testing.assert_array_equal(message, np.concatenate([choice[:cut], packed]))
    np.testing.assert_array_equal(unpack_choice(tf.constant(message), layout), choice)
    nothing = pack_choice(tf.zeros([0], tf.uint8), layout)
    assert nothing.shape == (0,)
    for answers in (nothing, np.tile(message, 2)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="not exactly one leader"):
            unpack_choice(tf.constant(answers), layout)
