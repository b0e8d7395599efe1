"""Files of states: what is saved comes back, and no file or state that someone made up does anything but an error."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import zipfile

import ml_dtypes
import numpy as np
import pytest
from made_up_states import assert_refused_or_loaded, saved
from thread_ranks import on_ranks

import qccl


def trained(size: int = 2) -> list[dict]:
    """The states of ranks that have residuals and momenta."""

    def run(comm):
        for step in range(3):
            x = np.random.default_rng([comm.rank, step]).standard_normal(300, np.float32)
            comm.quantized_allreduce(x, codec="minmax4:bucket=64+ef+nesterov:mu=0.5", op="avg", key="w", lr=0.5)
            comm.quantized_allreduce(x, codec="randomk:k=0.3+ef", key="v")
        return comm.state_dict()

    return qccl.run_ranks(size, run)


def load(data: bytes):
    return qccl.load_state(io.BytesIO(data))


def test_what_is_saved_comes_back(tmp_path):
    state = {
        "calls": 3,
        "keys": {'layer\'s "w"': {"lr": None, "values": {"residual": np.arange(5, dtype=np.float32)}}},
        "replicas": {1: np.float64([[1, 2], [3, 4]]).T, 2: np.zeros((0, 3), np.float16)},
        "model": np.arange(4).astype(ml_dtypes.bfloat16),
        "list": [True, 2.5, "x", [np.int64(7)], {}],
    }
    path = tmp_path / "state.npz"
    qccl.save_state(path, state)
    found = qccl.load_state(path)
    assert repr(found) == repr(state | {"list": [True, 2.5, "x", [7], {}]})
    assert found["model"].dtype == state["model"].dtype and found["replicas"][2].dtype == np.float16
    assert "state" in np.load(path, allow_pickle=False)
    objects = ({"a": object()}, {"a": np.array(["x"])}, {"a": {1, 2}}, {"a": np.array([object()])})
    for wrong in (*objects, {(1, 2): 3}, {"a": [{(): 1}]}):
        with pytest.raises(qccl.ArgumentError, match="the state contains a"):
            qccl.save_state(io.BytesIO(), wrong)
    with pytest.raises(FileNotFoundError):
        qccl.load_state(tmp_path / "none.npz")
    for wrong in ([1], "abc", None, np.ones(3)):  # load_state() would refuse the file
        with pytest.raises(qccl.ArgumentError, match="the state must be a dict, such as"):
            qccl.save_state(tmp_path / "wrong.npz", wrong)
    assert not (tmp_path / "wrong.npz").exists()


class Payload:
    def __reduce__(self):
        return pytest.fail, ("a file was executed",)


def archive_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def array_of(values, **announced) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values) | announced)
    return file.getvalue() + values.tobytes()


def header_of(text: bytes, version: int = 1, announced: int | None = None) -> bytes:
    """An array without elements, whose header may announce more bytes than it has."""
    count = len(text) if announced is None else announced
    return np.lib.format.magic(version, 0) + count.to_bytes(2 if version == 1 else 4, "little") + text


def with_method(data: bytes, method: int) -> bytes:
    """The archive, whose first part claims to be compressed in this way."""
    changed, central = bytearray(data), data.index(b"PK\1\2")
    changed[8:10] = changed[central + 10 : central + 12] = method.to_bytes(2, "little")
    return bytes(changed)


def json_of(text: str) -> bytes:
    return array_of(np.frombuffer(text.encode(), np.uint8))


def test_files_of_others():
    objects = io.BytesIO()
    np.save(objects, np.array([Payload()], object), allow_pickle=True)
    deflated = io.BytesIO()
    np.savez_compressed(deflated, state=np.zeros(1 << 20, np.uint8))
    ones, text = np.ones(3, np.float32), '{"dict": [["a", {"array": "0"}]]}'
    assert load(archive_of(state=json_of(text), **{"0": array_of(ones)}))["a"].tolist() == [1, 1, 1]
    for wrong in (
        pickle.dumps(Payload()),
        objects.getvalue(),
        deflated.getvalue(),
        archive_of(state=objects.getvalue()),
        archive_of(state=json_of(text), **{"0": objects.getvalue()}),
        archive_of(state=json_of(text)),
        archive_of(state=json_of(text), **{"0": array_of(ones, shape=(1 << 58,))}),
        archive_of(state=json_of(text), **{"0": array_of(ones, shape=(-1, -3))}),
        archive_of(state=json_of(text), **{"0": array_of(ones, descr="|O")}),
        archive_of(state=json_of("[" * 100_000)),
        archive_of(state=json_of('{"dict": [[{"list": []}, 1]]}')),
        archive_of(state=json_of('{"dict": 3}')),
        archive_of(state=json_of('{"call": "os.system"}')),
        archive_of(state=json_of("3")),
        archive_of(state=json_of("9" * 5000)),
        *(archive_of(state=header_of(b"(", version)) for version in (1, 2, 3)),
        *(archive_of(state=header_of(b"{'descr': '<f4', ", version)) for version in (1, 2, 3)),
        *(archive_of(state=header_of(b"{", version, announced=100)) for version in (1, 2, 3, 4)),
        with_method(archive_of(state=b"\x09\x14\x05\x00" + b"\xff" * 20), zipfile.ZIP_LZMA),  # invalid options of LZMA
        *(with_method(archive_of(state=json_of("{}")), method) for method in (8, 12, 14, 99)),
        b"",
    ):
        with pytest.raises(qccl.ArgumentError):
            load(wrong)


def damaged(good: bytes, rng: random.Random, where: int) -> bytes:
    """Some of the first ``where`` bytes are others, or the end is missing."""
    data = bytearray(good)
    if rng.random() < 0.2:
        del data[rng.randrange(where) :]
    else:
        for _ in range(rng.choice((1, 1, 5))):
            data[rng.randrange(where)] = rng.randrange(256)
    return bytes(data)


def test_damaged_files():
    """A changed or missing byte gives an error, or a state that load_state_dict() checks."""
    good, rng = saved(trained()[0]), random.Random(0)
    for _ in range(400):
        with contextlib.suppress(qccl.ArgumentError):
            assert isinstance(load(damaged(good, rng, len(good))), dict)


@pytest.mark.filterwarnings("ignore")  # NumPy's, of headers that Python 2 may have written
def test_damaged_arrays_with_the_right_checksum():
    """NumPy's parser sees them, which of a damaged file it hardly does: the archive's checksums find that first."""
    with zipfile.ZipFile(io.BytesIO(saved(trained()[0]))) as archive:
        good = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
    rng = random.Random(0)
    for _ in range(1000):
        name = rng.choice(list(good))
        header = len(good[name]) if rng.random() < 0.1 else 80  # its text; spaces and the elements follow
        with contextlib.suppress(qccl.ArgumentError):
            assert isinstance(load(archive_of(**good | {name: damaged(good[name], rng, header)})), dict)


def test_states_that_someone_made_up():
    states = trained()

    def run(comm):
        good = states[comm.rank]
        comm.load_state_dict(good)
        wanted = saved(comm.state_dict())
        assert_refused_or_loaded(comm.load_state_dict, good, lambda: saved(comm.state_dict()) == wanted)
        assert saved(comm.state_dict()) == wanted

    qccl.run_ranks(2, run)


@on_ranks(2)
def test_states_of_diloco_and_of_decentralized_training_that_someone_made_up(comm):
    params = [np.ones((4, 3), np.float32), np.ones(5, np.float16)]
    outer = qccl.DiLoCo(comm, params, codec="minmax4+ef")
    model = qccl.LowPrecisionDecentralized(comm, np.ones(20, np.float32))
    streaming = qccl.DiLoCo(comm, params, fragments=2, period=2, delay=1, key="streaming")  # one is under way
    for each, step in (
        *((outer, outer.step), (streaming, streaming.after_local_step)),
        (model, lambda: model.step(np.full(20, 0.5, np.float32), 0.1)),
    ):
        step()
        good = load(saved(each.state_dict()))
        each.load_state_dict(good)
        wanted = saved(each.state_dict())
        assert wanted == saved(good)
        assert_refused_or_loaded(
            each.load_state_dict, good, lambda wanted=wanted, each=each: saved(each.state_dict()) == wanted
        )
