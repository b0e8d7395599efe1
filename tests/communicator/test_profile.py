"""Profiles of groups: what they predict, which way they choose, and their files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from qccl.base.errors import ArgumentError
from qccl.collectives import spec_of_plan
from qccl.communicator.profile import MARGIN, CallKind, Curve, GroupProfile, Prediction, fastest

#: seconds of a call and of an element, by codec and way
AFFINE = {
    ("none", "one_shot"): (10e-6, 4e-9),
    ("none", "two_round"): (20e-6, 2e-9),
    ("minmax8", "one_shot"): (11e-6, 1e-9),
    ("minmax8", "two_round"): (22e-6, 0.5e-9),
}
COUNTS = (256, 2048, 16384, 131072)
NODES = (0, 1, 2, 3)


def profile(affine=None, collective="allreduce", dtype="float32", nodes=NODES):
    curves = {
        label: Curve(tuple((count, call + element * count) for count in COUNTS), element * 1e9)
        for label, (call, element) in (affine or AFFINE).items()
    }
    return GroupProfile(nodes, "ucx").with_times(CallKind(collective, dtype, "minmax8"), curves)


def specs(count, collective="allreduce", codecs=("none", "minmax8"), **parameters):
    return [spec_of_plan(collective, count, "float32", codec, None, parameters) for codec in codecs]


def seconds(codec, way, count):
    call, element = AFFINE[codec, way]
    return call + element * count


@pytest.mark.parametrize("count", [1, 256, 257, 5000, 131072, 131073, 1 << 24])
def test_affine_times_are_predicted_exactly(count):
    prediction = Prediction(profile().times[CallKind("allreduce", "float32", "minmax8")])
    for way in ("one_shot", "two_round"):
        expected = seconds("minmax8", way, max(count, COUNTS[0]))
        assert math.isclose(prediction.seconds(("minmax8", way), count), expected, rel_tol=1e-9)


def test_beyond_the_curves_all_ways_of_a_codec_have_the_least_time_of_a_byte():
    """A disturbed last point makes no call of another size seem slower."""
    plain, encoded = "none", "minmax8"
    curves = {
        (plain, "one_shot"): Curve(((100, 1.0), (1000, 1.9)), 2.0),  # 0.5 ms a byte
        (plain, "two_round"): Curve(((100, 1.0), (1000, 7.3)), 1.0),  # disturbed: 7 ms a byte
        (encoded, "one_shot"): Curve(((100, 1.0), (1000, 1.0)), 0.5),  # nothing: less than without a codec
    }
    prediction = Prediction(curves)
    assert math.isclose(prediction.seconds((plain, "two_round"), 2000), 7.3 + 0.5e-3 * 1000)
    assert math.isclose(prediction.seconds((encoded, "one_shot"), 2000), 1.0 + 0.5e-3 * 0.5 * 1000)


def test_calls_that_follow_each_other_take_the_time_of_their_bytes():
    """A limiter lets short calls pass at once after a pause: 1 ms, whatever they send. Then a byte takes 1 ms."""
    curves = {
        ("none", "one_shot"): Curve(((1, 1e-3), (100, 1e-3), (1000, 4.0)), 4.0),
        ("minmax8", "one_shot"): Curve(((1, 1e-3), (100, 1e-3), (1000, 1.0)), 1.0),
    }
    prediction = Prediction(curves)
    byte = (4.0 - 1e-3) / 900 / 4
    assert math.isclose(prediction.seconds(("none", "one_shot"), 100), byte * 4 * 100)
    assert math.isclose(prediction.seconds(("minmax8", "one_shot"), 100), byte * 100)


def test_one_point_alone_says_nothing_about_bytes():
    kind = "none"
    curves = {(kind, "one_shot"): Curve(((100, 1.0),), 1.0), (kind, "two_round"): Curve(((100, 1.0), (1000, 1.9)), 1.0)}
    assert math.isclose(Prediction(curves).seconds((kind, "one_shot"), 1100), 2.0)


@pytest.mark.parametrize("count", [1, 100, 1000, 10_000, 100_000, 1_000_000, 1 << 24])
def test_the_choice_is_the_fastest_way_or_within_the_margin_of_it(count):
    choice = fastest(profile(), specs(count), NODES)
    times = {(codec, way): time for codec, way, time in choice.predicted}
    chosen = times[choice.spec.codec.spec(), choice.spec.algorithm]
    plain = min(time for (codec, _), time in times.items() if codec == "none")
    assert len(times) == 4
    assert chosen <= plain
    assert chosen * (1 - MARGIN) <= min(times.values())
    assert [time for _, _, time in choice.predicted] == sorted(times.values())


@pytest.mark.parametrize("saved, codec", [(MARGIN - 0.001, "none"), (MARGIN + 0.001, "minmax8")])
def test_a_codec_must_save_the_margin(saved, codec):
    affine = {("none", "one_shot"): (1e-3, 1e-12), ("minmax8", "one_shot"): (1e-3 * (1 - saved), 1e-12)}
    assert fastest(profile(affine), specs(1000), NODES).spec.codec.spec() == codec


def test_a_named_algorithm_is_kept():
    choice = fastest(profile(), specs(1 << 20, algorithm="one_shot"), NODES)
    assert choice.spec.algorithm == "one_shot"
    assert {way for _, way, _ in choice.predicted} == {"one_shot"}


def test_two_levels_compete_where_ranks_share_nodes():
    fast = {**AFFINE, ("minmax8", "two levels"): (1e-6, 1e-12)}
    choice = fastest(profile(fast, nodes=(0, 0, 1, 1)), specs(5000), (0, 0, 1, 1))
    assert choice.spec.name == "hierarchical_allreduce"
    assert fastest(profile(fast), specs(5000), NODES).spec.name == "allreduce"


def test_a_codec_without_times_takes_those_of_as_many_plain_bytes():
    """minmax4 has 0.508 bytes an element, so 1 Mi elements are as 133,120 plain ones: two_round is faster."""
    (spec,) = specs(1 << 20, codecs=("minmax4",))
    choice = fastest(profile(), [spec], NODES)
    assert choice.spec.algorithm == "two_round"
    assert fastest(profile(), specs(1 << 10, codecs=("minmax4",)), NODES).spec.algorithm == "one_shot"


@pytest.mark.parametrize("count, way", [(1000, "one_shot"), (2000, "two_round")])
def test_beyond_the_curves_fewer_bytes_win_if_times_are_nearly_equal(count, way):
    curves = {
        ("none", "one_shot"): Curve(((100, 1.0), (1000, 1.01)), 2.0),
        ("none", "two_round"): Curve(((100, 1.05), (1000, 1.06)), 1.0),
    }
    times = GroupProfile(NODES, "ucx").with_times(CallKind("allreduce", "float32", "none"), curves)
    assert fastest(times, specs(count, codecs=("none",)), NODES).spec.algorithm == way


def test_a_kind_without_times_is_not_chosen():
    assert fastest(profile(), specs(1000, "broadcast"), NODES) is None
    assert fastest(profile(), specs(1000, "all_to_all"), NODES) is None


def test_a_file_gives_the_same_choices(tmp_path):
    path = tmp_path / "group.json"
    saved = profile()
    saved.save(path)
    loaded = GroupProfile.load(path)
    assert loaded == saved and loaded.digest() == saved.digest()
    assert fastest(loaded, specs(5000), NODES) == fastest(saved, specs(5000), NODES)
    slower = {way: (2 * call, element) for way, (call, element) in AFFINE.items()}
    assert profile(slower).digest() != saved.digest()


def changed(key, value):
    document = json.loads(json.dumps(profile().as_dict()))
    for curve in document["curves"] if key in document["curves"][0] else [document]:
        curve[key] = value
    return json.dumps(document)


HOSTILE = {
    "empty": "",
    "no text": b"\xff\x00\xfe",
    "no object": "[1]",
    "null": "null",
    "a number": "7",
    "deep": "[" * 100_000,
    "version": changed("qccl profile", 2),
    "nodes": changed("nodes", ["a"]),
    "nodes is a number": changed("nodes", 4),
    "a bool": changed("nodes", [True]),
    "hardware": changed("hardware", 3),
    "transport": changed("transport", 3),
    "a transport that controls a terminal": changed("transport", "\x1b[2J"),
    "curves": changed("curves", 3),
    "no points": changed("points", []),
    "points": changed("points", [[1, 2, 3]]),
    "not ascending": changed("points", [[2, 1.0], [1, 1.0]]),
    "twice": changed("points", [[2, 1.0], [2, 1.0]]),
    "NaN": changed("points", [[2, math.nan]]),
    "infinite": changed("points", [[2, math.inf]]),
    "zero": changed("points", [[2, 0]]),
    "negative": changed("points", [[2, -1.0]]),
    "huge": changed("points", [[2, 10**400]]),
    "a time that is a bool": changed("points", [[2, True]]),
    "a time that is a text": changed("points", [[2, "1"]]),
    "a count of a float": changed("points", [[2.5, 1.0]]),
    "a count that is too large": changed("points", [[1 << 63, 1.0]]),
    "density": changed("density", 0),
    "codec": changed("codec", "nocodec9"),
    "dtype": changed("dtype", "float99"),
    "large": json.dumps({"text": "x" * (1 << 20)}),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "group.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=r"is not a group's profile .*comm\.profile\(\)\.save\(\)"):
        GroupProfile.load(path)


@pytest.mark.parametrize("nodes, transport", [((0, 1, 2), "ucx"), ((0, 0, 1, 1), "ucx"), (NODES, "mpi")])
def test_the_profile_of_another_group_is_refused(nodes, transport):
    profile().check_group(GroupProfile(NODES, "ucx"))
    with pytest.raises(ArgumentError, match="the profile is of a group with 4 ranks"):
        profile().check_group(GroupProfile(nodes, transport))


def test_the_profile_of_other_hardware_is_refused(tmp_path):
    saved = replace(profile(), hardware="2 x H100, NCCL 2.28.3")
    saved.save(tmp_path / "profile.json")
    loaded = GroupProfile.load(tmp_path / "profile.json")
    assert loaded == saved and loaded.digest() != profile().digest()
    loaded.check_group(replace(saved, times={}))
    for other in (profile(), replace(saved, hardware="2 x H100, NCCL 2.29.0")):
        with pytest.raises(ArgumentError, match=r"over ucx \(2 x H100, NCCL 2.28.3\), and this group has 4 ranks"):
            loaded.check_group(other)


@pytest.mark.parametrize("left_out", sorted(profile().times[CallKind("allreduce", "float32", "minmax8")]))
def test_a_profile_that_lacks_a_way_is_refused(left_out):
    whole = profile()
    (kind,) = whole.times
    curves = {label: curve for label, curve in whole.times[kind].items() if label != left_out}
    with pytest.raises(ArgumentError, match=f"none of {left_out[0]} by {left_out[1]}; save another"):
        whole.with_times(kind, curves).check_group(GroupProfile(NODES, "ucx"))
