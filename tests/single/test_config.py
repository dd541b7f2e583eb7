"""Settings: which are accepted, which are refused and how, and which tensors they select."""

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rate": 0.5}, ValueError, "rate must be at least 1"),
        ({"rate": float("nan")}, ValueError, "rate must be at least 1"),
        ({"rate": "100"}, TypeError, "rate must be a number"),
        ({"rate": True}, TypeError, "rate must be a number"),
        ({"rates": {"conv*": 0}}, ValueError, r"rates\['conv\*'\] must be at least 1"),
        ({"rates": ["conv*"]}, TypeError, "rates must map"),
        ({"min_numel": float("inf")}, TypeError, "min_numel must be a whole number"),
        ({"beta": 0}, ValueError, r"beta must be in \(0, 1\]"),
        ({"nu": 0}, ValueError, r"nu must be in \(0, 1\].*1 leaves the optimizer as it is"),
        ({"min_numel": -1}, ValueError, "min_numel must be at least 0"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps must be a whole number"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1"),
        ({"selection": "best"}, ValueError, "selection must be one of 'lanes', 'exact'"),
        ({"leader": "random"}, ValueError, "leader must be one of 'cyclic', 'staggered'"),
        ({"residue_dtype": "float16"}, ValueError, "residue_dtype must be one of"),
        ({"lookahead": 1}, TypeError, "lookahead must be True or False"),
        ({"dense": "head.*"}, TypeError, r"such as \['head.\*'\]"),
        ({"dense": 3}, TypeError, "dense must be a list of globs"),
        ({"warmup_rate": 4}, ValueError, "a schedule does the same: rate={0: 4, 300: 16}"),
        ({"rate": "fast"}, TypeError, "rate must be a number, a schedule such as"),
        ({"rate": {300: 16}}, ValueError, "from step 0 on, such as {0: 4, 300: 16}, not {300"),
        ({"rate": {0: 4, 2.5: 16}}, TypeError, "a step of rate must be a whole number, not 2.5"),
        ({"rate": {0: 0.5}}, ValueError, r"rate\[0\] must be at least 1 and finite, not 0.5"),
        ({"rate": "auto", "bits": 3}, ValueError, "chooses by itself what bits=3 would set"),
        ({"rate": "auto", "lookahead": True}, ValueError, "what lookahead=True would set"),
        ({"rate": 1, "bits": 4, "selection": "exact"}, ValueError, "has nothing to choose where"),
        ({"rate": 3 + 0j}, TypeError, "rate must be a number"),
        ({"beta": float("nan")}, ValueError, r"beta must be in \(0, 1\], not nan"),
        ({"flush": 1}, TypeError, "flush must be True or False, not 1"),
        ({"beta": "small"}, TypeError, "beta must be a number, not 'small'"),
        ({"rates": {"conv*": "fast"}}, TypeError, r"rates\['conv\*'\] must be a number"),
        ({"min_numel": False}, TypeError, "min_numel must be a whole number"),
        ({"bucket_bytes": "25M"}, TypeError, "bucket_bytes must be a whole number, not '25M'"),
        (
            {"dense": ["auto:output"]},
            ValueError,
            r"no longer accept 'auto:output': name the output layer, .* such as 'fc\.\*'",
        ),
        ({"rates": {"auto:first": 8}}, ValueError, "no longer accept 'auto:first': name the"),
        ({"bits": 9}, ValueError, "bits must be from 2 to 8, or 32"),
        ({"warmup_step": 5}, ValueError, "no setting warmup_step; did you mean warmup_steps"),
        ({"zzz": 5}, ValueError, "the settings are rate, beta"),
        ({"wire_dtype": "float16"}, ValueError, "no longer travel in float16. Give bits=8"),
        ({"planned_steps": 9}, ValueError, "it is called total_steps now"),
        ({"local_steps": 4}, ValueError, "that is an argument of DistributedOptimizer"),
        ({"beta": 1.1}, ValueError, r"beta must be in \(0, 1\], not 1.1"),
        ({"nu": 1.1}, ValueError, r"nu must be in \(0, 1\], not 1.1"),
        ({"rate": float("inf")}, ValueError, "rate must be at least 1 and finite, not inf"),
        ({"outliers": 0.5}, ValueError, "outliers must be at least 1 and finite, or None, not 0.5"),
        ({"outliers": float("inf")}, ValueError, "outliers must be at least 1 and finite"),
        ({"total_steps": 0}, ValueError, "total_steps must be at least 1, not 0"),
        ({"bits": 1}, ValueError, "bits must be from 2 to 8, or 32"),
        ({"rate": "auto", "warmup_steps": 5}, ValueError, "what warmup_steps=5 would set"),
        ({"rate": "auto", "selection": "exact"}, ValueError, "has nothing to choose where"),
    ],
)
def test_what_cannot_work_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        ScaleComConfig().replace(**fields)


def test_environment_overrides_file_overrides_defaults(tmp_path, monkeypatch):
    path = tmp_path / "scalecom.yaml"
    path.write_text("rate: 50\nbeta: 0.1\ndense: ['head.*']\nrates: {'conv*': 20}\n")
    monkeypatch.setenv("SCALECOM_BETA", "0.3")
    monkeypatch.setenv("SCALECOM_DENSE", "fc.*, embed.*")
    monkeypatch.setenv("SCALECOM_LOOKAHEAD", "true")
    monkeypatch.setenv("SCALECOM_MIN_NUMEL", "512")
    config = ScaleComConfig.from_file(path)
    assert (config.rate, config.beta, config.lookahead) == (50, 0.3, True)
    assert config.dense == ("fc.*", "embed.*")
    assert config.rates == {"conv*": 20}
    assert config.leader == "cyclic"
    assert ScaleComConfig.from_env().rate is None
    monkeypatch.setenv("SCALECOM_DENSE", "*.bias,head.*")  # in YAML, a star begins an alias
    assert ScaleComConfig.from_env().dense == ("*.bias", "head.*")
    monkeypatch.setenv("SCALECOM_DENSE", "['a,b', 'c']")
    assert ScaleComConfig.from_env().dense == ("a,b", "c")
    monkeypatch.setenv("SCALECOM_RATES", "{'a': 3}")
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")  # no result depends on it
    assert ScaleComConfig.from_env().rates == {"a": 3}


@pytest.mark.parametrize(
    ("variable", "text", "error", "message"),
    [
        ("SCALECOM_RATE", "fast", TypeError, "rate must be a number, a schedule .*not 'fast'"),
        ("SCALECOM_OUTLIERS", "x", TypeError, "outliers must be a number, not 'x'"),
        ("SCALECOM_BETA", "[", ValueError, r"SCALECOM_BETA='\[' is not a value in YAML"),
        ("SCALECOM_RATES", "{conv: 0}", ValueError, r"rates\['conv'\] must be at least 1"),
        ("SCALECOM_WARMUP", "3", ValueError, "WARMUP; did you mean SCALECOM_WARMUP_STEPS"),
        ("SCALECOM_ZZZ", "3", ValueError, "ZZZ; the settings are SCALECOM_RATE, SCALECOM_BETA"),
    ],
)
def test_the_environment_is_checked_like_code(variable, text, error, message, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(error, match=message) as refusal:
        ScaleComConfig.from_env()
    assert variable in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("rate: 0.5", ValueError, "rate must be at least 1.*not 0.5"),
        ("wire_dtype: float16", ValueError, "scalecom.yaml sets wire_dtype.*Give bits=8"),
        ("rate: 50\nBeta: 0.1", ValueError, "scalecom.yaml sets Beta; did you mean beta"),
        ("3: 4", ValueError, "scalecom.yaml sets 3; the settings are rate"),
        ("", TypeError, "scalecom.yaml must hold settings as 'name: value' lines, not None"),
        ("rate: 50\n beta: 0.1", ValueError, "scalecom.yaml is not YAML"),
        ("rate: !!python/object/apply:os.getcwd []", ValueError, "scalecom.yaml is not YAML"),
        ("\x89PNG\xff\x00", ValueError, "scalecom.yaml is not YAML"),
    ],
)
def test_a_file_is_checked_like_code(text, error, message, tmp_path):
    path = tmp_path / "scalecom.yaml"
    with pytest.raises(FileNotFoundError, match="scalecom.yaml"):
        ScaleComConfig.from_file(path)
    path.write_text(text, encoding="latin-1")
    with pytest.raises(error, match=message):
        ScaleComConfig.from_file(path)


def test_equal_settings_are_equal():
    a = ScaleComConfig(rates={"a": 2}, dense=["b"])
    b = ScaleComConfig(rates={"a": 2.0}, dense=(name for name in "b"))
    assert a == b
    assert hash(a) == hash(b)
    assert a != ScaleComConfig()
    in_order, in_another = ({"a": 2, "b": 3}, {"b": 3, "a": 2})  # the first match wins
    assert ScaleComConfig(rates=in_order) != ScaleComConfig(rates=in_another)
    numpy = ScaleComConfig(rate=np.int64(50), min_numel=np.int32(7))
    assert numpy == ScaleComConfig(rate=50, min_numel=7)
    assert (type(numpy.rate), type(numpy.min_numel)) == (float, int)
    assert ScaleComConfig(**a.to_dict()) == a


SHAPES = {
    "embed.weight": (1000, 8),
    "conv.weight": (64, 64, 3, 3),
    "conv.bias": (64,),
    "norm.weight": (4096,),
    "head.weight": (10, 4096),
    "head.bias": (10,),
    "final_norm.weight": (4096,),
}
LARGE = (99, 99)


@pytest.mark.parametrize(
    ("settings", "shapes", "rates"),
    [
        ({}, SHAPES, [8, 8, 1, 8, 8, 1, 8]),
        ({"rate": 30}, SHAPES, [30, 30, 1, 30, 30, 1, 30]),
        ({"bits": 32}, SHAPES, [100, 100, 1, 100, 100, 1, 100]),
        (
            {
                "rates": {"conv.*": 25, "*.weight": 400},
                "dense": ["embed.*", "head.*", "norm.*"],
            },
            SHAPES,
            [1, 25, 1, 1, 1, 1, 400],
        ),
        (
            {"rates": {"head.*": 8, "embed.*": 20, "*.weight": 50}, "dense": []},
            SHAPES,
            [20, 50, 1, 50, 8, 1, 50],
        ),
        ({"min_numel": 0}, {"empty": (0,), "one": (1,)}, [1, 8]),
        ({"rate": 1, "selection": "exact"}, {"w": LARGE}, [1]),
        ({"rate": 1, "rates": {"a": 4}}, {"a": LARGE, "b": LARGE}, [4, 1]),
    ],
)
def test_which_tensors_are_compressed(settings, shapes, rates):
    config = ScaleComConfig(**settings)
    for found in (config.rates_for(shapes), config.resolved().rates_for(shapes)):
        assert list(found.items()) == list(zip(shapes, rates, strict=True))


def test_a_schedule_is_in_the_order_of_its_steps_and_may_begin_with_a_warm_up():
    stages = ScaleComConfig(rate={300: 16, 0: 4}).stages
    assert stages == [(0, (4.0, 4)), (300, (16.0, 4))]
    for given, warmup in ((0, 5), (9, 9)):
        config = ScaleComConfig(rate={0: 1, 5: 8}, warmup_steps=given).resolved()
        assert (config.rate, config.warmup_steps) == (8, warmup)


def test_the_defaults_are_those_the_study_supports():
    config = ScaleComConfig().resolved()
    assert (config.bits, config.rate, config.dense) == (4, 8, ())
    assert (config.beta, config.nu, config.warmup_steps) == (0.2, 1, 0)
    mixed = ScaleComConfig().resolved(mixes_momentum=True)
    assert (mixed.nu, mixed.beta) == (None, 1)
    assert ScaleComConfig(nu=1).resolved(mixes_momentum=True).beta == 0.2
    assert ScaleComConfig(beta=0.5).resolved(mixes_momentum=True).beta == 0.5
    assert config.flush
    assert config.replace(beta=0.1).flush, "what flushes does not depend on beta"
    assert (config.leader, config.lookahead, config.selection) == ("cyclic", False, "lanes")
    # Values are sent unquantised, as in the paper.
    for whole in (ScaleComConfig(bits=32).resolved(), ScaleComConfig().resolved(knows_bits=False)):
        assert (whole.bits, whole.rate) == (32, 100)
    assert ScaleComConfig(rate=50).resolved().bits == 4
