"""The packed forms of choices and of integers are the same as those that PyTorch's faces send."""

import numpy as np
import pytest
import tensorflow as tf

from scalecom_hvd.bucket_layout import Layout, pack_halves
from scalecom_hvd.integers import field_bits, words_of
from scalecom_hvd.lanes import geometry
from scalecom_hvd.tensorflow import bucket


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
    message = bucket.pack_choice(tf.constant(choice), layout).numpy()
    packed = np.zeros(-(-layout.narrow_bytes // 2), np.uint8)
    pack_halves(choice[cut:], packed)
    np.testing.assert_array_equal(message, np.concatenate([choice[:cut], packed]))
    np.testing.assert_array_equal(bucket.unpack_choice(tf.constant(message), layout), choice)
    nothing = bucket.pack_choice(tf.zeros([0], tf.uint8), layout)
    assert nothing.shape == (0,)
    for answers in (nothing, np.tile(message, 2)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="exactly one leader"):
            bucket.unpack_choice(tf.constant(answers), layout)


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("levels", [1, 3, 127])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 5), (3, 1000), (64, 999), (1024, 7)])
def test_the_words_of_ranks_add_up(n, k, levels, is_elastic):
    random = np.random.default_rng(0)
    few = random.integers(-levels, levels + 1, (min(n, 8), k)).astype(np.int8)
    few[:, 0] = levels  # this gives the largest sum
    few[:, -1] = -levels
    size = tf.constant(n) if is_elastic else n
    words = [bucket.pack_integers(tf.constant(own), k, levels, size).numpy() for own in few]
    assert words[0].shape == (words_of(k, levels, n),)
    first = words[0][0] & 2 ** field_bits(levels, n) - 1
    assert first == int(few[0, 0]) + levels
    total = np.resize(words, (n, len(words[0]))).sum(0, dtype=np.int32)  # ranks repeat the few
    sums = bucket.unpack_integers(tf.constant(total), k, levels, size)
    np.testing.assert_array_equal(sums, np.resize(few, (n, k)).sum(0, dtype=np.int32))
